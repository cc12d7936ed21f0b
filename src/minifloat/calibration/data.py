"""The calibration set: text as sequences of token ids, with a record of its origin.

Activation scales are only as good as the text that they were measured on, so the record holds the sources, the hash of
the text and the number of tokens. Sources are files, folders or data sets of the hub. They are read only as far as the
samples need (`minifloat.calibration.readers`), cut into sequences (`minifloat.calibration.packing`) and mixed by
weight: the sequences of several sources are spread evenly. The source `self` is text that the model itself writes
(`minifloat.calibration.own_text`).

Not done: cleaning, deduplication, and judging whether the text resembles what the model will see.
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

from minifloat.calibration.options import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN
from minifloat.calibration.packing import Reading, permuted, sequence_prefix
from minifloat.calibration.readers import END_OF_TEXT, OWN_TEXT, Source
from minifloat.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["DEFAULT_SAMPLES", "DEFAULT_SEQ_LEN", "END_OF_TEXT", "OWN_TEXT", "CalibrationSet", "OwnText", "Source"]
__all__ += [
    "SourceLike",
    "as_source",
    "as_sources",
    "describe_sequences",
    "fingerprint",
    "interleave",
    "load_calibration_data",
]


#: Returns this number of sequences of text that the model itself writes; the record has one source.
OwnText: TypeAlias = "Callable[[int], CalibrationSet]"

#: A string is parsed by `Source.parse`; a path object is taken as it is.
SourceLike: TypeAlias = str | os.PathLike[str] | Source

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class CalibrationSet:
    """Sequences of token ids, with a record of their origin."""

    sequences: tuple[tuple[int, ...], ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens in all sequences."""
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
    *,
    samples: int = DEFAULT_SAMPLES,
    seq_len: int = DEFAULT_SEQ_LEN,
    seed: int = 0,
    packing: bool = True,
    text_column: str | None = None,
    vocab_size: int | None = None,
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
    prefix = sequence_prefix(tokenizer)
    if not parsed:
        raise DataError("no text to calibrate on: give at least one source")
    if samples < 1 or seq_len <= len(prefix):
        raise DataError(f"expected samples >= 1 and seq_len > {len(prefix)}; got {samples} and {seq_len}")
    drawn: list[Sequence[tuple[int, ...]]] = []
    records = []
    if sum(source.name == OWN_TEXT for source in parsed) > 1:
        raise DataError(f"{OWN_TEXT}: given more than once; give it once, with a weight ({OWN_TEXT}#weight=2)")
    for index, (source, count) in enumerate(zip(parsed, _shares(samples, parsed), strict=True)):
        if source.name == OWN_TEXT and own_text is not None:
            written = own_text(count)
            drawn.append(written.sequences)
            records.append({**written.record["sources"][0], "weight": source.weight})
            continue
        reading = Reading(source, source.column or text_column, tokenizer, random.Random(f"{seed}/{index}"))
        sequences = list(itertools.islice(reading.sequences(seq_len, packing=packing), count))
        reading.check(sequences, count, seq_len, vocab_size)
        drawn.append(sequences)
        records.append(reading.record(sequences))
    mixed = interleave(drawn)
    settings = {"seq_len": seq_len, "packing": packing, "seed": seed, "tokenizer": fingerprint(tokenizer)}
    return CalibrationSet(mixed, {"sources": records, **describe_sequences(mixed), **settings})


def as_sources(sources: SourceLike | Sequence[SourceLike]) -> list[Source]:
    """Return one or several sources as a list of `Source`."""
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
