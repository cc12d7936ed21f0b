"""Reports as HTML: one file, without scripts and without requests, that can be mailed, printed and read in ten years.

Here is the frame that every report shares: the page and its style, tables, figures. Charts come from `report.svg`; what
a report says is in a module of its own. Pages are well-formed XML too, which tests rely on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minifloat.report.svg import COLORS, escape

#: Widths that charts are drawn for: a page on a desk or on paper, and one on a phone.
WIDE, NARROW = 760, 350

_BREAKS = re.compile(r"(?<=\w)([._])(?=[A-Za-z])")
_BREAK = r"\1<wbr/>"
_DARK_COLORS = ("#6cb6ff", "#f0983e", "#57c27f", "#b999f5", "#ff7fa6", "#39c5cf", "#d9b04c", "#a5adb6")


@dataclass(frozen=True)
class Markup:
    """HTML that is already escaped; anything else that enters a page is."""

    html: str


Cell = str | Markup


def to_html(cell: Cell) -> str:
    """The HTML of a cell: text is escaped."""
    return cell.html if isinstance(cell, Markup) else escape(cell)


def page(title: str, *sections: str) -> str:
    """The whole document.

    Args:
        title: Plain text.
        sections: HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>{_style()}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{escape(title)}</h1>\n{chr(10).join(filter(None, sections))}\n</main>\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what is under it.

    Args:
        title: Plain text.
        parts: HTML.
    """
    return f"<section>\n<h2>{escape(title)}</h2>\n{chr(10).join(filter(None, parts))}\n</section>"


def subsection(title: str, *parts: str) -> str:
    """A smaller heading and what is under it; nothing where there is nothing.

    Args:
        title: Plain text; none: no heading.
        parts: HTML.
    """
    body = "\n".join(filter(None, parts))
    return f"<h3>{escape(title)}</h3>\n{body}" if title and body else body


def box(kind: str, title: str, body: str = "") -> str:
    """Something that must not be overlooked.

    Args:
        kind: ``"warning"``, ``"passed"``, ``"failed"`` or ``"undecided"``.
        title: Plain text.
        body: HTML.
    """
    return f'<div class="box {kind}" role="note">\n{paragraph(title)}\n{body}</div>'


def beside(*parts: str) -> str:
    """HTML in columns of equal width; one below the other on a phone."""
    return f'<div class="beside">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def code(text: str) -> str:
    """Plain text to be copied, such as a command."""
    return f"<pre>{escape(text)}</pre>"


def paragraph(text: str) -> str:
    """Plain text as a paragraph."""
    return f"<p>{escape(text)}</p>"


def remark(text: str) -> str:
    """Plain text that stands back."""
    return f'<p class="soft">{escape(text)}</p>'


def bullets(items: Sequence[str]) -> str:
    """Plain texts as a list; names in them may break after their dots and underscores."""
    return f"<ul>{''.join(f'<li>{_BREAKS.sub(_BREAK, escape(item))}</li>' for item in items)}</ul>"


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values, plain text."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"


def stacked(value: str, below: str) -> Markup:
    """Two lines of plain text in a cell, such as a value and its interval; on a phone one line."""
    return Markup(f'{escape(value)} <span class="interval">{escape(below)}</span>')


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table whose first column names the row. On a phone each row becomes a block of named values.

    Args:
        columns: Headings, plain text.
        rows: As many cells as there are columns; one cell alone is a heading of the rows below it.
    """
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
    """HTML that opens when one clicks on a line of plain text."""
    return f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>"


def figure(caption: str, draw: Callable[[int], str]) -> str:
    """A chart, drawn for both widths of which the reader's screen shows one.

    Args:
        caption: Plain text.
        draw: From a width in pixels to an ``<svg>`` element.
    """
    return (
        f'<figure><figcaption>{escape(caption)}</figcaption>\n<div class="wide">{draw(WIDE)}</div>\n'
        f'<div class="narrow">{draw(NARROW)}</div></figure>'
    )


