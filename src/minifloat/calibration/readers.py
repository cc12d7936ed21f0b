"""Text sources and their readers, which read row by row and only as far as the caller iterates.

Each reader yields pairs of a row's location, for messages, and the row itself: text, or a mapping of columns to cells.
"""

from __future__ import annotations

import csv
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint.files import storage_errors
from minifloat.errors import DataError, lookup

#: Separates the documents of many text files.
END_OF_TEXT = "<|endoftext|>"
#: Name of the source that is no file: text that the model itself writes. A file or folder of this name is ``./self``.
OWN_TEXT = "self"

#: Columns to look for if the source names none: plain text, and chat messages.
_USUAL_COLUMNS = ("text", "messages")

#: Characters of a text file to search for END_OF_TEXT; if there is none, documents end at blank lines.
_TEXT_HEAD = 1 << 20
#: Characters after which a document of a text file ends with the line, so that text without separators can be shuffled.
_LONGEST_DOCUMENT = 1 << 14
#: Maximum bytes of a line, so that a file without line ends cannot fill the memory.
_LONGEST_LINE = 1 << 26
#: Maximum bytes of a JSON array, the only kind of file that is read whole.
_LONGEST_ARRAY = 1 << 28
_PARQUET_ROWS = 256

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    name: str
    column: str | None = None  # column of a table that holds text or chat messages; None: ``text``, else ``messages``
    weight: float = 1.0
    config: str | None = None
    split: str | None = None  # split of a data set of the hub; None: ``train``

    def __post_init__(self) -> None:
        if not self.name:
            raise DataError("a data source needs the path of a file or folder, or the name of a data set")
        if not 0 < self.weight < math.inf:
            raise DataError(f"{self.name}: expected a weight above 0, got {self.weight}")
        if self.name == OWN_TEXT and (self.column, self.config, self.split) != (None, None, None):
            raise DataError(
                f"{self.name}: text that the model itself writes has no column, config or split; a file or folder of "
                f"this name is ./{self.name}"
            )

    @classmethod
    def parse(cls, text: str) -> Source:
        """Return the source of a text ``NAME[#KEY=VALUE,...]``, such as an argument of ``--data``.

        Keys are column, weight, config and split. The options begin after the last ``#``, so a path that contains ``#``
        needs another ``#`` at its end. Examples: ``stories.txt``, ``gsm8k.jsonl#column=question,weight=2``,
        ``openai/gsm8k#config=main,column=answer``, ``c#.txt#``.
        """
        name, mark, rest = text.rpartition("#")
        if not mark:
            return cls(text)
        options: dict[str, Any] = {}
        for option in filter(None, rest.split(",")):
            key, equals, value = option.partition("=")
            if not (equals and value) or key in options:
                raise DataError(
                    f"{text}: after #, expected KEY=VALUE, each key once, got {option!r}; "
                    "a path that contains # ends with another #"
                )
            try:
                options[key] = lookup("option of a data source", key, _OPTIONS)(value)
            except ValueError:
                raise DataError(f"{text}: expected a number for {key}, got {value!r}") from None
        return cls(name, **options)


_OPTIONS: dict[str, Callable[[str], str | float]] = {"column": str, "weight": float, "config": str, "split": str}


def locate(source: Source) -> tuple[str, list[Path]]:
    """Return the kind of a source and its files, sorted; no files for a data set of the hub."""
    if source.name == OWN_TEXT:
        raise DataError(
            f"{source.name}: text that the model itself writes serves calibration only; a file or folder of this name "
            f"is ./{source.name}"
        )
    path = Path(source.name)
    suffixes = ", ".join(READERS)
    with storage_errors(path, "look it up"):
        exists = path.exists()
    if not exists:
        if _HUB_NAME.fullmatch(source.name) and path.suffix.lower() not in READERS:
            return "hub", []
        raise DataError(f"{source.name}: no such file or folder")
    if source.config is not None or source.split is not None:
        raise DataError(f"{source.name}: config and split are for data sets of the hub; this is a file or folder")
    if path.is_dir():
        with storage_errors(path, "list it"):
            readable = sorted(file for file in path.rglob("*") if file.suffix.lower() in READERS and file.is_file())
        files = [file for file in readable if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files:
            raise DataError(f"{source.name}: no file in this folder ends in one of {suffixes}")
        return "folder", files
    if not path.is_file() or path.suffix.lower() not in READERS:
        raise DataError(f"{source.name}: expected a folder, or a file that ends in one of {suffixes}")
    if READERS[path.suffix.lower()] is _text_rows and source.column is not None:
        raise DataError(f"{source.name}: a text file has no columns, and so none called {source.column!r}")
    return path.suffix.lower().removeprefix("."), [path]


def choose_column(names: Iterable[str], requested: str | None, where: str) -> str:
    """Return the requested column, or the first usual one; raise a `DataError` that lists `names` if it is missing."""
    existing = list(names)
    for column in _USUAL_COLUMNS if requested is None else (requested,):
        if column in existing:
            return column
    listing = ", ".join(clip(str(name)) for name in existing)
    if requested is None:
        usual = " and no ".join(map(repr, _USUAL_COLUMNS))
        raise DataError(f"{where}: no column {usual}; choose one (#column=NAME) of: {listing}")
    raise DataError(f"{where}: no column {requested!r}; columns: {listing}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a UTF-8 file, with their line ends, and their numbers from 1."""
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
    """Yield documents, which end at END_OF_TEXT or, if the head of the file has none, also at blank lines."""
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
    """Yield the objects of a JSON array, or of lines of JSON."""
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
        raise DataError(f"{where}: not JSON: {first_line(error)}") from None


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
    """Yield rows of the chosen column, reading only the pages of that column."""
    arrow, parquet = (_import_extra(module, path) for module in ("pyarrow", "pyarrow.parquet"))
    with storage_errors(path, "read it"), path.open("rb") as stream:
        try:
            file = parquet.ParquetFile(stream, pre_buffer=False)
            chosen = choose_column(file.schema_arrow.names, column, str(path))
            numbers = itertools.count(1)
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=[chosen]):
                for row in batch.to_pylist():
                    yield f"{path}, row {next(numbers)}", row
        except (arrow.ArrowException, UnicodeDecodeError, OSError) as error:
            if getattr(error, "errno", None) is not None:  # from the system, not from a decoder of Arrow
                raise
            raise DataError(f"{path}: not a parquet file that can be read: {first_line(error)}") from error


#: Suffix -> reader. A reader takes a path and a requested column, and yields (location, row); a row is text or a
#: mapping.
READERS: dict[str, Callable[[Path, str | None], Iterator[tuple[str, Any]]]] = {
    ".txt": _text_rows,
    ".md": _text_rows,
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


def hub_rows(source: Source) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a data set of the hub, streamed; every error becomes a `DataError`."""
    datasets = _import_extra("datasets", source.name)
    try:
        rows = datasets.load_dataset(source.name, source.config, split=source.split or "train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{source.name}, row {number}", row
    except Exception as error:  # datasets passes on any exception of its network and file libraries
        raise DataError(
            f"{source.name}: no such file or folder, and as a data set of the hub it cannot be read: "
            f"{first_line(error)}; without network, give a file ({', '.join(READERS)})"
        ) from error


def _import_extra(module: str, name: Path | str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{name}: reading it needs datasets: pip install 'minifloat[eval]' ({error})") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def clip(text: str, length: int = 60) -> str:
    """Return at most `length` characters of a text, for messages."""
    return text if len(text) <= length else text[: length - 1] + "…"
