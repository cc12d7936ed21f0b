"""Text for calibration, as sequences of token ids.

Activation scales are only as good as the text that they were measured on, so what was used is recorded: sources, the
hash of the text, tokens. Sources are files, folders or data sets of the hub, read as far as the samples need and no
farther, and mixed by weight. Nothing is ever padded: a sequence holds only tokens of the text, and a padded position
therefore cannot reach the statistics.

Order: a source is read in blocks of at most 4,096 documents or 16 Mi characters; the documents of a block are
shuffled by the seed. A large file therefore contributes from its beginning; the files of a folder are read one after
the other, in an order drawn by the seed. The sequences of several sources are spread evenly among each other.

Text files and CSV, TSV and JSON files need no library. Parquet files and data sets of the hub need `datasets` (the
extra `eval`); only the latter use the network.

Left out: cleaning, deduplication, and judging whether the text is like what the model will see.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from minifloat.checkpoint.files import storage_errors
from minifloat.errors import DataError, lookup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SAMPLES = 512
DEFAULT_SEQ_LEN = 512

#: Stands between the documents of many text files.
END_OF_TEXT = "<|endoftext|>"

#: Columns that are looked for where none is named: plain text, and chat messages.
_USUAL_COLUMNS = ("text", "messages")

#: What is shuffled at a time, and therefore held: whichever is reached first.
_BLOCK_DOCUMENTS = 4096
_BLOCK_CHARACTERS = 1 << 24
#: Characters of a text file that are searched for END_OF_TEXT before blank lines are taken for ends.
_TEXT_HEAD = 1 << 20
#: Characters after which a document of a text file ends with the line, so that a text without ends is shuffled too.
_LONGEST_DOCUMENT = 1 << 14
#: Bytes of a line, so that a file without line ends cannot fill the memory.
_LONGEST_LINE = 1 << 26
#: Bytes of a JSON array, the one kind of file that is read whole.
_LONGEST_ARRAY = 1 << 28
_PARQUET_ROWS = 256

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Source:
    """Where text comes from.

    Attributes:
        name: Path of a file or folder, or, if there is none, the name of a data set on the hub.
        column: The column of a table that holds text or chat messages; by default ``text``, else ``messages``.
        weight: Its share of the sequences, relative to the other sources.
        config: Configuration of a data set of the hub, where it has several.
        split: Split of a data set of the hub; by default ``train``.

    Raises:
        DataError: No name, or a weight that is not a finite number above 0.
    """

    name: str
    column: str | None = None
    weight: float = 1.0
    config: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise DataError("a data source needs the path of a file or folder, or the name of a data set")
        if not 0 < self.weight < math.inf:
            raise DataError(f"{self.name}: expected a weight above 0, got {self.weight}")

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read ``NAME[#KEY=VALUE,...]``, as given to ``--data``; keys: column, weight, config, split.

        The options begin after the last ``#``: a path that contains one is written with another at its end. Examples:
        ``stories.txt``, ``gsm8k.jsonl#column=question,weight=2``, ``openai/gsm8k#config=main,column=answer``,
        ``c#.txt#``.

        Raises:
            DataError: An option that is not KEY=VALUE or comes twice, or a weight that is no number.
            UnknownNameError: An unknown key.
        """
        name, mark, rest = text.rpartition("#")
        if not mark:
            return cls(text)
        options: dict[str, Any] = {}
        for option in filter(None, rest.split(",")):
            key, equals, value = option.partition("=")
            if not (equals and value) or key in options:
                raise DataError(
                    f"--data {text}: after #, expected KEY=VALUE, each key once, got {option!r}; "
                    "a path that contains # ends with another #"
                )
            try:
                options[key] = lookup("option of a data source", key, _OPTIONS)(value)
            except ValueError:
                raise DataError(f"--data {text}: expected a number for {key}, got {value!r}") from None
        return cls(name, **options)


_OPTIONS: dict[str, Callable[[str], str | float]] = {"column": str, "weight": float, "config": str, "split": str}