def _style() -> str:
    light = "".join(f"--series-{index}:{color};" for index, color in enumerate(COLORS, 1))
    dark = "".join(f"--series-{index}:{color};" for index, color in enumerate(_DARK_COLORS, 1))
    return f"""
:root{{color-scheme:light dark;--ink:#1c2128;--paper:#fff;--soft:#59636e;--line:#d1d9e0;
--warn:#8a4600;--good:#1a7f37;--bad:#b3202c;--mark:#fff1b8;{light}}}
@media (prefers-color-scheme:dark){{
:root{{--ink:#e6edf3;--paper:#0d1117;--soft:#a5adb6;--line:#3d444d;--warn:#f0b37e;--good:#57c27f;--bad:#ff8182;
--mark:#5c4a00;{dark}}}}}
@media print{{
:root{{color-scheme:light;--ink:#000;--paper:#fff;--soft:#444;--line:#999;--warn:#000;--good:#000;--bad:#000;
--mark:#ddd;{light}}}
figure,tr,.box,.beside{{break-inside:avoid}}
h2,h3{{break-after:avoid}}
details::details-content{{content-visibility:visible;block-size:auto}}}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}}
main{{max-width:{WIDE}px;margin:0 auto;padding:1rem}}
h1{{font-size:1.5rem;line-height:1.25;overflow-wrap:anywhere}}
h2{{font-size:1.15rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--line)}}
h3{{font-size:1rem;margin:1.2rem 0 .3rem;overflow-wrap:anywhere}}
dl{{display:grid;grid-template-columns:fit-content(40%) minmax(0,1fr);gap:.15rem 1rem;margin:0}}
dt,figcaption,summary{{color:var(--soft)}}
dt,dd{{margin:0;overflow-wrap:anywhere}}
figure{{margin:1rem 0}}
figcaption{{font-size:.9rem;margin-bottom:.5rem}}
figure svg{{display:block;max-width:100%;height:auto}}
.narrow{{display:none}}
.box{{margin:1rem 0;border-left:4px solid var(--warn);padding-left:.8rem}}
.box p{{margin:0;font-weight:600;overflow-wrap:anywhere}}
.box ul{{margin:.3rem 0;padding-left:1.2rem}}
.box li{{overflow-wrap:anywhere}}
.box.passed{{border-color:var(--good)}}
.box.failed{{border-color:var(--bad)}}
.beside{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(16rem,100%),1fr));gap:.5rem 1.5rem}}
.beside>div{{min-width:0}}
.interval{{display:block;color:var(--soft);white-space:nowrap}}
.soft{{color:var(--soft)}}
pre{{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem}}
mark{{background:var(--mark);color:inherit}}
.case{{margin:1rem 0;padding-top:.5rem;border-top:1px solid var(--line)}}
.case p{{margin:.2rem 0;font-size:.9rem}}
.written{{white-space:pre-wrap;overflow-wrap:anywhere;overflow:hidden}}
.choices{{margin:0;padding:0;list-style:none;font-size:.85rem;font-variant-numeric:tabular-nums}}
.choices li{{display:grid;grid-template-columns:minmax(0,1fr) auto 80px;gap:.6rem;align-items:center}}
.choices span:first-child{{overflow:hidden;overflow-wrap:anywhere}}
table{{margin:.6rem 0;border-collapse:collapse;width:100%;font-size:.85rem;font-variant-numeric:tabular-nums}}
th,td{{padding:.2rem .6rem .2rem 0;text-align:right;vertical-align:top;border-bottom:1px solid var(--line)}}
th:first-child{{text-align:left;overflow-wrap:anywhere}}
tbody th{{font-weight:normal;min-width:7rem}}
.group th{{padding-top:.6rem;font-weight:600}}
td{{white-space:nowrap}}
td svg{{vertical-align:middle}}
summary{{cursor:pointer;margin:.5rem 0}}
.words{{white-space:normal}}
@media screen and (max-width:{WIDE + 40}px){{
td,.interval{{white-space:normal}}
}}
@media print{{
table{{font-size:.7rem}}
}}
@media screen and (max-width:{WIDE - 160}px){{
.wide{{display:none}}
.narrow{{display:block}}
dl{{grid-template-columns:minmax(0,1fr)}}
dd{{margin-bottom:.4rem}}
thead{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}}
table,tbody{{display:block}}
tr{{display:block;padding:.4rem 0;border-bottom:1px solid var(--line)}}
tbody th,td{{display:block;white-space:normal;border:0;padding:.05rem 0;text-align:left}}
tbody th{{font-weight:600}}
.group{{padding-top:.8rem}}
.group th{{padding:0;font-size:.95rem;color:var(--soft)}}
td:empty{{display:none}}
.interval{{display:inline}}
td::before{{content:attr(data-name) ": ";color:var(--soft)}}
}}
"""
