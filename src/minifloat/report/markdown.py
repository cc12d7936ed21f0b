"""Documents as Markdown, for the model card: a digest without charts and quoted passages.

Hubs render a card as HTML, and it contains names of texts and tokens of models, so `escape` leaves no markup in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from minifloat.report import document as doc
from minifloat.report.text import visible

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
