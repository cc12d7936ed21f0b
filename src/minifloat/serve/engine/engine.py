"""`Engine`: requests go in, steps make tokens, deliveries come out. `step` is the place to begin reading.

The engine is not thread-safe and never waits: whoever owns it calls `step` while it `has_work`. `AsyncEngine` does so
in a thread of its own for a server.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from typing import Any, Literal, overload

import torch
from torch import Tensor

from minifloat.errors import ContextLengthError, UsageError
from minifloat.hub import model_folder
from minifloat.runtime.devices import current, device_named
from minifloat.runtime.heap import returned_when_freed
from minifloat.runtime.tokenizer import load_tokenizer
from minifloat.serve.engine.cache import BlockPool
from minifloat.serve.engine.grammar import Grammars
from minifloat.serve.engine.observer import Observer, StepStats
from minifloat.serve.engine.opening import open_model, sampling_defaults
from minifloat.serve.engine.options import EngineOptions
from minifloat.serve.engine.sampling import (
    Choice,
    NonFiniteLogits,
    SamplingParams,
    SamplingState,
    TokenLogprob,
    sample,
)
from minifloat.serve.engine.sampling_device import sample as sample_on_device
from minifloat.serve.engine.scheduler import Scheduler, Work
from minifloat.serve.engine.scoring import score
from minifloat.serve.engine.sequence import Completion, Delivery, Request, Sequence
from minifloat.serve.engine.text import TextStream
from minifloat.serve.engine.tokens import end_tokens, token_bytes

_LOG = logging.getLogger(__name__)

#: Tokens of prompts that are computed in a step in which others wait for their next token: it makes them wait about
#: twice as long as without. With 64, a step of 8 sequences took 3 times as long (1.1B in MXFP4 on two cores).
_PROMPT_TOKENS_BESIDE = 40
#: On a GPU some hundred tokens cost little more than one: so many, arithmetic takes as long as reading the weights.
_PROMPT_TOKENS_BESIDE_ON_GPU = 256
#: Tokens of a step where nobody says.
_STEP_TOKENS, _STEP_TOKENS_ON_GPU = 512, 4096


class Engine:
    """A loaded model that decodes many requests together.

    Args:
        path: A folder or a model of the hub, quantized or not. Inputs of its linears are never quantized.
        dtype: Of the activations: "bfloat16", "float16" or "float32"; None: the checkpoint's.
        device: "cpu", "cuda" or "cuda:N".
        kv_cache_memory: Bytes of the KV cache; None: up to 1 GiB, and on a GPU most of what the weights leave free.
        kv_cache_dtype: "auto" (FP8 where the checkpoint has scales for it), "bfloat16", "fp8" or "float32".
        max_model_len: Tokens of the longest sequence, prompt and output; None: what model and cache hold.
        max_num_seqs: Sequences that run at a time; others wait.
        max_num_batched_tokens: Tokens that one step computes; None: 512, on a GPU 4096.
        lm_head: "auto" keeps it as the checkpoint has it; "fp8" quantizes it per channel.
        prefix_cache: Share the keys and values of equal beginnings of prompts.
        runner: "auto", "native", "device" or "transformers".
        impl: Of the kernels, as in `minifloat.runtime.load.load`.
        observer: Told of every step.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Attributes:
        info: The model in numbers.
        config: transformers' config of it.
        tokenizer: Of the folder.
        generation_defaults: What its generation_config.json says of sampling, by the names of `SamplingParams`.
        observer: Told of every step; may be set at any time.

    Raises:
        CheckpointError: The folder cannot be loaded.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        UsageError: Options that do not go together with the model, or with each other.
        KernelUnavailable: `device` is not here, or `impl` names kernels that cannot run here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        device: str = "cpu",
        kv_cache_memory: int | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int | None = None,
        lm_head: str = "auto",
        prefix_cache: bool = True,
        runner: str = "auto",
        impl: str = "auto",
        observer: Observer | None = None,
        revision: str | None = None,
    ) -> None:
        options = EngineOptions(
            dtype,
            kv_cache_memory,
            kv_cache_dtype,
            max_model_len,
            max_num_seqs,
            lm_head,
            runner=runner,
            impl=impl,
            device=device,
        )
        self._device = device_named(device)
        on_cpu = self._device.type == "cpu"
        if max_num_batched_tokens is None:
            max_num_batched_tokens = _STEP_TOKENS if on_cpu else _STEP_TOKENS_ON_GPU
        if max_num_batched_tokens <= max_num_seqs:
            raise UsageError(
                f"max_num_batched_tokens: expected more than max_num_seqs, {max_num_seqs}; got {max_num_batched_tokens}"
            )
        folder = model_folder(path, revision=revision)
        self.tokenizer = load_tokenizer(folder)
        with returned_when_freed(), current(self._device):
            opened = open_model(folder, options)
        self.info, self.config, self._runner = opened.info, opened.config, opened.runner
        self.generation_defaults = sampling_defaults(opened.generation_config)
        self.observer = observer
        self._end_tokens = end_tokens(opened.config, opened.generation_config, self.tokenizer)
        self._grammars = Grammars(self.tokenizer, self._runner.vocab, sorted(self._end_tokens))
        self._sample = sample_on_device if self._runner.name == "device" else sample
        shares = prefix_cache and self._runner.name != "transformers"
        self._pool = BlockPool(self.info.kv_blocks, share=shares)
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=max_num_seqs,
            max_tokens=max_num_batched_tokens,
            max_prompt_tokens_beside=_PROMPT_TOKENS_BESIDE if on_cpu else _PROMPT_TOKENS_BESIDE_ON_GPU,
            preempted=self._runner.release,
        )
        self._sequences: dict[str, Sequence] = {}
        self._pieces: dict[int, tuple[str, bytes]] = {}
        self._reported = (0, 0, 0)

    def check(self, prompt: Sequences[int], params: SamplingParams) -> None:
        """See whether a request can run.

        Raises:
            ContextLengthError: The prompt leaves no room for a token, or less than `min_tokens`.
            UsageError: Token ids that the model does not have; the message begins with the field's name.
        """
        if not prompt:
            raise UsageError("prompt: expected at least one token")
        room = self.info.max_model_len - len(prompt)
        wanted = 0 if params.max_tokens == 0 else max(1, params.min_tokens)
        if room < wanted:
            raise ContextLengthError(
                f"prompt: {len(prompt)} tokens and {wanted} more do not fit the context of {self.info.max_model_len}"
            )
        for name, tokens in (
            ("prompt", prompt),
            ("logit_bias", tuple(params.logit_bias)),
            ("stop_token_ids", params.stop_token_ids),
        ):
            if any(not 0 <= token < self.info.vocab_size for token in tokens):
                raise UsageError(f"{name}: expected token ids of 0 .. {self.info.vocab_size - 1}")

    def begin(self, request: Request) -> Sequence:
        """What `add` takes, made of a request; any thread may do this, for a grammar takes time to compile.

        Raises:
            UsageError: It can never run (`check`), or its grammar cannot be used.
            KernelUnavailable: It has a grammar, and there is nothing to follow it with.
        """
        params = request.params
        self.check(request.prompt, params)
        grammar = None if params.grammar is None else self._grammars.begin(params.grammar)
        stops = {*self._end_tokens, *params.stop_token_ids}
        return Sequence(
            request,
            TextStream(self.tokenizer, request.prompt, params.stop, params.include_stop),
            SamplingState(params, request.prompt, sorted(stops), grammar),
            self._pool.root(request.cache_salt),
        )

    def add(self, request: Request | Sequence) -> None:
        """Put a request at the end of the queue.

        Raises:
            UsageError: Its id is that of another request, or what `begin` raises.
            KernelUnavailable: As there.
        """
        sequence = self.begin(request) if isinstance(request, Request) else request
        if sequence.request_id in self._sequences:
            raise UsageError(f"request_id: {sequence.request_id!r} is at work already")
        self._sequences[sequence.request_id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, request_id: str) -> Delivery | None:
        """End a request now; None where there is no such request any more."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, Delivery(request_id), "cancelled")

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._sequences)

    @property
    def running(self) -> int:
        """Sequences that have blocks of the KV cache."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for them."""
        return len(self._scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache's blocks that are in use."""
        return self._pool.usage

    def step(self) -> list[Delivery]:
        """Schedule, run, sample, deliver."""
        with current(self._device):
            return self._step()

    def _step(self) -> list[Delivery]:
        started = time.perf_counter()
        works = self._scheduler.schedule()
        logits, failed = self._run(works)
        logits, unscored = self._score([work for work in works if work.sequence.request_id not in failed], logits)
        failed |= unscored
        done = [work for work in works if work.sequence.request_id not in failed]
        for work in done:
            self._scheduler.computed(work)
        sampled = [work.sequence for work in done if work.samples]
        choices = self._sample(logits, [sequence.sampling for sequence in sampled]) if sampled else []
        deliveries = [
            self._finish(self._sequences[name], Delivery(name), "error", str(error)) for name, error in failed.items()
        ]
        deliveries += [self._deliver(sequence, choice) for sequence, choice in zip(sampled, choices, strict=True)]
        self._report(done, sum(len(delivery.tokens) for delivery in deliveries), time.perf_counter() - started)
        return deliveries

    def _run(self, works: Sequences[Work]) -> tuple[Tensor, dict[str, Exception]]:
        """Logits of the works that do not fail; and why the others do, by request."""
        if not works:
            return torch.empty(0, self._runner.vocab), {}
        try:
            return self._runner.run(works), {}
        except Exception as error:  # one request must not end the others
            _LOG.exception("a step of %d sequences failed", len(works))
            if len(works) == 1:
                return torch.empty(0, self._runner.vocab), {works[0].sequence.request_id: error}
        rows = []
        failed: dict[str, Exception] = {}
        for work in works:
            logits, why = self._run([work])
            rows.append(logits.clone())  # the next run may overwrite them
            failed |= why
        rows = [logits for logits in rows if len(logits)] or rows[:1]
        return torch.cat(rows), failed

    def _score(self, works: Sequences[Work], logits: Tensor) -> tuple[Tensor, dict[str, Exception]]:
        """Note how probable the tokens of prompts are, where that is asked for.

        Returns:
            Of all logits those that tokens are chosen by; and why prompts cannot be scored, by request.
        """
        if not any(work.scored for work in works):
            return logits, {}
        kept: list[Tensor] = []
        failed: dict[str, Exception] = {}
        for work, rows in zip(works, torch.split_with_sizes(logits, [work.logits for work in works]), strict=True):
            sequence, first = work.sequence, len(work.sequence.prompt_logprobs) + 1
            alternatives = sequence.request.params.prompt_logprobs or 0
            try:
                found = score(rows[: work.scored], sequence.tokens[first : first + work.scored], alternatives)
            except NonFiniteLogits as error:
                _LOG.error("request %s: %s", sequence.request_id, error)
                failed[sequence.request_id] = error
                continue
            sequence.prompt_logprobs += [self._logprob(one) for one in found]
            kept.append(rows[work.scored :])
        return torch.cat(kept) if kept else logits[:0], failed

    def _deliver(self, sequence: Sequence, choice: Choice | Exception) -> Delivery:
        """Add a token to a sequence, and end it where it ends."""
        name, params = sequence.request_id, sequence.request.params
        if isinstance(choice, Exception):
            _LOG.error("request %s: %s", name, choice)
            return self._finish(sequence, Delivery(name), "error", str(choice))
        of_prompt = None
        if params.prompt_logprobs is not None and not sequence.output_length:
            of_prompt = (None, *sequence.prompt_logprobs)
        if params.max_tokens == 0:
            return self._finish(sequence, Delivery(name, prompt_logprobs=of_prompt), "length")
        token = choice.token
        sequence.tokens.append(token)
        sequence.sampling.add(token)
        self._clock(sequence)
        logprobs = None if choice.logprob is None else (self._logprob(choice),)
        enough = sequence.output_length >= params.min_tokens
        ends = enough and token in self._end_tokens and not params.ignore_eos
        stops = enough and token in params.stop_token_ids
        text, stop = ("", None) if ends or stops else sequence.text.add(token)
        reason = token if stops and not ends else stop
        delivery = Delivery(name, (token,), text, logprobs, stop_reason=reason, prompt_logprobs=of_prompt)
        if ends or stops or stop is not None or sequence.sampling.ended:
            return self._finish(sequence, delivery, "stop")
        limit = self.info.max_model_len - sequence.prompt_length
        if sequence.output_length >= min(params.max_tokens or limit, limit):
            return self._finish(sequence, delivery, "length")
        return delivery

    def _finish(self, sequence: Sequence, delivery: Delivery, reason: str, error: str | None = None) -> Delivery:
        """Take a sequence out of the engine; its last delivery."""
        self._scheduler.finish(sequence)
        self._runner.release(sequence)
        del self._sequences[sequence.request_id]
        sequence.timings.finished = time.monotonic()
        rest, stop = ("", None) if delivery.stop_reason in sequence.request.params.stop else sequence.text.finish()
        if stop is not None and reason == "length":
            reason = "stop"
        if self.observer is not None:
            self.observer.finished(reason, sequence.timings, sequence.usage)
        return delivery + Delivery(
            sequence.request_id,
            text=rest,
            finish_reason=reason,
            stop_reason=stop if stop is not None else delivery.stop_reason,
            error=error,
            usage=sequence.usage,
            timings=sequence.timings,
        )

    def _clock(self, sequence: Sequence) -> None:
        """Note when a token came."""
        now, timings = time.monotonic(), sequence.timings
        if timings.first_token is None:
            timings.first_token = now
            if self.observer is not None:
                self.observer.first_token(now - timings.arrived)
        elif self.observer is not None and sequence.last_token is not None:
            self.observer.token(now - sequence.last_token)
        sequence.last_token = now

    def _logprob(self, choice: Choice) -> TokenLogprob:
        assert choice.logprob is not None
        alternatives = tuple(TokenLogprob(other, *self._piece(other), value) for other, value in choice.top)
        return TokenLogprob(choice.token, *self._piece(choice.token), choice.logprob, alternatives)

    def _piece(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of a token; kept, for the tokenizer takes longer than a prompt's many tokens can wait."""
        if token not in self._pieces:
            text = str(self.tokenizer.decode([token], clean_up_tokenization_spaces=False))
            self._pieces[token] = text, token_bytes(self.tokenizer, token, text)
        return self._pieces[token]

    def _report(self, works: Sequences[Work], generated: int, seconds: float) -> None:
        """Tell the observer of a step."""
        scheduler = self._scheduler
        totals = (scheduler.preemptions, scheduler.prefix_queries, scheduler.prefix_hits)
        preemptions, queries, hits = (now - before for now, before in zip(totals, self._reported, strict=True))
        self._reported = totals
        if self.observer is None:
            return
        prompt = sum(max(min(work.end, work.sequence.prompt_length) - work.start, 0) for work in works)
        self.observer.step(
            StepStats(
                running=self.running,
                waiting=self.waiting,
                kv_usage=self.kv_usage,
                prompt_tokens=prompt,
                generation_tokens=generated,
                seconds=seconds,
                preemptions=preemptions,
                weight_bytes_read=self._runner.weight_bytes if works else 0,
                prefix_queries=queries,
                prefix_hits=hits,
            )
        )

    @overload
    def generate(
        self,
        prompts: str | Sequences[str] | Sequences[Sequences[int]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[Completion]: ...
    @overload
    def generate(
        self,
        prompts: str | Sequences[str] | Sequences[Sequences[int]],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
    ) -> Iterator[Delivery]: ...
    def generate(
        self,
        prompts: str | Sequences[str] | Sequences[Sequences[int]],
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> list[Completion] | Iterator[Delivery]:
        """Continue prompts, all together.

        Args:
            prompts: A text, texts, or token ids of each prompt. No chat template is applied.
            params: For all of them; by default `SamplingParams()`, with the checkpoint's own defaults.
            stream: Return deliveries as they are made. Closing the iterator cancels what is left.

        Returns:
            One completion per prompt, in their order; or the deliveries, whose `request_id` is the prompt's index.

        Raises:
            UsageError: A prompt that cannot run.
        """
        several: Sequences[Any] = [prompts] if isinstance(prompts, str) else prompts
        params = params or self.default_params()
        base = next(_UNIQUE)
        requests = [
            Request(f"{base}-{index}", self.encode(prompt) if isinstance(prompt, str) else tuple(prompt), params)
            for index, prompt in enumerate(several)
        ]
        deliveries = self._stream(requests)
        if stream:
            return deliveries
        whole: dict[str, Delivery] = {}
        for delivery in deliveries:
            name = delivery.request_id
            whole[name] = whole[name] + delivery if name in whole else delivery
        return [Completion.of(request, whole[str(index)]) for index, request in enumerate(requests)]

    def default_params(self) -> SamplingParams:
        """What the checkpoint itself says of sampling."""
        return SamplingParams(**self.generation_defaults)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text as a prompt, with what the tokenizer puts around one."""
        ids = list(self.tokenizer(text).input_ids)
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        return tuple(ids)

    def _stream(self, requests: Sequences[Request]) -> Iterator[Delivery]:
        names = {request.request_id: str(index) for index, request in enumerate(requests)}
        for request in requests:
            self.check(request.prompt, request.params)
        try:
            for request in requests:
                self.add(request)
            while any(name in self._sequences for name in names):
                for delivery in self.step():
                    if delivery.request_id in names:
                        yield delivery.renamed(names[delivery.request_id])
        finally:
            for name in names:
                self.cancel(name)


_UNIQUE = itertools.count()
