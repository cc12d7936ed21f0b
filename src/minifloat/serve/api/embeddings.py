"""``/v1/embeddings``: OpenAI's API for vectors of texts."""

from __future__ import annotations

import base64
import json
import secrets
import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from minifloat.engine.pooling import Vector, normalized
from minifloat.errors import UsageError
from minifloat.model.architecture.pooling import Pooling
from minifloat.serve.api.fields import Count, Priority, Strict, TokenList, Unicode, one_of
from minifloat.serve.api.vectors import MAX_INPUTS, Caller, VectorUsage, answer_with_vectors, encode_all
from minifloat.serve.server.openapi import answers, failures
from minifloat.serve.server.service import BoundedRoute, require_json, service_of

Inputs = Annotated[
    str
    | TokenList
    | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    | Annotated[list[TokenList], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
    Field(union_mode="left_to_right"),
    one_of(f"a string, a list of token ids, or a list of 1 to {MAX_INPUTS} of either; no list is empty"),
    Unicode,
]


class EmbeddingRequest(Strict):
    """``POST /v1/embeddings``."""

    model: str = Field(max_length=512, description="The served model's name, as /v1/models gives it.")
    input: Inputs
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="base64: of the little-endian float32 numbers."
    )
    dimensions: Count | None = Field(default=None, description="Numbers of a vector, if the model's config allows it.")
    add_special_tokens: bool = Field(default=True, description="Tokenize the texts as the tokenizer ends a text.")
    priority: Priority = Field(default=0, description="Of the requests that wait, those of the lowest are next.")
    user: str | None = Field(default=None, max_length=512, description="Has no effect.")

    def texts(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [list(self.input)]
        return list(self.input)


class EmbeddingItem(BaseModel):
    """The vector of a text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    """Answer of ``/v1/embeddings``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: VectorUsage


def check_dimensions(asked: int | None, pooling: Pooling, size: int) -> None:
    """Refuse a length to which vectors may not be cut."""
    if asked is None or asked in (size, *(pooling.dimensions or ())):
        return
    if pooling.any_dimensions and asked < size:
        return
    allowed = f"1 .. {size}" if pooling.any_dimensions else ", ".join(map(str, (*(pooling.dimensions or ()), size)))
    raise UsageError(f"dimensions: expected {allowed}, as the config of this model allows, got {asked}")


def write_vectors(
    vectors: list[Vector], format: Literal["float", "base64"], dimensions: int | None, *, normalize: bool
) -> str:
    """Return the JSON text of the items of an answer."""
    items = []
    for index, vector in enumerate(vectors):  # one at a time, so that other threads run in between
        if dimensions is not None:
            vector = normalized(vector[:dimensions]) if normalize else vector[:dimensions]
        encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode() if format == "base64" else vector.tolist()
        items.append(json.dumps({"object": "embedding", "index": index, "embedding": encoded}, separators=(",", ":")))
    return f"[{','.join(items)}]"


router = APIRouter(route_class=BoundedRoute, tags=["OpenAI"], dependencies=[Depends(require_json)])


@router.post(
    "/v1/embeddings", response_model=None, responses=answers(Embeddings, with_body=True) | failures(500, 503, 504)
)
async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """The vectors of texts."""
    service = service_of(request)
    service.check_model(body.model, "embed")
    pooling = service.engine.engine.pooling
    assert pooling is not None
    check_dimensions(body.dimensions, pooling, service.info.vector_size)
    texts, name = body.texts(), secrets.token_hex(12)

    async def encode(index: int) -> tuple[int, ...]:
        return await service.prompts.encode(texts[index], add_special_tokens=body.add_special_tokens)

    prompts = await encode_all(len(texts), encode, "input")

    def write(vectors: list[Vector]) -> Response:
        data = write_vectors(vectors, body.encoding_format, body.dimensions, normalize=pooling.normalize)
        fields = {"id": f"embd-{name}", "object": "list", "created": int(time.time())}
        fields |= {"model": service.settings.model_name, "usage": VectorUsage.of(prompts).model_dump()}
        return Response(f'{json.dumps(fields)[:-1]}, "data": {data}}}'.encode(), media_type="application/json")

    return await answer_with_vectors(prompts, Caller(service, request, name, body.priority), "input", write)
