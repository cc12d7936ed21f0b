"""The routes that do not generate: models, health, metrics, tokens, the status page."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import HTMLResponse, Response

from minifloat._version import __version__
from minifloat.serve.server.answers import Health, ModelCard, ModelList, Text, Tokens, Version
from minifloat.serve.server.errors import APIError
from minifloat.serve.server.openapi import answers, failures, text
from minifloat.serve.server.protocol import DetokenizeRequest, TokenizeRequest
from minifloat.serve.server.service import BoundedRoute, Service, require_json

router = APIRouter(route_class=BoundedRoute, tags=["server"])

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.get("/health", responses=answers(Health) | failures(503))
async def health(request: Request) -> Health:
    """Whether the process is alive and its engine runs. Needs no API key."""
    if not _service(request).engine.alive:
        raise APIError(503, "the engine has stopped", code="stopping")
    return Health()


@router.get("/ready", responses=answers(Health) | failures(503))
async def ready(request: Request) -> Health:
    """Whether the server admits requests."""
    engine = _service(request).engine
    if engine.draining or not engine.alive:
        raise APIError(503, "the server is stopping", code="stopping")
    return Health()


@router.get("/version", responses=answers(Version))
async def version() -> Version:
    """The version of minifloat."""
    return Version(version=__version__)


@router.get("/metrics", response_class=Response, responses=text(_PROMETHEUS, "Prometheus' text format"))
async def metrics(request: Request) -> Response:
    """Counts, gauges and histograms."""
    return Response(_service(request).metrics.text(), headers={"content-type": _PROMETHEUS})


@router.get("/status", responses=failures(401, 403))
async def status(request: Request) -> dict[str, Any]:
    """The data of the page at /: the model, and the last minute."""
    service = _service(request)
    model = service.info.to_dict()
    del model["path"]  # a path of this machine, which clients need not know
    model |= {"name": service.settings.model_name, "chat": service.prompts.has_template}
    return {"version": __version__, "model": model, "now": service.metrics.recent()}


@router.get("/v1/models", responses=answers(ModelList))
async def models(request: Request) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(_service(request))])


@router.get("/v1/models/{name:path}", responses=answers(ModelCard) | failures(404))
async def model(name: str, request: Request) -> ModelCard:
    """The served model, by its name."""
    _service(request).check_model(name)
    return _card(_service(request))


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.settings.model_name, created=service.created, max_model_len=service.info.max_model_len)


@router.post("/tokenize", responses=answers(Tokens, with_body=True), dependencies=[Depends(require_json)])
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """The tokens of a text, or of messages through the chat template."""
    service = _service(request)
    service.check_model(body.model)
    if body.messages is not None:
        tokens = await service.prompts.encode_chat(body.messages, {})
    else:
        tokens = await service.prompts.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens, may_be_empty=True
        )
    pieces = await service.prompts.pieces(tokens) if body.return_token_strs else None
    return Tokens(count=len(tokens), max_model_len=service.info.max_model_len, tokens=list(tokens), token_strs=pieces)


@router.post("/detokenize", responses=answers(Text, with_body=True), dependencies=[Depends(require_json)])
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """The text of tokens, special tokens included."""
    service = _service(request)
    service.check_model(body.model)
    return Text(prompt=await service.prompts.decode(body.tokens))


_PAGE = resources.files("minifloat.serve.server").joinpath("page.html").read_text(encoding="utf-8")


def _policy(page: str) -> str:
    """Return a content security policy that allows the page's own script and style, and requests to this server."""

    def hashes(tag: str) -> str:
        texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_PAGE_HEADERS = {
    "content-security-policy": _policy(_PAGE),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page() -> HTMLResponse:
    """The status page. It holds no data: it requests the data from /status, with a key if one is needed."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)
