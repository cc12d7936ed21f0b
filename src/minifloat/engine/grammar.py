"""Text that must be JSON: llguidance computes which tokens may follow, each grammar in a thread of its own.

A schema is untrusted input. llguidance counts the work of compilation and of each step and ends a grammar with an error
at its limits, and it lets other threads run meanwhile; tests/engine/test_grammars.py has the attacks that this was
measured with. An engine asks a text's `GrammarState` after each token, and never waits for longer than a step bears.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minifloat.engine.lark import SPACING, TEXT, Rules, json_value, literal, one_of
from minifloat.errors import KernelUnavailable, QueueFull, UsageError
from minifloat.model.runtime.tokenizer_files import FileTokenizer

MAX_SCHEMA_BYTES = 64 << 10


@dataclass(frozen=True)
class Grammar:
    """Rules that a text must follow.

    Attributes:
        source: Of llguidance.
        field: That errors name.
    """

    source: str
    field: str = "response_format"

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Grammar:
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (RecursionError, TypeError, ValueError) as error:
            raise UsageError(f"json_schema: not JSON, or nested too deep: {error}") from error
        if len(text) > MAX_SCHEMA_BYTES:
            raise UsageError(f"json_schema: expected at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
        try:
            return cls(_llguidance().LLMatcher.grammar_from_json_schema(text, defaults=SPACING))
        except ValueError as error:
            raise UsageError(f"json_schema: {error}") from error

    @classmethod
    def json_object(cls) -> Grammar:
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """Return the grammar of the texts that a regular expression (of Rust's `regex`) matches as a whole."""
        _check_length("regex", text)
        return cls(_llguidance().LLMatcher.grammar_from_regex(text)).check("regex")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        if not texts or not all(texts):
            raise UsageError("choice: expected texts, none of them empty")
        _check_length("choice", "".join(texts))
        return cls(Rules().source(one_of(*map(literal, texts)))).check("choice")

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a grammar in llguidance's Lark, or in the GBNF of llama.cpp, which has ``root ::=``."""
        _check_length("grammar", text)
        if "::=" in text:
            try:
                text = str(_llguidance().gbnf_to_lark.gbnf_to_lark(text))
            except Exception as error:  # the converter raises what its parser meets
                raise UsageError(f"grammar: not GBNF: {str(error)[:400]}") from error
        return cls(json.dumps({"grammars": [{"lark_grammar": text}]})).check("grammar")

    @classmethod
    def structural_tag(
        cls, triggers: Sequence[str], structures: Sequence[tuple[str, Mapping[str, Any], str]]
    ) -> Grammar:
        """Return the grammar of any text in which a trigger must go on as a structure.

        Args:
            triggers: Texts after which only a structure may follow that begins with them.
            structures: What begins each, the JSON schema of its inside, and what ends it.
        """
        rules, items = Rules(), []
        for trigger in triggers:
            found = [each for each in structures if each[0].startswith(trigger)]
            if not trigger or not found:
                raise UsageError(f"structural_tag: no structure begins with the trigger {trigger!r}")
            bodies = [
                f"{literal(begin[len(trigger) :])} {json_value(schema)} {literal(end)}" for begin, schema, end in found
            ]
            items.append(f"{rules.until(trigger)} {one_of(*bodies)}")
        if any(not begin.startswith(tuple(triggers)) for begin, _, _ in structures):
            raise UsageError("structural_tag: a structure begins with none of the triggers")
        source = rules.source(f"{one_of(*items)}* {rules.add(TEXT)}")
        _check_length("structural_tag", source)
        return cls(source).check("structural_tag")

    def check(self, name: str = "") -> Grammar:
        """Return the grammar.

        Raises:
            UsageError: If it is none; the message begins with the name of the field.
        """
        try:
            message = str(_llguidance().LLMatcher.validate_grammar(self.source))
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in llguidance, while it writes an error with a text beyond ASCII
            message = f"the grammar cannot be used: {error}"
        if message and not message.startswith("WARNING"):
            reason = " ".join(line.strip() for line in message.splitlines() if line.strip(" ^"))
            raise UsageError(f"{name}: {reason[:400]}" if name else reason[:400])
        return self


@dataclass(frozen=True)
class GrammarLimits:
    grammars: int = 16
    idle: int = 4  # without a text, kept for the next request
    seconds: float = 10.0  # processor time that the texts of a grammar begin with, and have in store at most
    seconds_per_token: float = 0.02
    long_seconds: float = 0.05  # processor time of one task, after which it gives way to the engine
    nice: int = 10  # of such a task
    # `llguidance.LLParserLimits`: no attack took two seconds for a step, or 256 MiB.
    parser: dict[str, int] = field(
        default_factory=lambda: {
            "initial_lexer_fuel": 200_000,
            "step_lexer_fuel": 20_000,
            "max_lexer_states": 50_000,
        }
    )


class GrammarPending(Exception):
    """The tokens that may follow are not known yet."""


class GrammarState:
    """The place of one text in its grammar."""

    def __init__(self, grammars: Grammars, compiled: _Compiled) -> None:
        self.grammars, self.compiled, self.ready = grammars, compiled, compiled.ready
        # `added`: the last token has been taken in. `late`: the last step had to go on without this text.
        self.length, self.matcher = 0, None
        self.added, self.done, self.late, self.closed = True, False, False, False
        self.mask = compiled.first_mask
        self.error: UsageError | None = None

    @property
    def known(self) -> bool:
        """Whether it is known which tokens may follow, or that none can."""
        return self.mask is not None or self.done or self.error is not None

    def forbid(self, logits: NDArray[np.float32]) -> None:
        """Set the logits ``[vocab]`` of the tokens that cannot follow to -Inf."""
        mask = self.mask
        if self.error is not None:
            raise self.error
        if mask is None:
            raise GrammarPending
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: len(logits)].astype(bool)
        logits[: len(allowed)][~allowed] = -np.inf
        logits[len(allowed) :] = -np.inf

    def add(self, token: int) -> None:
        """Advance by a token; a token that cannot follow (a stop token of the request) changes nothing."""
        self.grammars.add(self, token)

    def close(self) -> None:
        self.grammars.close_state(self)