@dataclass(frozen=True)
class CalibrationSet:
    """Sequences of token ids, and where they came from.

    Attributes:
        sequences: Token ids, without padding; all of one length if packed.
        record: For JSON: ``sources`` (a list: name, kind, column, weight, documents, sequences, tokens, sha256 of the
            text used), ``sequences``, ``tokens`` and ``sha256`` (of the token ids) of this set, ``seq_len``,
            ``packing``, ``seed``, ``tokenizer`` (sha256 of its definition). A part made by `held_out` says so under
            ``part``; its ``sources`` still describe the whole.
    """

    sequences: tuple[tuple[int, ...], ...]
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(map(len, self.sequences))

    def held_out(self, fraction: float) -> tuple[CalibrationSet, CalibrationSet]:
        """Split into what to calibrate on and what to check the scales on.

        Args:
            fraction: Of the sequences, rounded, at least one; which ones depends on the number of sequences alone.

        Returns:
            The rest, and the part held out; both in the order of this set.

        Raises:
            DataError: The fraction is not between 0 and 1, or leaves nothing to calibrate on.
        """
        size = len(self.sequences)
        count = max(1, round(size * fraction)) if 0 < fraction < 1 else 0
        if not 0 < count < size:
            raise DataError(f"cannot hold out {fraction} of {size} sequences and keep some: ask for more samples")
        chosen = set(_permuted(range(size), random.Random("held out"))[:count])
        rest = self._part("rest", fraction, (index for index in range(size) if index not in chosen))
        return rest, self._part("held out", fraction, sorted(chosen))

    def _part(self, name: str, fraction: float, indices: Iterable[int]) -> CalibrationSet:
        sequences = tuple(self.sequences[index] for index in indices)
        part = {"name": name, "fraction_held_out": fraction}
        return CalibrationSet(sequences, {**self.record, **_describe(sequences), "part": part})


