"""The bodies of answers, named and shaped as in OpenAI's API; what vLLM adds to them is here under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel

from minifloat.serve.engine import TokenLogprob
from minifloat.serve.engine import Usage as EngineUsage

#: JSON has no infinity: the log-probability of a token that cannot be.
_IMPOSSIBLE = -9999.0

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Of the tokens of the prompt."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, choices: Sequence[EngineUsage], per_prompt: int) -> Usage:
        """The sum over choices, where each `per_prompt` in a row share a prompt, which counts once."""
        prompts = choices[::per_prompt]
        made = sum(choice.completion_tokens for choice in choices)
        read = sum(prompt.prompt_tokens for prompt in prompts)
        cached = PromptTokensDetails(cached_tokens=sum(prompt.cached_tokens for prompt in prompts))
        return cls(prompt_tokens=read, completion_tokens=made, total_tokens=read + made, prompt_tokens_details=cached)


class CompletionLogprobs(BaseModel):
    """Log-probabilities of ``/v1/completions``: parallel lists; null for the first token of a prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, later: CompletionLogprobs) -> CompletionLogprobs:
        """Those of a text, and of what follows it."""
        return CompletionLogprobs(
            text_offset=self.text_offset + later.text_offset,
            token_logprobs=self.token_logprobs + later.token_logprobs,
            tokens=self.tokens + later.tokens,
            top_logprobs=self.top_logprobs + later.top_logprobs,
        )


class CompletionChoice(BaseModel):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Completion(BaseModel):
    """Answer, and chunk of a streamed answer, of ``/v1/completions``."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A chosen token, and what might have been chosen."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of ``/v1/chat/completions``."""

    content: list[ChatLogprob]


class AssistantMessage(BaseModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatCompletion(BaseModel):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What is new; what is not set is left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What is new in one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    """Chunk of a streamed answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "minifloat"
    max_model_len: int


class ModelList(BaseModel):
    """``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """``/health`` and ``/ready``."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """``/version``."""

    version: str


class Tokens(BaseModel):
    """``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """``/detokenize``."""

    prompt: str


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Of new tokens."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=one.text, logprob=_finite(one.logprob), bytes=list(one.raw), top_logprobs=list(map(_top, one.top))
            )
            for one in logprobs
        ]
    )


def completion_logprobs(logprobs: Iterable[TokenLogprob], offset: int) -> CompletionLogprobs:
    """Of new tokens, of which the first begins at the character `offset` of the text.

    Several tokens may have the same text, such as parts of characters: the most probable one is told of then, so that
    a token is the most probable one where none of `top_logprobs` is above its own.
    """
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for one in logprobs:
        made.text_offset.append(offset)
        made.tokens.append(one.text)
        made.token_logprobs.append(_finite(one.logprob))
        most: dict[str, float] = {}
        for top in (*one.top, one):
            most.setdefault(top.text, _finite(top.logprob))
        made.top_logprobs.append(most)
        offset += len(one.text)
    return made


def _top(one: TokenLogprob) -> TopLogprob:
    return TopLogprob(token=one.text, logprob=_finite(one.logprob), bytes=list(one.raw))


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
