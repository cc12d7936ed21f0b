"""The calibration set: text as sequences of token ids, with a record of its origin.

Activation scales are only as good as the text that they were measured on, so the record holds the sources, the hash of
the text and the number of tokens.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from minifloat.calibration.options import DEFAULT_SAMPLES, DEFAULT_TEXT, TextOptions
from minifloat.calibration.readers import OWN_TEXT, Source
from minifloat.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from minifloat.calibration.readers import READERS, choose_column, clip, first_line, hub_rows, locate
from minifloat.errors import ChatTemplateError
from minifloat.model.runtime.templates import apply_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from minifloat.model.runtime.tokenizer import TextTokenizer

_LOG = logging.getLogger(__name__)
#: Size of a block to shuffle, which is held in memory: it ends at whichever limit is reached first.
_BLOCK_DOCUMENTS = 4096
_BLOCK_CHARACTERS = 1 << 24

_Entry = TypeVar("_Entry")


class Document(NamedTuple):
    """A document as text, and whether it comes from a chat template."""

    text: str
    is_chat: bool


class SourceReader:
    """Reads one source, and records which part of it was used."""

    def __init__(self, source: Source, tokenizer: TextTokenizer, rng: random.Random) -> None:
        self.source, self.tokenizer, self.rng = source, tokenizer, rng
        self.columns: set[str] = set()
        self.kind, self.files = locate(source)
        self.used = 0
        self.digest = hashlib.sha256()

    def sequences(self, seq_len: int, *, packing: bool) -> Iterator[tuple[int, ...]]:
        """Yield sequences of token ids until the text ends, each with BOS first if the tokenizer adds BOS."""
        prefix, documents = sequence_prefix(self.tokenizer), self._documents(end=packing)
        return _pack(documents, prefix, seq_len) if packing else _truncate(documents, prefix, seq_len)

    def check(self, sequences: Sequence[Sequence[int]], count: int, seq_len: int) -> None:
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
            yield from self._from_rows(READERS[path.suffix.lower()](path, self.source.column))

    def _from_rows(self, rows: Iterator[tuple[str, Any]]) -> Iterator[Document]:
        column: str | None = None
        for where, row in rows:
            value = row
            if isinstance(row, Mapping):
                column = choose_column(row, column or self.source.column, where)
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


def sequence_prefix(tokenizer: TextTokenizer) -> list[int]:
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


#: Returns this number of sequences of text that the model itself writes; the record has one source.
OwnText: TypeAlias = "Callable[[int], CalibrationSet]"

#: Sequences of one length that run through a layer together, each of token ids.
Batch: TypeAlias = Sequence[Sequence[int]]

#: A string is parsed by `Source.parse`; a path object is taken as it is.
SourceLike: TypeAlias = str | os.PathLike[str] | Source


@dataclass(frozen=True)
class CalibrationSet:
    """Sequences of token ids, with a record of their origin."""

    sequences: tuple[tuple[int, ...], ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def held_out(self, fraction: float) -> tuple[CalibrationSet, CalibrationSet]:
        """Split the set into sequences to calibrate on and held-out sequences to check the scales on."""
        size = len(self.sequences)
        count = max(1, round(size * fraction)) if 0 < fraction < 1 else 0
        if not 0 < count < size:
            raise DataError(f"cannot hold out {fraction} of {size} sequences and keep some: ask for more samples")
        chosen = set(permuted(range(size), random.Random("held out"))[:count])
        rest = self._part("rest", fraction, (index for index in range(size) if index not in chosen))
        return rest, self._part("held out", fraction, sorted(chosen))

    def _part(self, name: str, fraction: float, indices: Iterable[int]) -> CalibrationSet:
        sequences = tuple(self.sequences[index] for index in indices)
        part = {"name": name, "fraction_held_out": fraction}
        return CalibrationSet(sequences, {**self.record, **describe_sequences(sequences), "part": part})


def load_calibration_data(
    sources: SourceLike | Sequence[SourceLike],
    tokenizer: PreTrainedTokenizerBase,
    text: TextOptions = DEFAULT_TEXT,
    own_text: OwnText | None = None,
) -> CalibrationSet:
    """Read text and cut it into sequences of tokens; the same arguments and files give the same sequences.

    A source is a file with one of these suffixes, a folder of such files, or a data set of the hub, which is streamed.

    - ``.txt``, ``.md``: UTF-8. Documents end at ``<|endoftext|>``, or at blank lines if the first Mi characters of the
      file have none, and in any case at the first line end after 16 Ki characters.
    - ``.jsonl``: an object per line. ``.json``: an object per line, or one array of objects, which is read whole.
    - ``.csv``, ``.tsv``: the first row names the columns. ``.parquet``.

    If a column holds lists of chat messages, the tokenizer's chat template turns each list into a document. Empty
    documents are skipped.

    Every sequence begins with BOS if the tokenizer begins texts with BOS.
    """
    parsed = as_sources(sources)
    if not parsed:
        raise DataError("no text to calibrate on: give at least one source")
    drawn: list[Sequence[tuple[int, ...]]] = []
    records = []
    if sum(source.name == OWN_TEXT for source in parsed) > 1:
        raise DataError(f"{OWN_TEXT}: given more than once; give it once, with a weight ({OWN_TEXT}#weight=2)")
    for index, (source, count) in enumerate(zip(parsed, _shares(text.samples or DEFAULT_SAMPLES, parsed), strict=True)):
        if source.name == OWN_TEXT and own_text is not None:
            written = own_text(count)
            drawn.append(written.sequences)
            records.append({**written.record["sources"][0], "weight": source.weight})
            continue
        reader = SourceReader(source, tokenizer, random.Random(f"{text.seed}/{index}"))
        sequences = list(itertools.islice(reader.sequences(text.seq_len, packing=text.packing), count))
        reader.check(sequences, count, text.seq_len)
        drawn.append(sequences)
        records.append(reader.record(sequences))
    mixed = interleave(drawn)
    settings: dict[str, Any] = {"seq_len": text.seq_len, "packing": text.packing, "seed": text.seed}
    settings["tokenizer"] = fingerprint(tokenizer)
    return CalibrationSet(mixed, {"sources": records, **describe_sequences(mixed), **settings})


def as_sources(sources: SourceLike | Sequence[SourceLike]) -> list[Source]:
    return [as_source(one) for one in ([sources] if isinstance(sources, (str, os.PathLike, Source)) else sources)]


def as_source(source: SourceLike) -> Source:
    """Return a `Source`: parse a string, and wrap a path object, which is never the model's own text."""
    if isinstance(source, Source):
        return source
    if isinstance(source, str):
        return Source.parse(source)
    name = os.fspath(source)
    return Source(f"./{name}" if name == OWN_TEXT else name)


