"""`Engine`: requests go in, steps make tokens, deliveries come out. Begin reading at `Engine.step`.

The engine is not thread-safe and never waits: its owner calls `step` while it `has_work`. `AsyncEngine` does so in a
thread of its own for a server.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import Generator, Iterator
from collections.abc import Sequence as Sequences
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch
from torch import Tensor

from minifloat.checkpoint.hub import model_folder
from minifloat.engine.cache import BlockPool, blocks_for, tokens_of_a_step
from minifloat.engine.drafters import open_drafter
from minifloat.engine.grammar import Grammar, Grammars, GrammarState
from minifloat.engine.opening import open_model, read_decoder, sampling_defaults
from minifloat.engine.options import EngineOptions
from minifloat.engine.pooling import PooledText
from minifloat.engine.reports import EngineListener, Reporter
from minifloat.engine.sampling import (
    Choices,
    NonFiniteLogits,
    Postponed,
    SamplingParams,
    SamplingState,
    TokenChoice,
    await_grammars,
    choose,
)
from minifloat.engine.scheduler import SCORED_TOKENS, Scheduler, WorkItem
from minifloat.engine.sequence import Delivery, GeneratedText, Request, Sequence, State
from minifloat.engine.speculation import Speculator
from minifloat.engine.steps import Step, launch, launch_next
from minifloat.engine.text import TextStream, TokenDecoder, TokenTexts
from minifloat.errors import ContextLengthError, UsageError
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.draw import Logits
from minifloat.model.architecture.pooling import MODULES_FILE
from minifloat.model.runtime.tensors import current, device_named, returned_when_freed
from minifloat.model.runtime.tokenizer import end_tokens, serving_tokenizer

if TYPE_CHECKING:
    from minifloat.checkpoint import Checkpoint
    from minifloat.model.runtime.tokenizer import TextTokenizer

_LOG = logging.getLogger(__name__)

#: Tokens of prompts that are computed in a step in which other sequences wait for their next token, besides one for
#: each of these: such a step takes about twice as long as one without. With 64, a step of 8 sequences took 3 times as
#: long (1.1B in MXFP4 on two cores). With a fixed number, prompts would wait long where many chats run.
_PROMPT_TOKENS_BESIDE = 32
#: The same on a GPU, where some hundred tokens cost little more than one: with this many, arithmetic takes as long as
#: reading the weights.
_PROMPT_TOKENS_BESIDE_ON_GPU = 256
#: Seconds that a step waits if all its sequences wait for their grammars.
_IDLE_SECONDS = 0.02


#: Numbers in the ids of requests that the engine makes itself.
_UNIQUE = itertools.count()


class Engine:
    """A loaded model that decodes many requests together.

    Args:
        path: A folder or a model of the hub, quantized or not. Quantized inputs that it declares are left out.
        options: How the model is opened and run; None: the defaults.
        revision: Revision of a model of the hub, as in `minifloat.checkpoint.hub.model_folder`.
        tokenizer: The tokenizer to use; None: that of the folder.
        checkpoint: The open checkpoint of `path`; None: it is opened here.
        observer: Receives reports of steps, tokens and requests.
        grammars: Let llguidance read the tokenizer while the weights are packed: later it holds up other requests.

    Attributes:
        info: Name, formats and sizes of the model.
        config: The model's config, with the fields of transformers' class.
        tokenizer: The tokenizer that was given, or that of the folder: a `FileTokenizer` or transformers' own.
        pooling: How the model makes a vector or a score of a text; None: it generates.
        generation_defaults: Sampling parameters of generation_config.json, by the names of `SamplingParams`.

    Raises:
        CheckpointError: If the folder cannot be loaded.
        HubError: If the hub has no such model, refuses it, or cannot be reached.
        UsageError: If options do not go together with the model, or with each other.
        KernelUnavailable: If `device` is not here, or `impl` names kernels that cannot run here.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: EngineOptions | None = None,
        *,
        revision: str | None = None,
        tokenizer: TextTokenizer | None = None,
        checkpoint: Checkpoint | None = None,
        observer: EngineListener | None = None,
        grammars: bool = False,
    ) -> None:
        options = options or EngineOptions()
        self._device = device_named(options.device)
        on_cpu = self._device.type == "cpu"
        step_tokens = tokens_of_a_step(options, self._device)
        folder = model_folder(path, revision=revision)
        self.tokenizer = serving_tokenizer(folder) if tokenizer is None else tokenizer
        with returned_when_freed(), current(self._device):
            set_tokens = functools.partial(self._set_tokens, ahead=grammars)
            opened = open_model(folder, options, checkpoint, set_tokens, self._token_id)
            if opened.pooling is not None and options.speculate is not None:
                raise UsageError("speculate: this model makes vectors or scores of texts, and generates none")
            read_draft = functools.partial(read_decoder, options=options, dtype=getattr(torch, opened.info.dtype))
            drafter = open_drafter(options, opened.runner, self.tokenizer, read_draft)
        self.info, self.config, self._runner = opened.info, opened.config, opened.runner
        self.pooling = opened.pooling
        self.generation_defaults = sampling_defaults(opened.generation_config)
        self._reporter = Reporter(observer)
        self._texts = TokenTexts(self.tokenizer)
        self._decoder = TokenDecoder(self.tokenizer)
        if not options.prefix_cache:
            self.info = dataclasses.replace(self.info, reason_no_prefix_cache="it is switched off")
        elif self._runner.name != "transformers" and self.info.reason_no_prefix_cache:
            _LOG.warning("no prefix cache: %s", self.info.reason_no_prefix_cache)
        self._pool = BlockPool(self.info.kv_blocks, share=not self.info.reason_no_prefix_cache)
        self._scheduler = Scheduler(
            self._pool,
            max_sequences=self.info.max_num_seqs,
            max_tokens=step_tokens,
            prompt_tokens_beside=_PROMPT_TOKENS_BESIDE if on_cpu else _PROMPT_TOKENS_BESIDE_ON_GPU,
            preempted=self._release,
            snapshots=self._runner.snapshots,
        )
        self.speculator: Speculator | None = None
        if drafter is not None:
            weight_bytes = self._runner.weight_bytes
            self.speculator = Speculator(
                drafter, self._scheduler.room, longest=options.draft_tokens, weight_bytes=weight_bytes
            )
            self.info = dataclasses.replace(self.info, speculation=drafter.name, draft_bytes=drafter.memory)
        self._sequences: dict[str, Sequence] = {}
        #: Sequences that wait for their grammars, with the logits of the next token; None: there is room for no more.
        self._postponed: dict[str, tuple[Sequence, Logits | None]] = {}
        self._unsettled: list[Sequence] = []  # their grammars may have ended with the tokens of this step
        self._next: Step | None = None  # the step that the device computes already
        self._logits_memory: Tensor | None = None  # of `logits_of_each`

    def _set_tokens(self, config: Any, generation: Any, vocab: int, *, ahead: bool) -> None:
        ends = end_tokens(generation, config, self.tokenizer)
        self._end_tokens = frozenset(token for token in ends if token < vocab)
        if self._end_tokens != ends:
            _LOG.warning("no answer ends with the tokens %s: the model has %d", sorted(ends - self._end_tokens), vocab)
        self._grammars = Grammars(self.tokenizer, vocab, sorted(self._end_tokens))
        if ahead:
            self._grammars.prepare_ahead()

    def _token_id(self, token: str) -> int | None:
        found = self.tokenizer.convert_tokens_to_ids(token)  # a tokenizer may have one id for all unknown tokens
        return found if isinstance(found, int) and self.tokenizer.convert_ids_to_tokens(found) == token else None

    @property
    def observer(self) -> EngineListener | None:
        """The listener that receives reports of steps, tokens and requests; may be set at any time."""
        return self._reporter.listener

    @observer.setter
    def observer(self, listener: EngineListener | None) -> None:
        self._reporter.listener = listener

    def check(self, prompt: Sequences[int], params: SamplingParams) -> None:
        """Raise an error if a request can never run.

        Raises:
            ContextLengthError: If the prompt leaves no room for a token, or for fewer than `min_tokens`.
            UsageError: If the model does not have a token id; the message begins with the field's name.
        """
        if not prompt:
            raise UsageError("prompt: expected at least one token")
        if self.pooling is not None and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise UsageError(
                "prompt: this model makes a vector or a score of a text, and generates none; see Engine.embed"
            )
        start = params.prompt_logprobs_start
        if params.prompt_logprobs is not None and start > 1 and start >= len(prompt):
            raise UsageError(f"prompt_logprobs_start: expected less than the {len(prompt)} tokens of the prompt")
        # The last token of a prompt that is only scored is not computed.
        scores_only = params.prompt_logprobs is not None and params.max_tokens == 0
        room = self.info.max_model_len + scores_only - len(prompt)
        needed = 0 if params.max_tokens == 0 else max(1, params.min_tokens)
        if room < needed:
            raise ContextLengthError(
                f"prompt: {len(prompt)} tokens and {needed} more do not fit the context of {self.info.max_model_len}"
            )
        for name, tokens in (
            ("prompt", prompt),
            ("logit_bias", tuple(params.logit_bias)),
            ("stop_token_ids", params.stop_token_ids),
            ("forbidden", tuple(chain.from_iterable(params.forbidden))),
            ("visible", tuple(params.visible)),
            ("thinking", params.thinking.closing if params.thinking is not None else ()),
        ):
            if tokens and not (min(tokens) >= 0 and max(tokens) < self.info.vocab_size):
                raise UsageError(f"{name}: expected token ids of 0 .. {self.info.vocab_size - 1}")

    def prepare_grammars(self) -> None:
        """Let llguidance read the tokenizer, which takes half a second for 150,000 tokens. Any thread may call this.

        Raises:
            KernelUnavailable: If llguidance is missing or cannot read the tokenizer.
        """
        self._grammars.prepare()

    def compile(self, grammar: Grammar) -> GrammarState:
        """Return the state of a new text in a grammar, which is compiled meanwhile. Any thread may call this.

        Raises:
            QueueFull: If too many other grammars are at work.
            KernelUnavailable: As `prepare_grammars`.
        """
        return self._grammars.begin(grammar)

    def begin(self, request: Request, grammar: GrammarState | None = None) -> Sequence:
        """Return the sequence of a request, for `add` or `discard`. Any thread may call this.

        Args:
            request: The request.
            grammar: What `compile` has returned for the grammar of the request, which ends with an error if no grammar
                comes of it; None: this function compiles the grammar, and waits for it.

        Raises:
            UsageError: If the request can never run (`check`), or the grammar that was waited for cannot be used.
            QueueFull: As `compile`.
            KernelUnavailable: As `compile`.
        """
        params = request.params
        self.check(request.prompt, params)
        if grammar is None and params.grammar is not None:
            grammar = self.compile(params.grammar)
            try:
                grammar.ready.result()
            except BaseException:
                grammar.close()
                raise
        stops = {*self._end_tokens, *params.stop_token_ids}
        room = self.info.max_model_len - len(request.prompt)
        max_length = len(request.prompt) + (room if params.max_tokens is None else min(params.max_tokens, room))
        sequence = Sequence(
            request,
            TextStream(
                self._decoder,
                request.prompt,
                params.stop,
                params.include_stop,
                visible=params.visible,
                thinking=params.thinking,
            ),
            SamplingState(params, request.prompt, sorted(stops), grammar, races=self.speculator is not None),
            self._pool.root(request.cache_salt),
            max_length,
        )
        if self.pooling is not None:
            sequence.pooled = PooledText(self.pooling)
        _close_thinking(sequence)
        return sequence

    def add(self, request: Request | Sequence) -> None:
        """Put a request at the end of the queue.

        Raises:
            UsageError: If another request has the same id, or as `begin`.
            KernelUnavailable: As `begin`.
        """
        sequence = self.begin(request) if isinstance(request, Request) else request
        if sequence.request_id in self._sequences:
            raise UsageError(f"request_id: {sequence.request_id!r} is at work already")
        self._sequences[sequence.request_id] = sequence
        self._scheduler.add(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence of `begin` that `add` has not got."""
        if sequence.sampling.grammar is not None:
            sequence.sampling.grammar.close()

    def close(self) -> None:
        """Let the texts that follow grammars fail; the next request with a grammar begins anew."""
        self._grammars.close()

    def cancel(self, request_id: str) -> Delivery | None:
        """End a request now, and return its last delivery; None if there is no such request any more."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, Delivery(request_id), "cancelled")

    @property
    def has_work(self) -> bool:
        """Whether there are requests that are not finished."""
        return bool(self._sequences)

    @property
    def running(self) -> int:
        """Number of sequences that have blocks of the KV cache."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Number of sequences that wait for blocks of the KV cache."""
        return len(self._scheduler.waiting)

    @property
    def kv_usage(self) -> float:
        """The share of the KV cache's blocks that are in use."""
        return self._pool.usage

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of all steps so far by part ("linears", "attention", "rows"); empty if not measured."""
        return self._runner.part_seconds()

    def step(self) -> list[Delivery]:
        """Schedule, run, sample, deliver: compute one step for all sequences and return its results.

        On a GPU the step after it is begun first, where that is possible without knowing this step's tokens: the GPU
        computes while the host delivers. A sequence that this step ends is then computed once more, for nothing.
        """
        with current(self._device):
            started = time.perf_counter()
            self._grammars.lower_long()
            deliveries = self._resume()
            step = self._begin_step()
            choices = step.wait()
            items = self._scheduler.computed(step.items)
            deliveries += self._deliver_step(step, items, choices)
            self._report(items, deliveries, time.perf_counter() - started)
            return deliveries

    def _begin_step(self) -> Step:
        """Return a step that the runner computes, or has computed; begin the one after it where that is possible."""
        step, self._next = self._next, None
        if step is None or step.is_stale:
            step = self._launch(self._scheduler.schedule())
        self._next = launch_next(self._runner, step, self._scheduler.next_step)
        return step

    def _deliver_step(self, step: Step, items: list[WorkItem], choices: list[Choices]) -> list[Delivery]:
        """Return what a step gave each request; the next token of some waits for their grammars."""
        now = time.monotonic()
        deliveries = [self._fail(name, error) for name, error in step.failures.items()]
        deliveries += [self._scored(item.sequence) for item in items if item.ends_scoring]
        deliveries += [self._pooled(item.sequence) for item in items if item.ends_pooling]
        for sequence, chosen in zip(step.sequences, choices, strict=True):
            if sequence.state is State.RUNNING:
                if isinstance(chosen[0], Postponed):
                    self._postponed[sequence.request_id] = sequence, chosen[0].logits
                else:
                    deliveries.append(self._deliver_all(sequence, chosen, now))
        deliveries += self._settle()
        if self._postponed and not step.items and not deliveries:
            waiting = [sequence.sampling.grammar for sequence, _ in self._postponed.values()]
            self._grammars.wait_for_any([grammar for grammar in waiting if grammar is not None], _IDLE_SECONDS)
        return deliveries

    def _report(self, items: list[WorkItem], deliveries: list[Delivery], seconds: float) -> None:
        generated = sum([len(delivery.tokens) for delivery in deliveries])
        speculation = None if self.speculator is None else self.speculator.last
        self._reporter.step(self._scheduler, items, generated, seconds, self._runner.weight_bytes, speculation)

    def _launch(self, items: list[WorkItem]) -> Step:
        """Begin a step, with drafts if the engine speculates."""
        if self.speculator is None:
            return launch(self._runner, items, self._texts)
        items = self.speculator.propose(items)
        step = launch(self._runner, items, self._texts)
        self.speculator.computed(items)
        drafts = {item.sequence.request_id: len(item.drafts) for item in step.items if item.drafts}
        for sequence, chosen in zip(step.sequences, step.wait(), strict=True):
            if sequence.request_id in drafts:
                self.speculator.verified(drafts[sequence.request_id], len(chosen) - 1)
        return step

    def _resume(self) -> list[Delivery]:
        """Choose the next tokens of postponed sequences whose grammars have answered, and return their deliveries."""
        deliveries: list[Delivery] = []
        for name, (sequence, logits) in list(self._postponed.items()):
            grammar = sequence.sampling.grammar
            assert grammar is not None
            if logits is None:
                self._unsettled.append(sequence)
                del self._postponed[name]
            elif grammar.done:
                deliveries.append(self._finish(sequence, Delivery(name), "stop"))
            elif grammar.known:
                del self._postponed[name]
                choice: TokenChoice | Exception
                try:
                    choice = choose(logits, sequence.sampling, int(logits.argmax()))
                except Exception as error:
                    choice = error
                deliveries.append(self._deliver_all(sequence, [choice], time.monotonic()))
        return deliveries

    def _settle(self) -> list[Delivery]:
        """End the sequences whose grammars have ended with their last tokens, and return their last deliveries."""
        unsettled, self._unsettled = self._unsettled, []
        await_grammars([sequence.sampling for sequence in unsettled], until_added=True)
        deliveries: list[Delivery] = []
        for sequence in unsettled:
            name, grammar = sequence.request_id, sequence.sampling.grammar
            if grammar is None or name not in self._sequences:
                continue
            if grammar.error is not None:
                deliveries.append(self._fail(name, grammar.error))
            elif grammar.done:
                deliveries.append(self._finish(sequence, Delivery(name), "stop"))
            elif len(sequence.tokens) >= sequence.max_length:
                if grammar.added:
                    deliveries.append(self._finish(sequence, Delivery(name), "length"))
                else:  # "stop" or "length": the grammar has not answered yet
                    self._scheduler.finish(sequence)
                    self._postponed[name] = sequence, None
        return deliveries

    def _scored(self, sequence: Sequence) -> Delivery:
        """End a request that asks for nothing but the log-probabilities of its prompt."""
        return self._finish(sequence, Delivery(sequence.request_id, prompt_logprobs=sequence.reported_scores), "length")

    def _pooled(self, sequence: Sequence) -> Delivery:
        """End a request with the vector or the score of its text."""
        assert sequence.pooled is not None
        result = sequence.pooled.result()
        if not np.isfinite(result).all():
            return self._fail(sequence.request_id, NonFiniteLogits("the model's hidden states are not finite"))
        return self._finish(sequence, Delivery(sequence.request_id, pooled=result), "stop")

    def _fail(self, request_id: str, error: Exception) -> Delivery:
        last = Delivery(request_id, caused_by_request=isinstance(error, UsageError))
        return self._finish(self._sequences[request_id], last, "error", str(error))

    def _deliver_all(self, sequence: Sequence, choices: Choices, now: float) -> Delivery:
        """Add tokens to a sequence until it ends, and return one delivery; an error ends this sequence alone."""
        try:
            delivery = self._deliver(sequence, choices[0], now)
            for choice in choices[1:]:
                if delivery.finish_reason is not None:
                    return delivery
                delivery += self._deliver(sequence, choice, now)
            if len(choices) > 1 and sequence.state is State.RUNNING:
                self._scheduler.accepted(sequence)
        except Exception as error:
            _LOG.exception("request %s", sequence.request_id)
            return self._fail(sequence.request_id, error)
        return delivery

    def _release(self, sequence: Sequence) -> None:
        """Forget what runner and drafter keep of a sequence that has lost its blocks or is finished."""
        self._postponed.pop(sequence.request_id, None)  # its logits are computed again
        self._runner.release(sequence)
        if sequence.pooled is not None:
            sequence.pooled.clear()
        if self.speculator is not None:
            self.speculator.drafter.release(sequence)

    def _deliver(self, sequence: Sequence, choice: TokenChoice | Exception, now: float) -> Delivery:
        """Add a token to a sequence, end the sequence where that token is its last, and return the delivery."""
        name, params = sequence.request_id, sequence.request.params
        if isinstance(choice, Exception):
            expected = isinstance(choice, (NonFiniteLogits, UsageError))
            _LOG.error("request %s: %s", name, choice, exc_info=None if expected else choice)
            return self._fail(name, choice)
        prompt_logprobs = None
        if params.prompt_logprobs is not None and not sequence.output_length:
            prompt_logprobs = sequence.reported_scores
        if params.max_tokens == 0:
            return self._finish(sequence, Delivery(name, prompt_logprobs=prompt_logprobs), "length")
        token = choice.token
        sequence.tokens.append(token)
        self._reporter.token(sequence, now)
        logprobs = None if choice.logprob is None else (self._texts.logprob(choice),)
        length = len(sequence.tokens) - sequence.prompt_length
        may_end = length >= params.min_tokens
        ends = may_end and token in self._end_tokens and not params.ignore_eos
        stops = may_end and token in params.stop_token_ids
        text, stop = ("", None) if ends or stops else sequence.text.add(token)
        reason = token if stops and not ends else stop
        delivery = Delivery(name, (token,), text, logprobs, stop_reason=reason, prompt_logprobs=prompt_logprobs)
        if ends or stops or stop is not None:
            return self._finish(sequence, delivery, "stop")
        sequence.sampling.add(token)
        _close_thinking(sequence)
        if sequence.sampling.grammar is not None:
            self._unsettled.append(sequence)
        elif len(sequence.tokens) >= sequence.max_length:
            return self._finish(sequence, delivery, "length")
        return delivery

    def _finish(self, sequence: Sequence, delivery: Delivery, reason: str, error: str | None = None) -> Delivery:
        """Take a sequence out of the engine, and return its last delivery."""
        self._scheduler.finish(sequence)
        self._release(sequence)
        self.discard(sequence)
        del self._sequences[sequence.request_id]
        sequence.timings.finished = time.monotonic()
        rest, stop = ("", None) if delivery.stop_reason in sequence.request.params.stop else sequence.text.finish()
        if stop is not None and reason == "length":
            reason = "stop"
        self._reporter.finished(reason, sequence)
        return delivery + Delivery(
            sequence.request_id,
            text=rest,
            finish_reason=reason,
            stop_reason=stop if stop is not None else delivery.stop_reason,
            error=error,
            usage=sequence.usage,
            timings=sequence.timings,
        )

    @overload
    def generate(
        self,
        prompts: str | Sequences[str] | Sequences[Sequences[int]],
        params: SamplingParams | Sequences[SamplingParams] | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[GeneratedText]: ...
    @overload
    def generate(
        self,
        prompts: str | Sequences[str] | Sequences[Sequences[int]],
        params: SamplingParams | Sequences[SamplingParams] | None = None,
        *,
        stream: Literal[True],
    ) -> Iterator[Delivery]: ...
    def generate(
        self,
        prompts: str | Sequences[str] | Sequences[Sequences[int]],
        params: SamplingParams | Sequences[SamplingParams] | None = None,
        *,
        stream: bool = False,
    ) -> list[GeneratedText] | Iterator[Delivery]:
        """Continue prompts, all of them in one batch.

        Args:
            prompts: A text, texts, or token ids of each prompt. No chat template is applied.
            params: Sampling parameters of all prompts, or those of each; by default `default_params()`.
            stream: Return deliveries as they are made. Closing the iterator cancels the requests that are not finished.

        Returns:
            The text of each prompt, in their order; or the deliveries, whose `request_id` is the index of the prompt.

        Raises:
            UsageError: If a prompt cannot run, or there are more or fewer parameters than prompts.
        """
        several: Sequences[Any] = [prompts] if isinstance(prompts, str) else prompts
        params = params or self.default_params()
        of_each = [params] * len(several) if isinstance(params, SamplingParams) else params
        if len(of_each) != len(several):
            raise UsageError(f"params: expected one or {len(several)}, the number of prompts, got {len(of_each)}")
        base = next(_UNIQUE)
        requests = [
            Request(f"{base}-{index}", self.encode(prompt) if isinstance(prompt, str) else tuple(prompt), of_one)
            for index, (prompt, of_one) in enumerate(zip(several, of_each, strict=True))
        ]
        deliveries = self._stream(requests)
        if stream:
            return deliveries
        parts: list[list[Delivery]] = [[] for _ in requests]
        for delivery in deliveries:
            parts[int(delivery.request_id)].append(delivery)
        return [GeneratedText.of(each, Delivery.joined(own)) for each, own in zip(requests, parts, strict=True)]

    def logits(self, tokens: Sequences[int]) -> Iterator[Tensor]:
        """Yield the logits after each token of a text, as the engine's prefill computes them, in the tokens' order.

        Args:
            tokens: The text, 1 .. `info.max_model_len` tokens. No token is added.

        Returns:
            An iterator of float32 ``[rows, info.vocab_size]`` on the CPU, of at most 256 rows each, because logits are
            large. `torch.cat(list(...))` has all of them ``[len(tokens), vocab_size]``.

        Raises:
            UsageError: If requests are unfinished, or the text is empty, too long or has tokens that the model lacks.
        """
        return self.logits_of_each([tokens])

    def logits_of_each(self, texts: Sequences[Sequences[int]], *, overwrite: bool = False) -> Iterator[Tensor]:
        """Yield the logits of `logits` for several texts, one after the other; a step computes several short ones.

        Args:
            texts: The texts, each as in `logits`.
            overwrite: Let logits overwrite those that were yielded before, also by an earlier call; no memory is added.

        Raises:
            UsageError: As `logits`.
        """
        if self.has_work:
            raise UsageError("logits: the engine has unfinished requests")
        if self.pooling is not None:
            raise UsageError("logits: this model makes vectors or scores of texts; open it with task='generate'")
        for tokens in texts:
            if not 0 < len(tokens) <= self.info.max_model_len:
                raise UsageError(f"logits: expected 1 .. {self.info.max_model_len} tokens, got {len(tokens)}")
            if not (min(tokens) >= 0 and max(tokens) < self.info.vocab_size):
                raise UsageError(f"logits: expected token ids of 0 .. {self.info.vocab_size - 1}")
        return self._logits([tuple(tokens) for tokens in texts], overwrite)

    def _logits(self, texts: Sequences[tuple[int, ...]], overwrite: bool) -> Iterator[Tensor]:
        most = min(SCORED_TOKENS, self._scheduler.max_tokens)
        for group in self._of_one_step(texts, most):
            sequences = [self._text(tokens, slot) for slot, tokens in enumerate(group)]
            try:
                for start in range(0, max(map(len, group)), most):
                    works = []
                    for sequence in sequences:
                        end, length = min(start + most, sequence.prompt_length), sequence.prompt_length
                        works.append(WorkItem(sequence, start, end, end - start - (end == length)))
                    with current(self._device):
                        rows = self._runner.run(works, self._logits_memory if overwrite else None)
                        if overwrite and (self._logits_memory is None or len(rows) > len(self._logits_memory)):
                            self._logits_memory = rows
                        # on a GPU, and of one token each, the runner writes its next logits to the same memory
                        rows = rows.clone() if self._runner.on_device else rows
                        rows = rows.float().cpu()
                    yield rows
            finally:
                for sequence in sequences:
                    self._runner.release(sequence)
                    self._pool.release(sequence.blocks)

    def _of_one_step(self, texts: Sequences[tuple[int, ...]], most: int) -> Iterator[list[tuple[int, ...]]]:
        """Yield texts in groups whose cache blocks hold no more tokens than a step computes, or one longer text."""
        group: list[tuple[int, ...]] = []
        room = most = min(most, self.info.kv_blocks * BLOCK_TOKENS)
        for tokens in texts:
            size = blocks_for(len(tokens)) * BLOCK_TOKENS
            if group and (size > room or len(group) == self.info.max_num_seqs):
                yield group
                group, room = [], most
            group.append(tokens)
            room -= size
        if group:
            yield group

    def _text(self, tokens: tuple[int, ...], slot: int) -> Sequence:
        request = Request(f"logits-{next(_UNIQUE)}", tokens)
        sequence = Sequence(request, TextStream(self._decoder, ()), SamplingState(request.params, ()), b"")
        sequence.slot, sequence.blocks = slot, self._pool.allocate(blocks_for(len(tokens)))
        return sequence

    def embed(self, texts: Sequences[str] | Sequences[Sequences[int]]) -> Tensor:
        """Return the vectors of texts, or their scores, all of them in one batch.

        Args:
            texts: Texts, or the token ids of each.

        Returns:
            float32 ``[len(texts), hidden]``, or ``[len(texts), 1]`` of a model that scores.

        Raises:
            UsageError: If the model generates, or a text cannot run.
        """
        if self.pooling is None:
            raise UsageError(f"embed: this model generates; it has no {MODULES_FILE}, and no head that scores")
        params = SamplingParams(max_tokens=0)
        requests = [
            Request(f"{next(_UNIQUE)}", self.encode(text) if isinstance(text, str) else tuple(text), params)
            for text in texts
        ]
        found = {delivery.request_id: delivery for delivery in self._stream(requests)}
        failed = next((delivery.error for delivery in found.values() if delivery.error), None)
        if failed is not None:
            raise RuntimeError(failed)
        vectors = [found[str(index)].pooled for index in range(len(requests))]
        return torch.from_numpy(np.stack([vector for vector in vectors if vector is not None]))

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters of the checkpoint's generation_config.json."""
        return SamplingParams(**self.generation_defaults)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text as a prompt, with the special tokens that the tokenizer puts around one."""
        ids = list(self.tokenizer(text).input_ids)
        if not ids and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        return tuple(ids)

    def _stream(self, requests: Sequences[Request]) -> Generator[Delivery, None, None]:
        """Yield deliveries under the indices of requests; cancel the unfinished ones if the iterator is closed."""
        names = {request.request_id: str(index) for index, request in enumerate(requests)}
        for request in requests:
            self.check(request.prompt, request.params)
        try:
            for request in requests:
                self.add(request)
            while not names.keys().isdisjoint(self._sequences):
                for delivery in self.step():
                    if delivery.request_id in names:
                        yield delivery.renamed(names[delivery.request_id])
        finally:
            for name in names:
                self.cancel(name)


def _close_thinking(sequence: Sequence) -> None:
    """Let the thinking of a text end with its next tokens, if its budget is used up."""
    thinking = sequence.request.params.thinking
    if thinking is not None and sequence.text.must_close:
        sequence.sampling.force(thinking.closing)
