"""The routes around those that generate: models, health, metrics, the status page."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import HTMLResponse, Response

from minifloat._version import __version__
from minifloat.serve.server.errors import APIError
from minifloat.serve.server.openapi import answers, failures, text
from minifloat.serve.server.service import BoundedRoute, Service, service_of


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minifloat"
    max_model_len: int
    tool_format: str | None
    thinks: bool
    task: Literal["generate", "embed", "score"]


class ModelList(BaseModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Answer of ``/health`` and ``/ready``."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """Answer of ``/version``."""

    version: str


router = APIRouter(route_class=BoundedRoute, tags=["server"])

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/health", responses=answers(Health) | failures(503))
async def health(request: Request) -> Health:
    """Whether the process is alive and its engine runs. Needs no API key."""
    if not service_of(request).engine.alive:
        raise APIError(503, "the engine has stopped", code="stopping")
    return Health()


@router.get("/ready", responses=answers(Health) | failures(503))
async def ready(request: Request) -> Health:
    """Whether the server admits requests."""
    engine = service_of(request).engine
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
    return Response(service_of(request).metrics.text(), headers={"content-type": _PROMETHEUS})


@router.get("/status", responses=failures(401, 403))
async def status(request: Request) -> dict[str, Any]:
    """The data of the page at /: the model, and the last minute."""
    service = service_of(request)
    model = service.info.to_dict()
    del model["path"]  # a path of this machine, which clients need not know
    model |= {"name": service.settings.model_name, "chat": service.prompts.dialogs.has_template}
    return {"version": __version__, "model": model, "now": service.metrics.recent()}


@router.get("/v1/models", responses=answers(ModelList))
async def models(request: Request) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(service_of(request))])


@router.get("/v1/models/{name:path}", responses=answers(ModelCard) | failures(404))
async def model(name: str, request: Request) -> ModelCard:
    """The served model, by its name."""
    service_of(request).check_model(name)
    return _card(service_of(request))


def _card(service: Service) -> ModelCard:
    dialogs = service.prompts.dialogs
    return ModelCard(
        id=service.settings.model_name,
        created=service.created,
        max_model_len=service.info.max_model_len,
        tool_format=dialogs.tool_format,
        thinks=dialogs.thinks,
        task=service.info.task,  # type: ignore[arg-type]
    )


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