class _Worker:
    """A thread that executes one task after another.

    Nearly all tasks take less than a millisecond. Beside other programs on a full machine, a thread of low priority
    takes minutes for them, so only one whose task takes long is lowered. An ordinary user cannot raise it again.
    """

    def __init__(self) -> None:
        self.lowered = False
        self._thread = self._native = 0
        self._started: float | None = None  # processor time of the thread when its task began
        self._tasks = ThreadPoolExecutor(1, thread_name_prefix="minifloat-grammar", initializer=self._begin)

    def submit(self, task: Callable[..., None], *arguments: Any) -> None:
        self._tasks.submit(self._run, task, *arguments)

    def close(self) -> None:
        self._tasks.shutdown(wait=False, cancel_futures=True)

    def lower(self, seconds: float, nice: int) -> None:
        """Lower the priority of the thread if its task has taken longer; the thread must not have been closed."""
        started = self._started
        if self.lowered or started is None or sys.platform != "linux":  # elsewhere only processes have priorities
            return
        if time.clock_gettime(time.pthread_getcpuclockid(self._thread)) - started > seconds:
            nice = max(nice, os.getpriority(os.PRIO_PROCESS, self._native))
            os.setpriority(os.PRIO_PROCESS, self._native, nice)
            self.lowered = True

    def _begin(self) -> None:
        self._thread, self._native = threading.get_ident(), threading.get_native_id()

    def _run(self, task: Callable[..., None], *arguments: Any) -> None:
        self._started = time.thread_time()
        try:
            task(*arguments)
        finally:
            self._started = None


class _Compiled:
    """A grammar with its thread and its texts; equal grammars share one."""

    def __init__(self, grammar: Grammar, limits: GrammarLimits) -> None:
        self.source, self.field, self.left = grammar.source, grammar.field, limits.seconds
        self.ready: Future[None] = Future()
        self.ready.set_running_or_notify_cancel()  # one that stops waiting must not cancel it for the others
        self.first: Any = None
        self.first_mask: bytes | None = None
        self.states: set[GrammarState] = set()
        self.worker = _Worker()


