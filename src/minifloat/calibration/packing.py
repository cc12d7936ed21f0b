"""From the rows of one text source to sequences of token ids.

Sequences are never padded, so padding cannot reach the statistics.

A source is read in blocks of at most 4,096 documents or 16 Mi characters, and the seed shuffles the documents within a
block. A large file therefore contributes its beginning. The files of a folder are read one after the other, in an order
that depends on the seed. `minifloat.calibration.data` decides how many sequences each source gives.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from minifloat.calibration.readers import READERS, Source, choose_column, clip, first_line, hub_rows, locate
from minifloat.errors import ChatTemplateError, DataError
from minifloat.model.runtime.templates import apply_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)
#: Size of a block to shuffle, which is held in memory: it ends at whichever limit is reached first.
_BLOCK_DOCUMENTS = 4096
_BLOCK_CHARACTERS = 1 << 24

_Entry = TypeVar("_Entry")


class Document(NamedTuple):
    """A document as text, and whether it comes from a chat template."""

    text: str
    is_chat: bool


class Reading:
    """Reads one source, and records which part of it was used."""

    def __init__(
        self, source: Source, column: str | None, tokenizer: PreTrainedTokenizerBase, rng: random.Random
    ) -> None:
        self.source, self.tokenizer, self.rng = source, tokenizer, rng
        self.column = column
        self.columns: set[str] = set()
        self.kind, self.files = locate(source)
        self.used = 0
        self.digest = hashlib.sha256()

    def sequences(self, seq_len: int, *, packing: bool) -> Iterator[tuple[int, ...]]:
        """Yield sequences of token ids until the text ends, each with BOS first if the tokenizer adds BOS."""
        prefix, documents = sequence_prefix(self.tokenizer), self._documents(end=packing)
        return _pack(documents, prefix, seq_len) if packing else _truncate(documents, prefix, seq_len)

    def check(self, sequences: Sequence[Sequence[int]], count: int, seq_len: int, vocab_size: int | None) -> None:
        """Warn if there are fewer than `count` sequences."""
        name = self.source.name
        if not self.used:
            raise DataError(f"{name}: no text in it")
        if not sequences:
            raise DataError(
                f"{name}: less than one sequence of {seq_len} tokens, from {self.used} documents: take shorter "
                "sequences, or give more text"
            )
        if len(sequences) < count:
            _LOG.warning(
                "%s: %d sequences of %d tokens, from %d documents, where %d were asked for: all of it is used",
                name,
                len(sequences),
                seq_len,
                self.used,
                count,
            )
        largest = max(map(max, sequences))
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(
                f"{name}: token id {largest} ({self.tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the model's "
                f"vocabulary of {vocab_size}: this is the tokenizer of another model"
            )

    def record(self, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Return the record of the source and of the used text as JSON values."""
        source = self.source
        hub = {"config": source.config, "split": source.split or "train"} if self.kind == "hub" else {}
        return {
            "name": source.name,
            "kind": self.kind,
            **hub,
            "column": ", ".join(sorted(self.columns)) or None,
            "weight": source.weight,
            "documents": self.used,
            "sequences": len(sequences),
            "tokens": sum(map(len, sequences)),
            "sha256": self.digest.hexdigest(),
        }

    def _documents(self, end: bool) -> Iterator[list[int]]:
        """Yield the token ids of each document, shuffled, without BOS if sequences begin with it, with EOS if `end`."""
        prefix, eos = sequence_prefix(self.tokenizer), self.tokenizer.eos_token_id
        for document in _shuffle(self.texts(), self.rng):
            ids = list(self.tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids)
            if prefix and ids[:1] == prefix:
                del ids[0]
            if not ids:
                continue
            if end and not document.is_chat and eos is not None and ids[-1] != eos:
                ids.append(eos)
            self.used += 1
            self.digest.update(document.text.encode() + b"\0")
            yield ids

    def texts(self) -> Iterator[Document]:
        """Yield the documents of the source in the order of its files."""
        if self.kind == "hub":
            yield from self._from_rows(hub_rows(self.source))
        for path in permuted(self.files, self.rng):
            yield from self._from_rows(READERS[path.suffix.lower()](path, self.column))

    def _from_rows(self, rows: Iterator[tuple[str, Any]]) -> Iterator[Document]:
        column: str | None = None
        for where, row in rows:
            value = row
            if isinstance(row, Mapping):
                column = choose_column(row, column or self.column, where)
                self.columns.add(column)
                value = row[column]
            text, is_chat = self._render(value, where), not isinstance(value, str)
            if text and not text.isspace():
                yield Document(text, is_chat)

    def _render(self, value: Any, where: str) -> str:
        """Return the text of one cell; an empty string for an empty cell."""
        if isinstance(value, str):
            text = value
        elif value is None or (isinstance(value, list) and not value):
            text = ""
        elif isinstance(value, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in value):
            text = self._render_chat(value, where)
        else:
            raise DataError(
                f"{where}: expected text, or a list of chat messages with role and content; "
                f"found {type(value).__name__} {clip(repr(value))}"
            )
        if not _is_unicode(text):
            raise DataError(f"{where}: half a surrogate pair, which is no character and has no UTF-8")
        return text

    def _render_chat(self, messages: list[Mapping[str, Any]], where: str) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(f"{where}: chat messages, but the model's tokenizer has no chat template; give plain text")
        try:
            return apply_chat_template(self.tokenizer, messages)
        except ChatTemplateError as error:
            raise DataError(f"{where}: {first_line(error)}") from error


def sequence_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that every sequence begins with: BOS if the tokenizer begins texts with it, else none."""
    begin = list(tokenizer("a").input_ids[:1])
    return begin if begin == [tokenizer.bos_token_id] else []


def permuted(entries: Sequence[_Entry], rng: random.Random) -> list[_Entry]:
    """Return the entries in random order, using only `random()`, whose numbers stay the same in all Python versions."""
    keys = [rng.random() for _ in entries]
    return [entries[index] for index in sorted(range(len(entries)), key=keys.__getitem__)]


def _pack(documents: Iterable[list[int]], prefix: list[int], seq_len: int) -> Iterator[tuple[int, ...]]:
    room = seq_len - len(prefix)
    pending: list[int] = []
    for ids in documents:
        pending += ids
        whole = len(pending) // room * room
        for start in range(0, whole, room):
            yield (*prefix, *pending[start : start + room])
        del pending[:whole]


def _truncate(documents: Iterable[list[int]], prefix: list[int], seq_len: int) -> Iterator[tuple[int, ...]]:
    for ids in documents:
        yield tuple([*prefix, *ids][:seq_len])


def _shuffle(documents: Iterable[Document], rng: random.Random) -> Iterator[Document]:
    """Yield the documents shuffled within each block."""
    block: list[Document] = []
    characters = 0
    for document in documents:
        block.append(document)
        characters += len(document.text)
        if len(block) >= _BLOCK_DOCUMENTS or characters >= _BLOCK_CHARACTERS:
            yield from permuted(block, rng)
            block, characters = [], 0
    yield from permuted(block, rng)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
