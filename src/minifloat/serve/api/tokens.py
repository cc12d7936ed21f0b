"""``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, WrapValidator, model_validator

from minifloat.serve.api.chat import ChatFields, Messages
from minifloat.serve.api.fields import MAX_TOKENS, Strict, Token, Unicode, whole
from minifloat.serve.server.errors import FieldError
from minifloat.serve.server.openapi import answers
from minifloat.serve.server.service import BoundedRoute, require_json, service_of


class TokenizeRequest(ChatFields):
    """``POST /tokenize``: a prompt, or messages through the chat template."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
                {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
            ]
        }
    )

    model: str | None = Field(default=None, max_length=512)
    prompt: Annotated[str, Unicode] | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _has_one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError("prompt", "expected either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """``POST /detokenize``."""

    model: str | None = Field(default=None, max_length=512)
    tokens: Annotated[list[Token], Field(max_length=MAX_TOKENS, fail_fast=True), WrapValidator(whole)]


class Tokens(BaseModel):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of ``/detokenize``."""

    prompt: str


router = APIRouter(route_class=BoundedRoute, tags=["server"], dependencies=[Depends(require_json)])


@router.post("/tokenize", responses=answers(Tokens, with_body=True))
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """The tokens of a text, or of messages through the chat template."""
    service = service_of(request)
    service.check_model(body.model)
    if body.messages is not None:
        conversation = await service.prompts.run_in_thread(body.conversation_of, body.messages)
        tokens = (await service.prompts.encode_chat(conversation)).prompt
    else:
        tokens = await service.prompts.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens, may_be_empty=True
        )
    pieces = await service.prompts.pieces(tokens) if body.return_token_strs else None
    return Tokens(count=len(tokens), max_model_len=service.info.max_model_len, tokens=list(tokens), token_strs=pieces)


@router.post("/detokenize", responses=answers(Text, with_body=True))
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """The text of tokens, special tokens included."""
    service = service_of(request)
    service.check_model(body.model)
    return Text(prompt=await service.prompts.decode(body.tokens))
