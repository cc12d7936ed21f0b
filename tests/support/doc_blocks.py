"""The fenced blocks of a page of the documents, with what a comment before a block says about testing it.

A block in ``console`` shows commands behind ``$`` with their output; in ``bash``, commands alone; in ``python``, code.
Other languages show files and drawings. A comment directly before the fence changes how the block is tested:

    <!-- test: not run, needs a GPU -->        with the reason, which is counted and shown in docs/tests.md
    <!-- test: full -->                        only with --full
    <!-- test: numbers within 20% -->          in place of `DEFAULT_TOLERANCE`; integers too
    <!-- test: numbers vary -->                numbers have to be there; their values are not compared
    <!-- test: printed -->                     a text block: what the Python block before it printed
    <!-- test: status 1 -->                    the exit status of the last command
    <!-- test: first
    minifloat quantize MODEL OUT               lines that run before the block
    -->

Several are separated by semicolons. ``<!-- test: page not run, REASON -->`` at the top of a page is about all blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Languages whose blocks are executed.
RUN = ("console", "bash", "python")

_BLOCK = re.compile(
    r"(?:^ *<!-- test: (?P<marker>.*?) *-->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_PAGE_NOT_RUN = re.compile(r"^<!-- test: page not run, (.*?) *-->$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A command of a block, and the output that the page shows for it; None in a block that shows none."""

    command: str
    output: str | None


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    text: str
    span: tuple[int, int]
    not_run: str | None = None
    full: bool = False
    tolerance: str = ""
    status: int = 0
    first: str = ""
    printed: bool = False

    @property
    def steps(self) -> list[Step]:
        """The commands of a block in ``console`` or ``bash``."""
        if self.language == "bash":
            return [Step(line, None) for line in _whole_lines(self.text)]
        steps: list[Step] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                steps.append(Step(line[2:], ""))
            elif steps:
                steps[-1] = Step(steps[-1].command, f"{steps[-1].output}{line}\n")
            elif line.strip():
                raise ValueError(f"{self.page.name}:{self.line}: a console block begins with a command behind '$ '")
        return steps


def _whole_lines(text: str) -> list[str]:
    """Commands without comments, those with a backslash at the end joined."""
    lines = (re.sub(r"(^| +)#.*$", "", line).strip() for line in text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    whole = _PAGE_NOT_RUN.search(text)
    found = []
    for match in _BLOCK.finditer(text):
        indent = match["indent"]
        block = Block(
            page=page,
            line=text.count("\n", 0, match.start("indent")) + 1,
            language=match["language"],
            text=re.sub(f"^{indent}", "", match["text"], flags=re.MULTILINE),
            span=match.span("text"),
        )
        options = _options(match["marker"] or "", f"{page.name}:{block.line}")
        if whole and block.language in RUN:
            options["not_run"] = whole[1]
        found.append(Block(**{**vars(block), **options}))
    return found


def _options(marker: str, where: str) -> dict[str, object]:
    """The fields of `Block` that a comment sets."""
    head, _, first = marker.partition("\n")
    options: dict[str, object] = {"first": first}
    for option in filter(None, (part.strip() for part in head.split(";"))):
        if option.startswith("not run, "):
            options["not_run"] = option.removeprefix("not run, ")
        elif option in ("full", "printed"):
            options[option] = True
        elif option.startswith("numbers "):
            options["tolerance"] = option.removeprefix("numbers ")
        elif option.startswith("status "):
            options["status"] = int(option.removeprefix("status "))
        elif option != "first":
            raise ValueError(f"{where}: unknown word {option!r} in a comment about the test")
    return options


def pages() -> list[Path]:
    """Return README.md, CONTRIBUTING.md and the pages of docs/."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def coverage_table() -> str:
    """Return the table of docs/tests.md: how many blocks of each page run, and why others do not."""
    rows = ["| page | run | only with `--full` | not run |", "|---|---|---|---|"]
    totals = [0, 0, 0]
    for page in pages():
        found = [block for block in blocks(page) if block.language in RUN]
        if not found:
            continue
        left_out = [block for block in found if block.not_run]
        full = sum(block.full and not block.not_run for block in found)
        counts = [len(found) - full - len(left_out), full, len(left_out)]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        reasons: dict[str, int] = {}
        for block in left_out:
            reasons[block.not_run or ""] = reasons.get(block.not_run or "", 0) + 1
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons.items())
        rows.append(f"| {page.name} | {counts[0]} | {counts[1] or ''} | {why} |")
    rows.append(f"| all | {totals[0]} | {totals[1]} | {totals[2]} |")
    return "\n".join(rows) + "\n"
