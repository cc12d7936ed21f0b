"""``/v1/rerank`` and ``/v1/score``: how well texts fit each other, as vLLM, Jina and Cohere name it.

A model that scores gets each pair as one text: through its chat template, if that writes a query and a document, else
one after the other. Of a model that embeds, the score is the cosine of the angle between two vectors.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, model_validator
from starlette.responses import JSONResponse, Response

from minifloat.engine.pooling import Vector, normalized
from minifloat.errors import UsageError
from minifloat.serve.api.fields import Natural, Priority, Strict, Unicode, one_of
from minifloat.serve.api.items import Text
from minifloat.serve.api.vectors import (
    MAX_INPUT_CHARACTERS,
    MAX_INPUTS,
    Caller,
    VectorUsage,
    answer_with_vectors,
    encode_all,
)
from minifloat.serve.dialog.conversation import Conversation
from minifloat.serve.server.errors import FieldError
from minifloat.serve.server.openapi import answers, failures
from minifloat.serve.server.service import BoundedRoute, Service, require_json, service_of


class Document(Strict):
    """A document."""

    text: Text


Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
    one_of(f"a string, or a list of 1 to {MAX_INPUTS}"),
    Unicode,
]


class RerankRequest(Strict):
    """``POST /v1/rerank``."""

    model: str = Field(max_length=512, description="The served model's name, as /v1/models gives it.")
    query: Text
    documents: Annotated[
        list[Annotated[str, Unicode] | Document],
        Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
        one_of(f'1 to {MAX_INPUTS} strings, or objects {{"text": ...}}'),
    ]
    top_n: Natural | None = Field(default=None, description="Documents in the answer; 0: all.")
    return_documents: bool = Field(default=True, description="Whether the answer has the texts.")
    priority: Priority = Field(default=0, description="Of the requests that wait, those of the lowest are next.")

    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class RankedDocument(BaseModel):
    """A document with its score."""

    index: int
    document: Document | None = None
    relevance_score: float


class Ranking(BaseModel):
    """Answer of ``/v1/rerank``, the best document first."""

    id: str
    model: str
    usage: VectorUsage
    results: list[RankedDocument]


class ScoreRequest(Strict):
    """``POST /v1/score``: one text with one or many, or as many with as many."""

    model: str = Field(max_length=512, description="The served model's name, as /v1/models gives it.")
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = Field(default=None, description="The same as text_1.")
    documents: Texts | None = Field(default=None, description="The same as text_2.")
    priority: Priority = Field(default=0, description="Of the requests that wait, those of the lowest are next.")

    @model_validator(mode="after")
    def _has_pairs(self) -> ScoreRequest:
        for first, second in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, first) is None) == (getattr(self, second) is None):
                raise FieldError(first, f"expected either {first} or {second}")
        if len(self.firsts) not in (1, len(self.seconds)):
            raise FieldError("text_1", f"expected 1 text or {len(self.seconds)}, as many as the second ones")
        return self

    @property
    def firsts(self) -> list[str]:
        return _listed(self.text_1 if self.queries is None else self.queries)

    @property
    def seconds(self) -> list[str]:
        return _listed(self.text_2 if self.documents is None else self.documents)


def _listed(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []


class PairScore(BaseModel):
    """The score of a pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class Scores(BaseModel):
    """Answer of ``/v1/score``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: VectorUsage


async def _prompts(
    service: Service, firsts: Sequence[str], seconds: Sequence[str], field: str
) -> list[tuple[int, ...]]:
    """Return the prompts of pairs: one each, or for a model that embeds one for each text."""
    prompts = service.prompts
    if service.info.task == "embed":
        texts = [*firsts, *seconds]
        return await encode_all(len(texts), lambda index: prompts.encode(texts[index]), field)
    pairs = list(zip(firsts if len(firsts) > 1 else [firsts[0]] * len(seconds), seconds, strict=True))
    if sum(len(first) + len(second) for first, second in pairs) > MAX_INPUT_CHARACTERS:
        raise UsageError(f"{field}: more than {MAX_INPUT_CHARACTERS} characters in all pairs; send fewer at a time")

    async def encode(index: int) -> tuple[int, ...]:
        first, second = pairs[index]
        if not prompts.dialogs.has_pairs:
            return await prompts.encode(first + second)
        messages: list[dict[str, Any]] = [{"role": "query", "content": first}, {"role": "document", "content": second}]
        return (await prompts.encode_chat(Conversation(messages))).prompt

    return await encode_all(len(pairs), encode, field)


def _scores(vectors: Sequence[Vector], firsts: int, task: str) -> list[float]:
    if task == "score":
        return [float(vector[0]) for vector in vectors]
    units = np.stack([normalized(vector) for vector in vectors])
    cosines: Vector = (units[:firsts] * units[firsts:]).sum(axis=1)
    return [float(cosine) for cosine in cosines]


router = APIRouter(route_class=BoundedRoute, tags=["server"], dependencies=[Depends(require_json)])


@router.post("/rerank", include_in_schema=False, response_model=None)
@router.post("/v2/rerank", include_in_schema=False, response_model=None)
@router.post("/v1/rerank", response_model=None, responses=answers(Ranking, with_body=True) | failures(500, 503, 504))
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Documents by how well they fit a query."""
    service, documents = service_of(request), body.texts()
    service.check_model(body.model, "score", "embed")
    prompts, name = await _prompts(service, [body.query], documents, "documents"), secrets.token_hex(12)

    def write(vectors: list[Vector]) -> Response:
        scores = _scores(vectors, 1, service.info.task)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        results = [
            RankedDocument(
                index=index,
                **({"document": Document(text=documents[index])} if body.return_documents else {}),
                relevance_score=scores[index],
            )
            for index in order
        ]
        usage = VectorUsage.of(prompts)
        answer = Ranking(id=f"rerank-{name}", model=service.settings.model_name, usage=usage, results=results)
        return JSONResponse(answer.model_dump(exclude_unset=True))

    return await answer_with_vectors(prompts, Caller(service, request, name, body.priority), "documents", write)


@router.post("/score", include_in_schema=False, response_model=None)
@router.post("/v1/score", response_model=None, responses=answers(Scores, with_body=True) | failures(500, 503, 504))
async def score(body: ScoreRequest, request: Request) -> Response:
    """How well texts fit each other."""
    service, firsts, seconds = service_of(request), body.firsts, body.seconds
    service.check_model(body.model, "score", "embed")
    prompts, name = await _prompts(service, firsts, seconds, "text_2"), secrets.token_hex(12)

    def write(vectors: list[Vector]) -> Response:
        scores = _scores(vectors, len(firsts), service.info.task)
        answer = Scores(
            id=f"score-{name}",
            object="list",
            created=int(time.time()),
            model=service.settings.model_name,
            data=[PairScore(index=index, object="score", score=value) for index, value in enumerate(scores)],
            usage=VectorUsage.of(prompts),
        )
        return JSONResponse(answer.model_dump())

    return await answer_with_vectors(prompts, Caller(service, request, name, body.priority), "text_2", write)