def _shares(samples: int, sources: Sequence[Source]) -> list[int]:
    """Return the number of sequences of each source: proportional to the weights, by largest remainders."""
    total = math.fsum(source.weight for source in sources)
    quotas = [samples * (source.weight / total) for source in sources]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(sources)), key=lambda index: shares[index] - quotas[index])
    for index in by_remainder[: samples - sum(shares)]:
        shares[index] += 1
    for source, share in zip(sources, shares, strict=True):
        if share == 0:
            raise DataError(f"{source.name}: its weight gives it none of {samples} samples; ask for more samples")
    return shares


def interleave(drawn: Sequence[Sequence[_Entry]]) -> tuple[_Entry, ...]:
    """Return the entries of all lists, with those of each list spread evenly over the result."""
    keyed = [((position + 0.5) / len(entries), entry) for entries in drawn for position, entry in enumerate(entries)]
    return tuple(entry for _, entry in sorted(keyed, key=lambda pair: pair[0]))


def describe_sequences(sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the numbers of sequences and tokens, and the SHA-256 of the token ids, for a record."""
    lines = (" ".join(map(str, sequence)) + "\n" for sequence in sequences)
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"sequences": len(sequences), "tokens": sum(map(len, sequences)), "sha256": digest}


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of the tokenizer's definition, or of its vocabulary if it is not a `tokenizers` tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()
