"""A model card as a file: metadata in its head, and sections of ours between two marker comments.

A section is replaced where it is, and what is outside of the markers stays byte for byte, so a person may write into a
card that commands keep up to date.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint.files import read_small, resolve_folder, written_whole
from minifloat.checkpoint.rewrite import CARD_FILE
from minifloat.errors import CheckpointError
from minifloat.report.text import visible

_LARGEST_CARD = 16 * 2**20  #: bytes; hubs refuse far smaller ones
_HEAD = re.compile(r"\A\s*---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
#: Of Markdown and HTML; a bare ``www.``, ``://`` or ``@`` becomes a link. Underscores inside of words do nothing, and
#: brackets alone.
_MARKUP = re.compile(r"[\\`*<&|~#$!@]|\](?=[(\[:])|:(?=//)|(?<=[wW])\.|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def markdown(text: str) -> str:
    """Text as Markdown that shows it, in one line; `visible`."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", visible(text))


def markers(name: str) -> tuple[str, str]:
    """The lines around the section of a command."""
    return f"<!-- minifloat {name}: begin -->", f"<!-- minifloat {name}: end -->"


# ------------------------------------------------------------------------------------------------- metadata


def metadata_head(values: Mapping[str, Any]) -> str:
    """The head of a card: values in their order, as YAML that quotes what needs it."""
    from huggingface_hub.utils import yaml_dump

    return f"---\n{yaml_dump(dict(values), sort_keys=False)}---\n"


def read_metadata(card: str) -> dict[str, Any]:
    """The metadata in the head of a card; empty where it has none.

    Raises:
        ValueError: The head is no YAML, or no mapping.
    """
    import yaml

    match = _HEAD.match(card)
    try:
        found = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"expected a mapping, found {type(found).__name__}")
    return found or {}


def add_metadata(card: str, values: Mapping[str, Any]) -> str:
    """A card with more in its head, after what is there."""
    from huggingface_hub.utils import yaml_dump

    match = _HEAD.match(card)
    if match is None:
        return metadata_head(values) + "\n" + card
    at = match.end(1)
    return card[:at] + yaml_dump(dict(values), sort_keys=False) + card[at:]


def replace_metadata(card: str, values: Mapping[str, Any]) -> str:
    """A card with this as its head; comments in the former one are lost."""
    match = _HEAD.match(card)
    return metadata_head(values) + (card if match is None else card[match.end() :])


# ------------------------------------------------------------------------------------------------- sections


def read_card(folder: Path) -> bytes:
    """The card of a checkpoint.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: It is incredibly large.
        UnsafeFileError: It is no regular file, or a link that leaves the folder.
        StorageError: The system refuses.
    """
    return read_small(folder, CARD_FILE, _LARGEST_CARD, CheckpointError)


def write_card(folder: Path, content: bytes) -> Path:
    """Replace the card of a checkpoint; it is written beside its place and renamed, so that it is whole at any time.

    Raises:
        StorageError: The system refuses.
    """
    card = folder / CARD_FILE
    with written_whole(card) as file:
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(file.fileno(), card.stat().st_mode & 0o777)
        file.write(content)
    return card


def update_card(folder: str | os.PathLike[str], section: str) -> Path:
    """Put a section into a checkpoint's README.md, which is made where there is none.

    Args:
        folder: A checkpoint.
        section: Its first and its last line are its `markers`.

    Returns:
        The card.

    Raises:
        NotACheckpointError: There is no such folder.
        CheckpointError: A marker stands alone, or there are several sections of that name.
        UnsafeFileError: The card is no regular file, or a link that leaves the folder.
        StorageError: The system refuses.
    """
    root = resolve_folder(folder)
    try:
        before = read_card(root)
    except FileNotFoundError:
        before = f"# {markdown(root.name)}\n".encode()
    return write_card(root, with_section(before, section, root / CARD_FILE))


def with_section(card: bytes, section: str, path: Path) -> bytes:
    """A card with the section in place of the one with the same markers, or at the end.

    Args:
        card: The card.
        section: Its first and its last line are its `markers`.
        path: The card, for messages.

    Raises:
        CheckpointError: A marker stands alone, or there are several sections of that name.
    """
    lines = section.rstrip("\n").split("\n")
    begin, end = (re.escape(line.encode()) for line in (lines[0], lines[-1]))
    found = list(re.finditer(rb"^" + begin + rb"\r?\n.*?^" + end + rb"\r?$", card, re.DOTALL | re.MULTILINE))
    alone = re.findall(rb"^(?:" + begin + rb"|" + end + rb")\r?$", card, re.MULTILINE)
    if len(found) > 1 or len(alone) != 2 * len(found):
        raise CheckpointError(
            path, f"expected one pair of the lines {lines[0]!r} and {lines[-1]!r} or none; delete what is left over"
        )
    newline = b"\r\n" if b"\r\n" in card else b"\n"
    new = newline.join(line.encode() for line in lines)
    if found:
        start, stop = found[0].span()
        return card[:start] + new + (b"\r" if card[stop - 1 : stop] == b"\r" else b"") + card[stop:]
    gap = b"" if not card or card.endswith(2 * newline) else newline if card.endswith(b"\n") else 2 * newline
    return card + gap + new + newline


def without_section(card: str, name: str) -> str:
    """A card without the section of a command: what it said is not true of what was made of the model since."""
    begin, end = (re.escape(line) for line in markers(name))
    return re.sub(rf"^{begin}\r?\n.*?^{end}\r?\n?\n?", "", card, flags=re.DOTALL | re.MULTILINE)
