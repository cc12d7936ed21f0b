"""An engine without a model, for tests of the server around it: it can be slow, held, full, and fail on purpose.

It stands in for `minifloat.engine.Engine` under the real `AsyncEngine`. It "generates" its prompt over and over, or
what the test says, token by token, so that a test knows every answer beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from minifloat.engine import (
    Delivery,
    EngineListener,
    Grammar,
    ModelInfo,
    Request,
    SamplingParams,
    StepStats,
    Timings,
    TokenLogprob,
    TokenUsage,
)
from minifloat.engine.grammar import GrammarState
from minifloat.engine.text import TextStream
from minifloat.errors import ContextLengthError, UsageError

INFO = ModelInfo(
    name="fake",
    path="/nowhere/fake",
    architecture="FakeForCausalLM",
    runner="native",
    device="cpu",
    reason_not_native="",
    scheme="mxfp4",
    dtype="bfloat16",
    lm_head="fp8 (quantized while loading)",
    activations="bfloat16",
    weight_bytes=1_000,
    bf16_bytes=3_500,
    step_bytes=900,
    kv_element="bfloat16",
    kv_bytes=1 << 20,
    kv_bytes_per_token=64,
    kv_blocks=64,
    max_model_len=512,
    max_num_seqs=8,
    vocab_size=288,
    load_seconds=0.1,
)


class _NoGrammars:
    """Stands in for `Grammars`; the texts of this engine follow no grammar."""

    def wait(self, states: Collection[GrammarState], seconds: float, *, until_added: bool = False) -> None:
        pass

    def add(self, state: GrammarState, token: int) -> None:
        pass

    def close_state(self, state: GrammarState) -> None:
        pass


class FakeEngine:
    """Repeats prompts."""

    speculator = None

    def __init__(
        self,
        tokenizer: Any,
        *,
        seconds: float = 0.0,
        fails: Callable[[Request], str | None] = lambda request: None,
        defaults: Mapping[str, Any] | None = None,
        says: Callable[[Request], Sequence[int] | None] = lambda request: None,
    ) -> None:
        self.info, self.tokenizer, self.generation_defaults = INFO, tokenizer, dict(defaults or {})
        self.seconds, self.fails, self.says = seconds, fails, says
        self.observer: EngineListener | None = None
        self.requests: list[Request] = []
        self.held = False
        self.broken: Exception | None = None
        self._at_work: dict[str, _Work] = {}

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if len(prompt) + max(1, params.min_tokens) > self.info.max_model_len:
            raise ContextLengthError(f"prompt: {len(prompt)} tokens do not fit")
        for name, tokens in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if any(not 0 <= token < self.info.vocab_size for token in tokens):
                raise UsageError(f"{name}: expected token ids of 0 .. {self.info.vocab_size - 1}")

    def prepare_grammars(self) -> None:
        """Do nothing: texts of grammars are not bound to them."""

    def compile(self, grammar: Grammar) -> GrammarState:
        ready: Future[None] = Future()
        ready.set_result(None)
        return GrammarState(_NoGrammars(), SimpleNamespace(ready=ready, first_mask=None))  # type: ignore[arg-type]

    def begin(self, request: Request, grammar: GrammarState | None = None) -> _Work:
        self.check(request.prompt, request.params)
        return _Work(request, self.tokenizer)

    def add(self, work: _Work) -> None:
        self.requests.append(work.request)
        self._at_work[work.request.request_id] = work

    def cancel(self, request_id: str) -> Delivery | None:
        work = self._at_work.get(request_id)
        return None if work is None else self._finish(work, Delivery(request_id), "cancelled")

    @property
    def has_work(self) -> bool:
        return bool(self._at_work)

    @property
    def running(self) -> int:
        return min(len(self._at_work), self.info.max_num_seqs)

    @property
    def waiting(self) -> int:
        return len(self._at_work) - self.running

    @property
    def kv_usage(self) -> float:
        return self.running / 8

    def discard(self, work: _Work) -> None:
        pass

    def close(self) -> None:
        pass

    def part_seconds(self) -> dict[str, float]:
        return {}

    def step(self) -> list[Delivery]:
        time.sleep(self.seconds)
        if self.broken is not None:
            raise self.broken
        if self.held:
            time.sleep(0.001)
            return []
        works = list(self._at_work.values())[: self.info.max_num_seqs]
        deliveries = [self._deliver(work) for work in works]
        if self.observer is not None:
            read = sum(len(work.request.prompt) for work in works if work.num_generated == 1)
            self.observer.step(
                StepStats(self.running, self.waiting, self.running / 8, read, len(works), self.seconds, 0, 900, 0, 0)
            )
        return deliveries

    def _deliver(self, work: _Work) -> Delivery:
        name, params, prompt = work.request.request_id, work.request.params, work.request.prompt
        problem = self.fails(work.request)
        if problem is not None:
            return self._finish(work, Delivery(name), "error", problem)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not work.num_generated:
            prompt_logprobs = (None, *(_logprob(token, params.prompt_logprobs) for token in prompt[1:]))
        if params.max_tokens == 0:
            return self._finish(work, Delivery(name, prompt_logprobs=prompt_logprobs), "length")
        said = self.says(work.request)
        if said is not None and work.num_generated >= len(said):
            return self._finish(work, Delivery(name), "stop")
        token = prompt[work.num_generated % len(prompt)] if said is None else said[work.num_generated]
        work.num_generated += 1
        if work.timings.first_token is None:
            work.timings.scheduled = work.timings.first_token = time.monotonic()
            if self.observer is not None:
                self.observer.first_token(0.001)
        elif self.observer is not None:
            self.observer.token(0.001)
        text, stop = work.text.add(token)
        logprobs = None if params.logprobs is None else (_logprob(token, params.logprobs),)
        delivery = Delivery(name, (token,), text, logprobs, stop_reason=stop, prompt_logprobs=prompt_logprobs)
        if stop is not None:
            return self._finish(work, delivery, "stop")
        room = self.info.max_model_len - len(prompt)
        return (
            self._finish(work, delivery, "length")
            if work.num_generated >= min(params.max_tokens or room, room)
            else delivery
        )

    def _finish(self, work: _Work, delivery: Delivery, reason: str, error: str | None = None) -> Delivery:
        del self._at_work[work.request.request_id]
        work.timings.finished = time.monotonic()
        rest = "" if delivery.stop_reason is not None else work.text.finish()[0]
        usage = TokenUsage(len(work.request.prompt), work.num_generated, 0, work.text.thinking_tokens)
        if self.observer is not None:
            self.observer.finished(reason, work.timings, usage)
        return delivery + Delivery(
            work.request.request_id,
            text=rest,
            finish_reason=reason,
            stop_reason=delivery.stop_reason,
            error=error,
            usage=usage,
            timings=work.timings,
        )


def _logprob(token: int, alternatives: int) -> TokenLogprob:
    alternative = TokenLogprob(token, chr(token % 96 + 32), bytes([token % 96 + 32]), -0.5)
    return TokenLogprob(token, alternative.text, alternative.raw, -0.5, (alternative,) * alternatives)


class _Work:
    def __init__(self, request: Request, tokenizer: Any) -> None:
        self.request, self.num_generated = request, 0
        params = request.params
        self.text = TextStream(
            tokenizer,
            request.prompt,
            params.stop,
            params.include_stop,
            visible=params.visible,
            thinking=params.thinking,
        )
        self.timings = Timings(time.monotonic())
