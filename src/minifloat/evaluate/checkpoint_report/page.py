"""The page: what was done, whether it is the same model, what was gained, where it loads; then the details of each."""

from __future__ import annotations

from collections.abc import Sequence

from minifloat.deploy.check.document import engines_section
from minifloat.evaluate.checkpoint_report.results import Results
from minifloat.quantize import document as quantize_document
from minifloat.report import html
from minifloat.report.page import code, page, paragraph, section
from minifloat.report.text import visible

SAME = "Is it still the same model?"
GAINED = "What was gained"


def report_page(results: Results) -> str:
    """Return the self-contained HTML page about a checkpoint. A part that was not measured says how to measure it."""
    name = visible(results.path.name)
    return page(
        f"{name}: what was done, is it the same model, what was gained",
        _done(results),
        _same(results),
        _gained(results),
        html.fragment([engines_section(results.engines, name)]),
        *_details(results),
    )


def _done(results: Results) -> str:
    if results.done is None:
        return section("What was done", paragraph("The checkpoint has no minifloat.json: its history is not known."))
    return html.fragment([quantize_document.done_section(results.done)])


def _same(results: Results) -> str:
    if results.comparison is not None:
        from minifloat.evaluate.compare.pages import page as compare_page  # imports torch

        return compare_page.verdict_section(results.comparison, SAME, results.others)
    return _missing(SAME, "Not measured yet. This adds it:", f"minifloat compare MODEL {results.path.name}")


def _gained(results: Results) -> str:
    if results.gains is not None:
        from minifloat.evaluate.bench import page as bench_page

        return bench_page.gains_section(results.gains)
    return _missing(GAINED, "Not measured yet. This adds it:", f"minifloat bench {results.path.name} --baseline MODEL")


def _missing(title: str, text: str, command: str) -> str:
    return section(title, paragraph(text), code(visible(command)))


def _details(results: Results) -> Sequence[str]:
    parts: list[str] = []
    if results.comparison is not None:
        from minifloat.evaluate.compare.pages import page as compare_page

        parts += compare_page.detail_sections(results.comparison)
    if results.gains is not None:
        from minifloat.evaluate.bench import page as bench_page

        parts += bench_page.detail_sections(results.gains)
    if results.done is not None:
        parts.append(html.fragment(quantize_document.detail_sections(results.done)))
    return parts
