"""The text of a comparison, from the same sources as for `calibrate`, as windows of token ids.

Documents are tokenized without special tokens and cut into windows that do not overlap; nothing is padded. The first
token of a window is not scored, unless the tokenizer begins a text with a BOS token, which every window then has.
Batches are in a random but fixed order and the sources interleaved, so that an interrupted run is a sample of all text.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.calibration.data import SourceLike, SourceReader, as_source, interleave, sequence_prefix
from minifloat.calibration.readers import END_OF_TEXT, READERS, Source, locate
from minifloat.checkpoint.files import storage_errors
from minifloat.errors import DataError, UsageError
from minifloat.evaluate.compare.series import DOCUMENT, WINDOW

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

DEFAULT_WINDOW = 256

#: Texts that come with minifloat, used if the user names none.
BUILT_IN = ("stories", "prose")

#: The units of intervals are documents if a text has at least this many, else windows, which are alike where they are
#: near (`minifloat.evaluate.compare.series`).
_FEWEST_DOCUMENTS = 15
_BATCH_TOKENS = 2048
_TEXT_SUFFIXES = (".txt", ".md")


@dataclass(frozen=True)
class Window:
    document: int
    start: int
    ids: npt.NDArray[np.int32]


@dataclass(frozen=True)
class TokenizedText:
    name: str
    documents: int
    windows: tuple[Window, ...]
    bytes_per_token: float
    unit: str
    sha256: str

    @property
    def tokens(self) -> int:
        return sum(len(window.ids) for window in self.windows)


@dataclass(frozen=True)
class WindowBatch:
    text: int
    windows: tuple[int, ...]
    ids: Tensor
    units: Tensor
    tokens: int


class Corpus:
    def __init__(
        self,
        sources: Sequence[SourceLike],
        tokenizer: TextTokenizer,
        window: int,
        max_tokens: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self.prefix = sequence_prefix(tokenizer)
        self.window = window
        room = window - len(self.prefix)
        if room < 1 or window < 2:
            raise UsageError(f"a window has at least {max(2, 1 + len(self.prefix))} tokens, got {window}")
        named = [(_name(source), _documents(as_source(source), tokenizer)) for source in sources]
        named = named or [(name, _parts(_built_in(name))) for name in BUILT_IN]
        if len({name for name, _ in named}) < len(named):
            raise UsageError(f"two sources of the same name: {', '.join(name for name, _ in named)}")
        self.texts = tuple(self._cut(name, documents, tokenizer, room, max_tokens) for name, documents in named)
        largest = max(int(window.ids.max()) for text in self.texts for window in text.windows)
        if vocab_size is not None and largest >= vocab_size:
            raise UsageError(
                f"token id {largest} ({tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the vocabulary of "
                f"{vocab_size}: this is the tokenizer of another model"
            )

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    def _cut(
        self,
        name: str,
        documents: Iterator[str],
        tokenizer: TextTokenizer,
        room: int,
        max_tokens: int | None,
    ) -> TokenizedText:
        windows: list[Window] = []
        tokens = nbytes = used = documents_read = 0
        digest = hashlib.sha256()
        for number, document in enumerate(documents):
            ids = np.asarray(tokenizer(document, add_special_tokens=False, verbose=False).input_ids, dtype=np.int32)
            tokens, nbytes = tokens + len(ids), nbytes + len(document.encode())
            ids = ids if max_tokens is None else ids[: max_tokens - used]
            used += len(ids)
            digest.update(ids.tobytes() + b"\n")
            documents_read = number + 1
            windows += [Window(number, start, ids[start : start + room]) for start in range(0, len(ids), room)]
            if used == max_tokens:
                break
        windows = [window for window in windows if len(window.ids) + len(self.prefix) > 1]
        if not windows:
            raise UsageError(f"{name}: {used} tokens; at least 2 are needed, of which the second can be predicted")
        unit = DOCUMENT if len({window.document for window in windows}) >= _FEWEST_DOCUMENTS else WINDOW
        return TokenizedText(name, documents_read, tuple(windows), nbytes / tokens, unit, digest.hexdigest())

    @functools.cached_property
    def batches(self) -> tuple[WindowBatch, ...]:
        """All windows in batches, in the order of the scoring pass."""
        lists, first_unit = [], 0
        for number, text in enumerate(self.texts):
            lists.append(list(self._batches_of(number, text, first_unit)))
            first_unit += text.documents if text.unit == DOCUMENT else len(text.windows)
        return interleave(lists)

    def _batches_of(self, number: int, text: TokenizedText, first_unit: int) -> Iterator[WindowBatch]:
        order = list(range(len(text.windows)))
        random.Random(text.name).shuffle(order)
        by_length: dict[int, list[int]] = {}
        chunks: list[tuple[int, ...]] = []
        for index in order:  # a batch ends when it is full, so that its place in the order is random too
            length = len(text.windows[index].ids)
            pending = by_length.setdefault(length, [])
            pending.append(index)
            if len(pending) * length >= _BATCH_TOKENS:
                chunks.append(tuple(by_length.pop(length)))
        chunks += [tuple(pending) for pending in by_length.values()]
        for chunk in chunks:
            windows = [text.windows[index] for index in chunk]
            units = [w.document if text.unit == DOCUMENT else i for i, w in zip(chunk, windows, strict=True)]
            rows = [[*self.prefix, *window.ids.tolist()] for window in windows]
            tokens = sum(len(window.ids) for window in windows)
            yield WindowBatch(number, chunk, torch.tensor(rows), first_unit + torch.tensor(units), tokens)


def _name(source: SourceLike) -> str:
    if isinstance(source, str):
        source = Source.parse(source)
    return Path(source.name if isinstance(source, Source) else source).name


def _built_in(name: str) -> str:
    return (resources.files("minifloat.evaluate.compare") / "texts" / f"{name}.txt").read_text(encoding="utf-8")


def _documents(source: Source, tokenizer: TextTokenizer) -> Iterator[str]:
    kind, files = locate(source)
    if kind == "hub":
        yield from _rows(source, tokenizer)
    for path in files:
        if path.suffix.lower() in _TEXT_SUFFIXES:
            yield from _text_file(path)
        else:
            yield from _rows(Source(os.fspath(path), source.column), tokenizer)


def _rows(source: Source, tokenizer: TextTokenizer) -> Iterator[str]:
    reader = SourceReader(source, tokenizer, random.Random(0))
    return (document.text for document in reader.texts())


def _text_file(path: Path) -> Iterator[str]:
    try:
        with storage_errors(path, "read it"):
            text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from None
    return _parts(text)


def _parts(text: str) -> Iterator[str]:
    parts = text.split(END_OF_TEXT)
    return iter(parts if len(parts) == 1 else [part.strip("\n") for part in parts if part.strip()])


assert set(_TEXT_SUFFIXES) <= READERS.keys()
