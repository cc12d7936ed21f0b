"""The bodies of answers, named and shaped as in OpenAI's API. Fields that vLLM adds have vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel

from minifloat.engine import TokenLogprob
from minifloat.engine import TokenUsage as EngineUsage

#: Log-probability of an impossible token, since JSON has no infinity.
_IMPOSSIBLE = -9999.0

FinishReason = Literal["stop", "length"]


class PromptTokensDetails(BaseModel):
    """Number of tokens of the prompt that came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, choices: Sequence[EngineUsage], per_prompt: int) -> Usage:
        prompts = choices[::per_prompt]
        completion_tokens = sum(choice.completion_tokens for choice in choices)
        prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(prompt.cached_tokens for prompt in prompts)),
        )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of ``/v1/completions``: parallel lists; null for the first token of a prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, later: CompletionLogprobs) -> CompletionLogprobs:
        """Return the log-probabilities of this text followed by those of a later one."""
        return CompletionLogprobs.model_construct(  # validating them again takes long
            text_offset=self.text_offset + later.text_offset,
            token_logprobs=self.token_logprobs + later.token_logprobs,
            tokens=self.tokens + later.tokens,
            top_logprobs=self.top_logprobs + later.top_logprobs,
        )


class _Answer(BaseModel):
    """The fields that all answers begin with, in this order."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(BaseModel):
    """One of the texts of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class Completion(_Answer):
    """Answer of ``/v1/completions``, and chunk of a streamed answer."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The chosen token and its most probable alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of ``/v1/chat/completions``."""

    content: list[ChatLogprob]


class AssistantMessage(BaseModel):
    """The model's message."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of the messages of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatCompletion(_Answer):
    """Answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """The new part of a message; fields that are not set are left out."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """The new part of one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatChunk(_Answer):
    """Chunk of a streamed answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
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
    """Answer of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Answer of ``/health`` and ``/ready``."""

    status: Literal["ok"] = "ok"


class Version(BaseModel):
    """Answer of ``/version``."""

    version: str


class Tokens(BaseModel):
    """Answer of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of ``/detokenize``."""

    prompt: str


def chat_logprobs(logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/chat/completions``."""
    return ChatLogprobs(
        content=[
            ChatLogprob(
                token=token.text,
                logprob=_finite(token.logprob),
                bytes=list(token.raw),
                top_logprobs=list(map(_top_logprob, token.top)),
            )
            for token in logprobs
        ]
    )


def completion_logprobs(logprobs: Iterable[TokenLogprob], offset: int, *, as_ids: bool = False) -> CompletionLogprobs:
    """Return the log-probabilities of new tokens for ``/v1/completions``.

    Several tokens may have the same text, such as parts of one character. `top_logprobs` then holds the most probable
    of them, so that a token is the most probable one exactly if no entry of `top_logprobs` exceeds its own.
    """

    def name(token: TokenLogprob) -> str:
        return token_id(token.token) if as_ids else token.text

    lists = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token in logprobs:
        lists.text_offset.append(offset)
        lists.tokens.append(name(token))
        lists.token_logprobs.append(_finite(token.logprob))
        logprob_by_name: dict[str, float] = {}
        for candidate in (*token.top, token):  # the most probable first
            logprob_by_name.setdefault(name(candidate), _finite(candidate.logprob))
        lists.top_logprobs.append(logprob_by_name)
        offset += len(token.text)
    return lists


def token_id(token: int) -> str:
    return f"token_id:{token}"


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token=token.text, logprob=_finite(token.logprob), bytes=list(token.raw))


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)
