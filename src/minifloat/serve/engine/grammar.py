"""Text that must be JSON: llguidance computes which tokens may follow.

A schema is untrusted input. llguidance compiles a schema in Rust within limits of its own (size of the grammar, time
and steps of the parser), and a schema that it refuses is an error of the request (CVE-2025-48942 and the like).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minifloat.errors import KernelUnavailable, UsageError
from minifloat.runtime.file_tokenizer import FileTokenizer

MAX_SCHEMA_BYTES = 64 << 10
#: White space as `json.dumps` writes it: if any amount is allowed, a weak model may write nothing else.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class Grammar:
    """The rules that a text must follow.

    Attributes:
        source: The grammar in llguidance's own JSON.
    """

    source: str

    @classmethod
    def json_schema(cls, schema: dict[str, Any] | str) -> Grammar:
        """Return the grammar of the JSON that a schema accepts.

        Args:
            schema: A JSON Schema, draft 2020-12 as far as llguidance supports it.

        Raises:
            UsageError: If `schema` is not a schema, or too large.
            KernelUnavailable: If llguidance is not installed.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
        except (RecursionError, TypeError, ValueError) as error:
            raise UsageError(f"json_schema: not JSON, or nested too deep: {error}") from error
        if len(text) > MAX_SCHEMA_BYTES:
            raise UsageError(f"json_schema: expected at most {MAX_SCHEMA_BYTES} bytes, got {len(text)}")
        try:
            return cls(_llguidance().LLMatcher.grammar_from_json_schema(text, defaults=_SPACING))
        except ValueError as error:
            raise UsageError(f"json_schema: {error}") from error

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise KernelUnavailable("JSON output needs llguidance: pip install 'minifloat[serve]'") from error
    return llguidance


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: A `FileTokenizer`, or transformers' tokenizer, which must be a fast one.
        vocab: Number of logits of the model.
        end_tokens: The model's end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Any, vocab: int, end_tokens: list[int]) -> None:
        self._tokenizer, self._vocab, self._end = tokenizer, vocab, end_tokens
        self._llguidance_tokenizer: Any = None

    def begin(self, grammar: Grammar) -> GrammarState:
        """Return the state of a grammar before the first token.

        Raises:
            UsageError: If the grammar cannot be used.
            KernelUnavailable: If llguidance is not installed, or cannot read this tokenizer.
        """
        module = _llguidance()
        if self._llguidance_tokenizer is None:
            try:
                self._llguidance_tokenizer = self._compile(module)
            except Exception as error:  # llguidance raises several kinds for tokenizers that it cannot read
                raise KernelUnavailable(f"JSON output is not possible with this tokenizer: {error}") from error
        problem = module.LLMatcher.validate_grammar(grammar.source, self._llguidance_tokenizer)
        if problem:
            raise UsageError(f"response_format: {problem}")
        return GrammarState(module.LLMatcher(self._llguidance_tokenizer, grammar.source, log_level=0), self._vocab)

    def _compile(self, module: Any) -> Any:
        """Return llguidance's form of the tokenizer."""
        if isinstance(self._tokenizer, FileTokenizer):
            end = self._end or self._tokenizer.eos_token_id
            return module.LLTokenizer(self._tokenizer.backend.to_str(), n_vocab=self._vocab, eos_token=end)
        from llguidance.hf import from_tokenizer  # imports transformers

        return from_tokenizer(self._tokenizer, self._vocab, self._end or None)


class GrammarState:
    """The place of one text in its grammar.

    Args:
        matcher: llguidance's matcher.
        vocab: Number of logits of the model.
    """

    def __init__(self, matcher: Any, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab

    def forbid(self, logits: NDArray[np.float32]) -> None:
        """Set the logits ``[vocab]`` of the tokens that cannot follow to -Inf.

        Raises:
            UsageError: If the parser of the grammar reaches a limit of llguidance.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise UsageError(f"response_format: {self._matcher.get_error()}")
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[: self._vocab].astype(bool)
        logits[: len(allowed)][~allowed] = -np.inf
        logits[len(allowed) :] = -np.inf

    def add(self, token: int) -> None:
        """Advance by a token; a token that cannot follow (a stop token of the request) changes nothing."""
        self._matcher.try_consume_tokens([token])

    @property
    def done(self) -> bool:
        """Whether no token can follow."""
        return bool(self._matcher.is_stopped())