class Grammars:
    """Compiles grammars for one tokenizer, and computes the states of texts. Any thread may call its methods."""

    def __init__(self, tokenizer: Any, vocab: int, end_tokens: list[int], limits: GrammarLimits | None = None) -> None:
        self._tokenizer, self._vocab, self._end_tokens = tokenizer, vocab, end_tokens
        self.limits = limits or GrammarLimits()
        self._answers = threading.Condition(threading.RLock())
        self._preparing = threading.Lock()
        self._of_llguidance: Any = None
        self._compiled: dict[str, _Compiled] = {}  # the one that was used last is the last

    def __len__(self) -> int:
        return len(self._compiled)

    def prepare_ahead(self) -> None:
        """Begin `prepare` in a thread; if it fails, a request with a grammar says why."""

        def prepare() -> None:
            with suppress(KernelUnavailable):
                self.prepare()

        threading.Thread(target=prepare, name="minifloat-grammars", daemon=True).start()

    def prepare(self) -> Any:
        """Return llguidance's tokenizer; making it takes a second for a large vocabulary, and stops other threads."""
        with self._preparing:
            if self._of_llguidance is None:
                self._of_llguidance = self._make_tokenizer()
            return self._of_llguidance

    def _make_tokenizer(self) -> Any:
        llguidance, tokenizer = _llguidance(), self._tokenizer
        own = isinstance(tokenizer, FileTokenizer)
        backend = tokenizer.backend if own else getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise KernelUnavailable("JSON output needs a fast tokenizer, which this model does not have")
        text = backend.to_str()
        if backend.padding or backend.truncation:
            text = json.dumps(json.loads(text) | {"padding": None, "truncation": None})
        end = self._end_tokens or ([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
        try:  # slices, which would make a first mask faster, take as long to make as the tokenizer
            return llguidance.LLTokenizer(text, n_vocab=self._vocab, eos_token=end or None, slices=[])
        except Exception as error:  # llguidance raises several kinds for tokenizers that it cannot read
            raise KernelUnavailable(f"JSON output is not possible with this tokenizer: {error}") from error

    def begin(self, grammar: Grammar) -> GrammarState:
        """Return the state of a grammar before the first token; the grammar is compiled meanwhile (`ready`)."""
        tokenizer = self.prepare()
        with self._answers:
            compiled = self._compiled.pop(grammar.source, None)
            if compiled is None:
                self._make_room()
                compiled = _Compiled(grammar, self.limits)
                compiled.worker.submit(self._compile, compiled, tokenizer)
            self._compiled[grammar.source] = compiled
            state = GrammarState(self, compiled)
            compiled.states.add(state)
        return state

    def _make_room(self) -> None:
        if len(self._compiled) < self.limits.grammars:
            return
        idle = self._idle()
        if not idle:
            raise QueueFull(f"{self.limits.grammars} different grammars are at work already; try again later")
        self._forget(idle[0])

    def _idle(self) -> list[_Compiled]:
        return [each for each in self._compiled.values() if not each.states and each.ready.done()]

    def _forget(self, compiled: _Compiled) -> None:
        if self._compiled.get(compiled.source) is compiled:
            del self._compiled[compiled.source]
        compiled.worker.close()

    def lower_long(self) -> None:
        """Let tasks that take long give way to the thread that calls this."""
        if self._compiled:
            with self._answers:
                for compiled in self._compiled.values():
                    compiled.worker.lower(self.limits.long_seconds, self.limits.nice)

    def wait(self, states: Iterable[GrammarState], seconds: float, *, until_added: bool = False) -> None:
        """Wait until the next tokens of texts are known, or seconds have passed."""
        with self._answers:
            waited = [state for state in states if not state.known]
            self._answers.wait_for(
                lambda: all(state.known or (until_added and state.added) for state in waited), seconds
            )

    def wait_for_any(self, states: Collection[GrammarState], seconds: float) -> None:
        """Wait until the next token of any text is known, or seconds have passed."""
        with self._answers:
            self._answers.wait_for(lambda: any(state.known for state in states), seconds)

    def add(self, state: GrammarState, token: int) -> None:
        """Advance a text by a token; the answer comes later."""
        with self._answers:
            if state.closed or state.error is not None:
                return
            state.length += 1
            state.mask, state.added = None, False
            state.compiled.worker.submit(self._advance, state, token, state.length)

    def close_state(self, state: GrammarState) -> None:
        """Forget a text, and grammars without texts if there are many."""
        with self._answers:
            state.closed, state.matcher = True, None
            state.compiled.states.discard(state)
            self._tidy()

    def _tidy(self) -> None:
        idle = self._idle()
        for compiled in idle[: max(len(idle) - self.limits.idle, 0)]:
            self._forget(compiled)

    def close(self) -> None:
        with self._answers:
            for compiled in list(self._compiled.values()):
                self._fail(compiled, UsageError(f"{compiled.field}: the engine has been closed"))

    def _fail(self, compiled: _Compiled, error: UsageError) -> None:
        with self._answers:
            self._forget(compiled)
            for state in compiled.states:
                state.error = error
            if not compiled.ready.done():
                compiled.ready.set_exception(error)
            self._answers.notify_all()

    # ------------------------------------------------------------------------- in the thread of a grammar

    def _compile(self, compiled: _Compiled, tokenizer: Any) -> None:
        try:
            llguidance = _llguidance()
            limits = llguidance.LLParserLimits(verbose_errors=False, **self.limits.parser)
            first = llguidance.LLMatcher(tokenizer, compiled.source, log_level=0, limits=limits)
            mask = self._timed(compiled, lambda: _mask(first))
        except BaseException as error:  # a panic in llguidance is no Exception
            self._fail(compiled, _error_of(error, compiled.field))
            return
        with self._answers:
            if compiled.ready.done():
                return  # closed meanwhile
            # its tokens take as long as those of any grammar; forced ones may wait in this worker already
            if compiled.worker.lowered and not any(state.length for state in compiled.states):
                compiled.worker.close()
                compiled.worker = _Worker()
            compiled.first, compiled.first_mask = first, mask
            for state in compiled.states:
                if not state.length:
                    state.mask = mask
            compiled.ready.set_result(None)
            self._tidy()
            self._answers.notify_all()

    def _advance(self, state: GrammarState, token: int, length: int) -> None:
        compiled = state.compiled
        try:
            if state.closed:
                return
            matcher = state.matcher or compiled.first.deep_copy()
            state.matcher = matcher
            compiled.left = min(compiled.left + self.limits.seconds_per_token, self.limits.seconds)
            self._timed(compiled, lambda: matcher.try_consume_tokens([token]))
            if matcher.is_error():
                raise ValueError(matcher.get_error())
            if compiled.left <= 0:
                raise ValueError("the grammar has used up its processor time")
            with self._answers:
                state.done = bool(matcher.is_stopped())
                state.added = state.length == length
                self._answers.notify_all()
            mask = None if state.done else self._timed(compiled, lambda: _mask(matcher))
            with self._answers:
                state.mask = mask if state.length == length else None
                self._answers.notify_all()
        except BaseException as error:  # a panic in llguidance is no Exception
            with self._answers:
                state.error = _error_of(error, compiled.field)
                self._answers.notify_all()

    @staticmethod
    def _timed(compiled: _Compiled, work: Callable[[], Any]) -> Any:
        started = time.thread_time()
        try:
            return work()
        finally:
            compiled.left -= time.thread_time() - started


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise KernelUnavailable("JSON output needs llguidance: pip install 'minifloat[serve]'") from error
    return llguidance


def _check_length(name: str, text: str) -> None:
    if not text or len(text) > MAX_SCHEMA_BYTES:
        raise UsageError(f"{name}: expected 1 to {MAX_SCHEMA_BYTES} characters, got {len(text)}")


def _mask(matcher: Any) -> bytes:
    """Return the mask of the next token; llguidance notes errors in the matcher."""
    mask: bytes = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return mask


def _error_of(error: BaseException, field: str) -> UsageError:
    """Return the error of a request; llguidance adds lines about its own state."""
    text = str(error)
    if text.startswith("NoExtension"):
        text = "no text follows this grammar; a $ref may refer to itself, or rules may exclude each other"
    return UsageError(f"{field}: {text.splitlines()[0][:400] if text else 'the grammar cannot be used'}")