def load_calibration_data(
    sources: str | os.PathLike[str] | Source | Sequence[str | os.PathLike[str] | Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int = DEFAULT_SAMPLES,
    seq_len: int = DEFAULT_SEQ_LEN,
    seed: int = 0,
    packing: bool = True,
    text_column: str | None = None,
    vocab_size: int | None = None,
) -> CalibrationSet:
    """Read text and cut it into sequences of tokens; the same arguments and files give the same sequences.

    Kinds of sources: files by suffix, folders of such files, data sets of the hub, which are streamed.

    - ``.txt``, ``.md``: UTF-8. Documents end at ``<|endoftext|>``, or at blank lines if the first Mi characters of the
      file have none, and in any case at the first line end after 16 Ki characters.
    - ``.jsonl``: an object per line. ``.json``: the same, or one array of objects, which is read whole.
    - ``.csv``, ``.tsv``: the first row names the columns. ``.parquet``.

    Where a table's column holds lists of chat messages, the tokenizer's chat template makes each list a document. Empty
    documents are skipped.

    Every sequence begins with BOS if the tokenizer begins texts with one.

    Args:
        sources: One or several; a string is parsed by `Source.parse`, a path object is taken as it is.
        tokenizer: That of the model.
        samples: Sequences in all. Each source gives its share by weight, by the method of largest remainders.
        seq_len: Tokens of a sequence, BOS included.
        seed: Of the shuffling.
        packing: Join the documents of a source, each with EOS after it (chats end as their template ends them), and
            cut them into sequences of exactly `seq_len`; no token is lost but those that fill no sequence at the end.
            Otherwise a sequence is one document, cut off after `seq_len` tokens, and may be shorter.
        text_column: The column for tables whose source names none.
        vocab_size: Of the model; refuse token ids beyond it.

    Raises:
        DataError: A source is missing, unreadable, empty or too small for its share, or a column does not exist; chat
            messages without a chat template; a token id beyond the vocabulary; `samples` or `seq_len` out of range.
        UnknownNameError: An unknown option of a source.
        StorageError: The operating system refused a read.
    """
    listed = [sources] if isinstance(sources, (str, os.PathLike, Source)) else list(sources)
    parsed = [_as_source(source) for source in listed]
    prefix = _prefix(tokenizer)
    if not parsed:
        raise DataError("no text to calibrate on: give at least one source")
    if samples < 1 or seq_len <= len(prefix):
        raise DataError(f"expected samples >= 1 and seq_len > {len(prefix)}; got {samples} and {seq_len}")
    drawn: list[list[tuple[int, ...]]] = []
    records = []
    for index, (source, count) in enumerate(zip(parsed, _shares(samples, parsed), strict=True)):
        reading = _Reading(source, source.column or text_column, tokenizer, random.Random(f"{seed}/{index}"))
        documents = reading.documents(end=packing)
        cut = _pack(documents, prefix, seq_len) if packing else _truncate(documents, prefix, seq_len)
        sequences = list(itertools.islice(cut, count))
        reading.check(sequences, count, seq_len, vocab_size)
        drawn.append(sequences)
        records.append(reading.record(sequences))
    mixed = _interleave(drawn)
    settings = {"seq_len": seq_len, "packing": packing, "seed": seed, "tokenizer": _fingerprint(tokenizer)}
    return CalibrationSet(mixed, {"sources": records, **_describe(mixed), **settings})


def _as_source(source: str | os.PathLike[str] | Source) -> Source:
    if isinstance(source, Source):
        return source
    return Source.parse(source) if isinstance(source, str) else Source(os.fspath(source))


def _shares(samples: int, sources: Sequence[Source]) -> list[int]:
    """Sequences per source: proportional to the weights, what rounding leaves to the largest remainders.

    Raises:
        DataError: A source would get none.
    """
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


def _interleave(drawn: Sequence[Sequence[_Entry]]) -> tuple[_Entry, ...]:
    """Spread the entries of each list evenly over the whole, so that every stretch of it is mixed as the whole is."""
    keyed = [((position + 0.5) / len(entries), entry) for entries in drawn for position, entry in enumerate(entries)]
    return tuple(entry for _, entry in sorted(keyed, key=lambda pair: pair[0]))


def _permuted(entries: Sequence[_Entry], rng: random.Random) -> list[_Entry]:
    """In random order; only `random()` is used, whose numbers Python promises never to change."""
    keys = [rng.random() for _ in entries]
    return [entries[index] for index in sorted(range(len(entries)), key=keys.__getitem__)]


def _describe(sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
    lines = (" ".join(map(str, sequence)) + "\n" for sequence in sequences)
    digest = hashlib.sha256("".join(lines).encode()).hexdigest()
    return {"sequences": len(sequences), "tokens": sum(map(len, sequences)), "sha256": digest}


# ------------------------------------------------------------------------------------------------- tokens


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What every sequence begins with: the BOS token, if the tokenizer begins a text with it."""
    begin = list(tokenizer("a").input_ids[:1])
    return begin if begin == [tokenizer.bos_token_id] else []


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the tokenizer's definition; of its vocabulary, where it is not of the `tokenizers` library."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


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


class _Document(NamedTuple):
    text: str
    is_chat: bool


class _Reading:
    """One source while it is read; keeps account of what was used of it."""

    def __init__(
        self, source: Source, column: str | None, tokenizer: PreTrainedTokenizerBase, rng: random.Random
    ) -> None:
        self.source, self.tokenizer, self.rng = source, tokenizer, rng
        self.column = column
        self.columns: set[str] = set()
        self.kind, self.files = _locate(source)
        self.used = 0
        self.digest = hashlib.sha256()

    def documents(self, end: bool) -> Iterator[list[int]]:
        """Token ids of each document, shuffled; without BOS where sequences begin with it; with EOS if `end`."""
        prefix, eos = _prefix(self.tokenizer), self.tokenizer.eos_token_id
        for document in _shuffle(self._texts(), self.rng):
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

    def check(self, sequences: Sequence[Sequence[int]], count: int, seq_len: int, vocab_size: int | None) -> None:
        """Raise a DataError unless there are `count` sequences, all within the vocabulary."""
        name = self.source.name
        if not self.used:
            raise DataError(f"{name}: no text in it")
        if len(sequences) < count:
            raise DataError(
                f"{name}: {len(sequences)} sequences of {seq_len} tokens, from {self.used} documents, where "
                f"{count} were asked for: lower --samples or --seq-len, or give more text"
            )
        largest = max(map(max, sequences))
        if vocab_size is not None and largest >= vocab_size:
            raise DataError(
                f"{name}: token id {largest} ({self.tokenizer.convert_ids_to_tokens(largest)!r}) is beyond the model's "
                f"vocabulary of {vocab_size}: this is the tokenizer of another model"
            )

    def record(self, sequences: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What was used, for JSON."""
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

    def _texts(self) -> Iterator[_Document]:
        """The documents of the source in the order of its files."""
        if self.kind == "hub":
            yield from self._from_rows(_hub_rows(self.source))
        for path in _permuted(self.files, self.rng):
            yield from self._from_rows(_READERS[path.suffix.lower()](path, self.column))

    def _from_rows(self, rows: Iterator[tuple[str, Any]]) -> Iterator[_Document]:
        column: str | None = None
        for where, row in rows:
            value = row
            if isinstance(row, Mapping):
                column = _choose_column(row, column or self.column, where)
                self.columns.add(column)
                value = row[column]
            text, is_chat = self._render(value, where), not isinstance(value, str)
            if text and not text.isspace():
                yield _Document(text, is_chat)

    def _render(self, value: Any, where: str) -> str:
        """The text of one cell; empty where there is none."""
        if isinstance(value, str):
            text = value
        elif value is None or (isinstance(value, list) and not value):
            text = ""
        elif isinstance(value, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in value):
            text = self._render_chat(value, where)
        else:
            raise DataError(
                f"{where}: expected text, or a list of chat messages with role and content; "
                f"found {type(value).__name__} {_clip(repr(value))}"
            )
        if not _is_unicode(text):
            raise DataError(f"{where}: half a surrogate pair, which is no character and has no UTF-8")
        return text

    def _render_chat(self, messages: list[Mapping[str, Any]], where: str) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(f"{where}: chat messages, but the model's tokenizer has no chat template; give plain text")
        try:
            return str(self.tokenizer.apply_chat_template([dict(turn) for turn in messages], tokenize=False))
        except Exception as error:  # a template is a program of the model's author, and raises what it likes
            raise DataError(f"{where}: the model's chat template refuses it: {_first_line(error)}") from error


def _shuffle(documents: Iterable[_Document], rng: random.Random) -> Iterator[_Document]:
    """Shuffle block by block."""
    block: list[_Document] = []
    characters = 0
    for document in documents:
        block.append(document)
        characters += len(document.text)
        if len(block) >= _BLOCK_DOCUMENTS or characters >= _BLOCK_CHARACTERS:
            yield from _permuted(block, rng)
            block, characters = [], 0
    yield from _permuted(block, rng)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# ------------------------------------------------------------------------------------------------- files


def _locate(source: Source) -> tuple[str, list[Path]]:
    """The kind of a source and its files, sorted; no files for a data set of the hub."""
    path = Path(source.name)
    suffixes = ", ".join(_READERS)
    with storage_errors(path, "look it up"):
        exists = path.exists()
    if not exists:
        if _HUB_NAME.fullmatch(source.name) and path.suffix.lower() not in _READERS:
            return "hub", []
        raise DataError(f"{source.name}: no such file or folder")
    if source.config is not None or source.split is not None:
        raise DataError(f"{source.name}: config and split are for data sets of the hub; this is a file or folder")
    if path.is_dir():
        with storage_errors(path, "list it"):
            found = sorted(file for file in path.rglob("*") if file.suffix.lower() in _READERS and file.is_file())
        files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files:
            raise DataError(f"{source.name}: no file in this folder ends in one of {suffixes}")
        return "folder", files
    if not path.is_file() or path.suffix.lower() not in _READERS:
        raise DataError(f"{source.name}: expected a folder, or a file that ends in one of {suffixes}")
    if _READERS[path.suffix.lower()] is _text_rows and source.column is not None:
        raise DataError(f"{source.name}: a text file has no columns, and so none called {source.column!r}")
    return path.suffix.lower().removeprefix("."), [path]


def _choose_column(names: Iterable[str], wanted: str | None, where: str) -> str:
    existing = list(names)
    for column in _USUAL_COLUMNS if wanted is None else (wanted,):
        if column in existing:
            return column
    listing = ", ".join(_clip(str(name)) for name in existing)
    if wanted is None:
        usual = " and no ".join(map(repr, _USUAL_COLUMNS))
        raise DataError(f"{where}: no column {usual}; choose one (#column=NAME) of: {listing}")
    raise DataError(f"{where}: no column {wanted!r}; columns: {listing}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file, with their ends, and their numbers from 1."""
    with storage_errors(path, "read it"), path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST_LINE + 1)
            if not line:
                return
            if len(line) > _LONGEST_LINE:
                raise DataError(f"{path}, line {number}: longer than {_LONGEST_LINE >> 20} MiB; break it into lines")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = f"byte 0x{line[error.start]:02x} at position {error.start}"
                raise DataError(f"{path}, line {number}: not UTF-8: {byte}; convert the file to UTF-8") from None
            yield number, text.replace("\r\n", "\n")


def _text_rows(path: Path, _: str | None) -> Iterator[tuple[str, str]]:
    """Documents, which end at END_OF_TEXT or, if the head of the file has none, also at blank lines."""
    lines = (line for _, line in _lines(path))
    head: list[str] = []
    characters = 0
    blank_ends = True
    while blank_ends and characters < _TEXT_HEAD and (line := next(lines, "")):
        head.append(line)
        characters += len(line)
        blank_ends = END_OF_TEXT not in line
    pieces: list[str] = []
    characters = 0
    for line in itertools.chain(head, lines):
        *ended, begun = line.split(END_OF_TEXT)
        for piece, ends in [*((piece, True) for piece in ended), (begun, blank_ends and not begun.strip())]:
            pieces.append(piece)
            characters += len(piece)
            if ends or characters >= _LONGEST_DOCUMENT:
                yield str(path), "".join(pieces).strip("\n")
                pieces, characters = [], 0
    yield str(path), "".join(pieces).strip("\n")


def _jsonl_rows(path: Path, _: str | None) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        if not line.isspace():
            where = f"{path}, line {number}"
            yield where, _as_row(_parse_json(line, where), where)


def _json_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    """An array of objects, or lines of JSON."""
    begin = next((line.lstrip() for _, line in _lines(path) if not line.isspace()), "")
    if not begin.startswith("["):
        yield from _jsonl_rows(path, column)
        return
    with storage_errors(path, "read it"):
        size = path.stat().st_size
    if size > _LONGEST_ARRAY:
        raise DataError(f"{path}: a JSON array of more than {_LONGEST_ARRAY >> 20} MiB; convert it to .jsonl")
    rows = _parse_json("".join(line for _, line in _lines(path)), str(path))
    for number, row in enumerate(rows, 1):
        where = f"{path}, entry {number}"
        yield where, _as_row(row, where)


def _parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {_first_line(error)}") from None


def _as_row(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object with named columns, found {type(value).__name__}")
    return value


def _csv_rows(path: Path, _: str | None) -> Iterator[tuple[str, Any]]:
    reader = csv.reader((line for _, line in _lines(path)), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    try:
        names = next(reader, [])
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if cells and len(cells) != len(names):
                raise DataError(f"{where}: {len(cells)} cells, where the first row names {len(names)} columns")
            if cells:
                yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; convert it to .jsonl") from error


def _parquet_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    """Only the pages of the chosen column are read."""
    arrow, parquet = (_import_extra(module, path) for module in ("pyarrow", "pyarrow.parquet"))
    with storage_errors(path, "read it"), path.open("rb") as stream:
        try:
            file = parquet.ParquetFile(stream, pre_buffer=False)
            chosen = _choose_column(file.schema_arrow.names, column, str(path))
            numbers = itertools.count(1)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[chosen]):
                for row in batch.to_pylist():
                    yield f"{path}, row {next(numbers)}", row
        except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if getattr(error, "errno", None) is not None:  # from the system, not from a decoder of Arrow
                raise
            raise DataError(f"{path}: not a parquet file that can be read: {_first_line(error)}") from error


#: Suffix -> reader, called with the path and the column asked for; gives (where, row), a row being text or a mapping.
_READERS: dict[str, Callable[[Path, str | None], Iterator[tuple[str, Any]]]] = {
    ".txt": _text_rows,
    ".md": _text_rows,
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


# ------------------------------------------------------------------------------------------------- libraries


def _hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    datasets = _import_extra("datasets", source.name)
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{source.name}, row {number}", row
    except Exception as error:  # datasets passes on whatever its network and file libraries raise
        raise DataError(
            f"{source.name}: no such file or folder, and as a data set of the hub it cannot be read: "
            f"{_first_line(error)}; without network, give a file ({', '.join(_READERS)})"
        ) from error


def _import_extra(module: str, name: Path | str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{name}: reading it needs datasets: pip install 'minifloat[eval]' ({error})") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _clip(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
