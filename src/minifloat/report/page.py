"""The building blocks of an HTML report: one file without scripts or network requests, easy to mail, print and archive.

This module provides what all reports share: the page with its style sheet (``page.css``), sections, tables and figures.
`report.charts` draws the charts; each kind of report has a module of its own. The pages are also well-formed XML, which
the tests rely on.
"""

from __future__ import annotations

import importlib.resources
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minifloat.report.svg import COLORS, DARK_COLORS, color_variables, escape

#: Pixels that charts are drawn for: the text column on a desk or on paper, and the screen of a phone.
WIDE, NARROW = 760, 350

#: Pixels: a screen narrower than this shows each table row as a block of named values.
_PHONE = 600
_MARGINS = 40
_NAME_SEPARATOR = re.compile(r"(?<=\w)([._])(?=[A-Za-z])")
_SEPARATOR_WITH_BREAK = r"\1<wbr/>"


@dataclass(frozen=True)
class Markup:
    """HTML that is already escaped. Plain strings are escaped when they enter a page."""

    html: str


Cell = str | Markup


def to_html(cell: Cell) -> str:
    """Return the HTML of a cell, with plain text escaped."""
    return cell.html if isinstance(cell, Markup) else escape(cell)


def page(title: str, *sections: str) -> str:
    """Return the whole HTML document."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{_style()}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{chr(10).join(filter(None, sections))}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """Return a section: a heading and its content."""
    return f"<section>\n<h2>{escape(title)}</h2>\n{chr(10).join(filter(None, parts))}\n</section>"


def subsection(title: str, *parts: str) -> str:
    """Return a smaller heading and its content, or an empty string if there is no content."""
    body = "\n".join(filter(None, parts))
    return f"<h3>{escape(title)}</h3>\n{body}" if title and body else body


def box(kind: str, title: str, body: str = "") -> str:
    """Return a highlighted box for a message that must not be overlooked."""
    return f'<div class="box {kind}" role="note">\n{paragraph(title)}\n{body}</div>'


def beside(*parts: str) -> str:
    """Return HTML parts in columns of equal width; on a phone one is below the other."""
    return f'<div class="beside">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def code(text: str) -> str:
    """Return plain text as preformatted code, such as a command to copy."""
    return f"<pre>{escape(text)}</pre>"


def paragraph(text: str) -> str:
    """Return plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def remark(text: str) -> str:
    """Return plain text as a paragraph in a muted colour."""
    return f'<p class="soft">{escape(text)}</p>'


def bullets(items: Sequence[str]) -> str:
    """Return plain texts as a list; module names in them may break after dots and underscores."""
    lines = (_NAME_SEPARATOR.sub(_SEPARATOR_WITH_BREAK, escape(item)) for item in items)
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a list of names with their values, both plain text."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"


def stacked(value: str, below: str) -> Markup:
    """Return a cell with two lines of plain text, such as a value and its interval; on a phone they share one line."""
    return Markup(f'{escape(value)} <span class="interval">{escape(below)}</span>')


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return a table whose first column names the row. On a phone each row becomes a block of named values."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join(_row(columns, row) for row in rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _row(columns: Sequence[str], row: Sequence[Cell]) -> str:
    first, *others = row
    if not others:
        return f'<tr class="group"><th colspan="{len(columns)}" scope="colgroup">{to_html(first)}</th></tr>\n'
    cells = "".join(
        f'<td data-name="{escape(column)}">{to_html(cell)}</td>'
        for column, cell in zip(columns[1:], others, strict=True)
    )
    return f'<tr><th scope="row">{to_html(first)}</th>{cells}</tr>\n'


def folded(summary: str, body: str) -> str:
    """Return HTML that is hidden until the reader clicks its summary line."""
    return f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>"


def figure(caption: str, draw: Callable[[int], str]) -> str:
    """Return a chart drawn at both widths; the style sheet shows the one that fits the screen."""
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption>\n<div class="wide">{draw(WIDE)}</div>\n'
        f'<div class="narrow">{draw(NARROW)}</div></figure>'
    )


def _style() -> str:
    """Return the style sheet, with the colours of the series and the widths filled in."""
    sheet = importlib.resources.files("minifloat.report").joinpath("page.css").read_text(encoding="utf-8")
    return string.Template(sheet).substitute(
        light_series=color_variables(COLORS),
        dark_series=color_variables(DARK_COLORS),
        wide=f"{WIDE}px",
        wide_with_margins=f"{WIDE + _MARGINS}px",
        phone=f"{_PHONE}px",
    )
