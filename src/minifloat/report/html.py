"""Documents as one HTML file without scripts or network requests, which is well-formed XML too."""

from __future__ import annotations

import importlib.resources
import re
import string
from collections.abc import Iterable, Sequence

from minifloat.report import document as doc
from minifloat.report.text import COLORS, escape

#: Colours of the series of charts on dark backgrounds, with less contrast.
_DARK_COLORS = ("#6cb6ff", "#f0983e", "#57c27f", "#b999f5", "#ff7fa6", "#39c5cf", "#d9b04c", "#a5adb6")
_NAME_SEPARATOR = re.compile(r"(?<=\w)([._])(?=[A-Za-z])")
_HAS_DIGIT = re.compile(r"\d")


def write(document: doc.Document) -> str:
    title = escape(document.title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{title}</title>\n<style>\n{_style()}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{title}</h1>\n{_blocks(document.blocks, 2)}\n</main>\n</body>\n</html>\n"
    )


def _style() -> str:
    sheet = importlib.resources.files("minifloat.report").joinpath("document.css").read_text(encoding="utf-8")
    light, dark = (
        "".join(f"--series-{index}:{color};" for index, color in enumerate(colors, 1))
        for colors in (COLORS, _DARK_COLORS)
    )
    return string.Template(sheet).substitute(light_series=light, dark_series=dark)


def _blocks(blocks: Iterable[doc.Block], level: int) -> str:
    return "\n".join(_block(block, level) for block in doc.shown(blocks, doc.On.PAGE))


def _block(block: doc.Block, level: int) -> str:
    match block:
        case doc.Section():
            body = _blocks(block.blocks, level + 1)
            title = f"<h{level}>{escape(block.title)}</h{level}>\n" if block.title else ""
            return f"<section>\n{title}{body}\n</section>" if level == 2 else f"{title}{body}"
        case doc.Folded():
            return f"<details><summary>{escape(block.summary)}</summary>\n{_blocks(block.blocks, level)}\n</details>"
        case doc.Text():
            kind = f' class="{block.tone}"' if block.tone else ""
            return f"<p{kind}>{escape(block.text)}</p>"
        case doc.Bullets():
            return _bullets(block.items)
        case doc.Facts():
            return (
                f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(text)}</dd>' for name, text in block.pairs)}</dl>"
            )
        case doc.Alert():
            body = _bullets(block.reasons) if block.reasons else ""
            return f'<div class="box {escape(block.kind)}" role="note">\n<p>{escape(block.title)}</p>\n{body}</div>'
        case doc.Code():
            return f"<pre>{escape(block.text, lines=True)}</pre>"
        case doc.Passage():
            end = f"<mark><bdi>{escape(block.marked, lines=True)}</bdi></mark>" if block.marked else ""
            return f'<p class="written"><bdi>{escape(block.text, lines=True)}</bdi>{end}</p>'
        case doc.Table():
            return _table(block)
        case doc.Figure():
            from minifloat.report.figures import draw

            return f"<figure><figcaption>{escape(block.caption)}</figcaption>\n{draw(block)}</figure>"
    raise TypeError(f"no HTML for {type(block).__name__}")


def _bullets(items: Sequence[str]) -> str:
    """Return a list; module names in it may break after dots and underscores."""
    lines = (_NAME_SEPARATOR.sub(r"\1<wbr/>", escape(item)) for item in items)
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _table(block: doc.Table) -> str:
    """Return a table whose first column names the row. On a phone each row becomes a block of named values."""
    columns, rows = block.shown(doc.On.PAGE)
    title = f"<p>{escape(block.title)}</p>\n" if block.title else ""
    head = "".join(f'<th scope="col">{escape(column.name)}</th>' for column in columns)
    body = "".join(_row([column.name for column in columns], row) for row in rows)
    return f"{title}<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _row(names: Sequence[str], row: Sequence[doc.Cell]) -> str:
    first, *others = row
    if not others:
        return f'<tr class="group"><th colspan="{len(names)}" scope="colgroup">{_cell(first)}</th></tr>\n'
    cells = ""
    for name, cell in zip(names[1:], others, strict=True):
        kind = "" if _HAS_DIGIT.search(str(cell)) else ' class="words"'  # words may break into lines
        cells += f'<td data-name="{escape(name)}"{kind}>{_cell(cell)}</td>'
    return f'<tr><th scope="row">{_cell(first)}</th>{cells}</tr>\n'


def _cell(cell: doc.Cell) -> str:
    if isinstance(cell, doc.Pair):
        return f'<bdi>{escape(cell.value)}</bdi> <span class="interval">{escape(cell.below)}</span>'
    return f"<bdi>{escape(cell)}</bdi>" if cell else ""
