"""Documents as Markdown, for the model card (README.md) of a checkpoint: a digest without charts and quoted passages.

The card has YAML metadata in its head, and sections between marker comments, which are replaced in place; everything
else stays as it is, byte for byte. Hubs render a card as HTML, and it contains names of texts and tokens of models, so
`escape` leaves no markup in them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint.files import read_small, resolve_folder, written_whole
from minifloat.checkpoint.rewrite import CARD_FILE
from minifloat.errors import CheckpointError
from minifloat.report import document as doc
from minifloat.report.text import visible

_LARGEST_CARD = 16 * 2**20  #: bytes; hubs already refuse far smaller cards
_HEAD = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
#: Characters that Markdown or HTML interpret; a bare ``www.``, ``://`` or ``@`` becomes a link. Underscores inside of
#: words and brackets that no link follows need no escaping.
_MARKUP = re.compile(r"[\\`*<&|~#$!@]|\](?=[(\[:])|:(?=//)|(?<=[wW])\.|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def escape(text: str) -> str:
    """Return Markdown that shows the text literally in one line, with control characters made `visible`."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", visible(text))


def markers(name: str) -> tuple[str, str]:
    return f"<!-- minifloat {name}: begin -->", f"<!-- minifloat {name}: end -->"


def write(document: doc.Document) -> str:
    return "\n".join(_lines(document.blocks, 2)).rstrip("\n") + "\n"


def write_section(name: str, document: doc.Document) -> str:
    begin, end = markers(name)
    return f"{begin}\n{write(document)}{end}\n"


def _lines(blocks: Iterable[doc.Block], level: int) -> Iterator[str]:
    for block in doc.shown(blocks, doc.On.CARD):
        match block:
            case doc.Section():
                if block.title:
                    yield from (f"{'#' * level} {escape(block.title)}", "")
                yield from _lines(block.blocks, level + 1)
            case doc.Folded():
                yield from _lines(block.blocks, level)
            case doc.Text():
                yield from (f"**{escape(block.text)}**" if block.tone == "strong" else escape(block.text), "")
            case doc.Bullets():
                yield from (*(f"- {escape(item)}" for item in block.items), "")
            case doc.Facts():
                yield from (*(f"- {escape(name)}: {escape(value)}" for name, value in block.pairs), "")
            case doc.Alert():
                yield f"- **{escape(block.title)}**"
                yield from (*(f"  - {escape(reason)}" for reason in block.reasons), "")
            case doc.Code():
                yield from _code(block)
            case doc.Table():
                yield from _table(block)
            case doc.Figure(chart=str()):
                yield from (f"![{escape(block.caption)}]({block.chart})", "")
            case doc.Figure() | doc.Passage():
                pass


def _code(block: doc.Code) -> Iterator[str]:
    """Yield a fenced block; indented code after a list would be part of the list, and its markup would count."""
    lines = [visible(line) for line in block.text.splitlines()]
    fence = "`" * max(3, 1 + max((len(run) for line in lines for run in re.findall("`+", line)), default=0))
    yield from (f"{fence}{block.language}", *lines, fence, "")


def _table(block: doc.Table) -> Iterator[str]:
    """Yield the lines of a table; the heading of a group of rows becomes part of their names."""
    if block.title:
        yield from (escape(block.title), "")
    columns, rows = block.shown(doc.On.CARD)
    yield f"| {' | '.join(escape(column.name) for column in columns)} |"
    yield f"| {' | '.join('---' if column.left else '--:' for column in columns)} |"
    group = ""
    for row in rows:
        if len(row) == 1 and len(columns) > 1:
            group = f"{row[0]}: "
        else:
            yield f"| {' | '.join(escape(str(cell)) for cell in [f'{group}{row[0]}', *row[1:]])} |"
    yield ""


def metadata_head(values: Mapping[str, Any]) -> str:
    from huggingface_hub.utils import yaml_dump

    return f"---\n{yaml_dump(dict(values), sort_keys=False)}---\n"


def read_metadata(card: str) -> dict[str, Any]:
    """Return the metadata in the head of a card; empty if the card has no head."""
    import yaml

    match = _HEAD.match(card)
    try:
        metadata = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if metadata is not None and not isinstance(metadata, dict):
        raise ValueError(f"expected a mapping, found {type(metadata).__name__}")
    return metadata or {}


def add_metadata(card: str, values: Mapping[str, Any]) -> str:
    from huggingface_hub.utils import yaml_dump

    match = _HEAD.match(card)
    if match is None:
        return metadata_head(values) + "\n" + card
    end = match.end(1)
    return card[:end] + yaml_dump(dict(values), sort_keys=False) + card[end:]


def replace_metadata(card: str, values: Mapping[str, Any]) -> str:
    """Return the card with a new head in place of the former one, whose YAML comments are lost."""
    match = _HEAD.match(card)
    return metadata_head(values) + (card if match is None else card[match.end() :])


def read_card(folder: Path) -> bytes:
    return read_small(folder, CARD_FILE, _LARGEST_CARD, CheckpointError)


def write_card(folder: Path, content: bytes) -> Path:
    """Replace the card of a checkpoint in one step: write a temporary file beside it, and rename the file."""
    card = folder / CARD_FILE
    with written_whole(card) as file:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(file.fileno(), card.stat().st_mode & 0o777)
        file.write(content)
    return card


def update_card(folder: str | os.PathLike[str], section: str) -> Path:
    """Put a section into the README.md of a checkpoint, and create that file if it does not exist."""
    root = resolve_folder(folder)
    try:
        before = read_card(root)
    except FileNotFoundError:
        before = f"# {escape(root.name)}\n".encode()
    return write_card(root, with_section(before, section, root / CARD_FILE))


def with_section(card: bytes, section: str, path: Path) -> bytes:
    """Return the card with a section in place of the section with the same markers, or at the end."""
    lines = section.rstrip("\n").split("\n")
    begin, end = (re.escape(line.encode()) for line in (lines[0], lines[-1]))
    sections = list(re.finditer(rb"^" + begin + rb"\r?\n.*?^" + end + rb"\r?$", card, re.DOTALL | re.MULTILINE))
    marker_lines = re.findall(rb"^(?:" + begin + rb"|" + end + rb")\r?$", card, re.MULTILINE)
    if len(sections) > 1 or len(marker_lines) != 2 * len(sections):
        raise CheckpointError(
            path,
            f"expected one pair of the lines {lines[0]!r} and {lines[-1]!r} or neither line, found "
            f"{len(marker_lines)} such lines; delete the extra ones",
        )
    newline = b"\r\n" if b"\r\n" in card else b"\n"
    new = newline.join(line.encode() for line in lines)
    if sections:
        start, stop = sections[0].span()
        return card[:start] + new + (b"\r" if card[stop - 1 : stop] == b"\r" else b"") + card[stop:]
    gap = b"" if not card or card.endswith(2 * newline) else newline if card.endswith(b"\n") else 2 * newline
    return card + gap + new + newline


def without_section(card: str, name: str) -> str:
    """Return the card without the section of a command, because it does not apply to a model made from this one."""
    begin, end = (re.escape(line) for line in markers(name))
    return re.sub(rf"^{begin}\r?\n.*?^{end}\r?\n?\n?", "", card, flags=re.DOTALL | re.MULTILINE)
