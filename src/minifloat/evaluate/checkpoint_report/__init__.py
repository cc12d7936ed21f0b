"""The one report beside a checkpoint: what was done, whether it is the same model, what was gained, where it loads.

`quantize` leaves minifloat.json; `compare` and `bench` keep their results in report.json. Each of them draws
report.html again from all results that are there. `push` uploads neither file, because they quote texts that the
models were compared on.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.checkpoint.files import resolve_folder, written_whole
from minifloat.deploy.check.deployment import engine_verdicts
from minifloat.deploy.check.document import engines_section
from minifloat.evaluate.checkpoint_report.results import Results, read_results, store_result
from minifloat.quantize import document as quantize_document
from minifloat.report import html
from minifloat.report.document import Bullets, Code, Document, On, Section, Text, section

if TYPE_CHECKING:
    from minifloat.evaluate.bench.figures import GainsReport
    from minifloat.evaluate.compare.result import Comparison

__all__ = ["PAGE_FILE", "Results", "document", "draw_results", "has_report", "read_results", "write_report"]

PAGE_FILE = "report.html"


def write_report(folder: str | os.PathLike[str], result: Comparison | GainsReport | None = None) -> Path:
    """Draw report.html from all results beside a checkpoint.

    Args:
        folder: The checkpoint; named as in `result`, if that is given.
        result: A comparison with the checkpoint among its candidates, or a bench of it, to keep beside the checkpoint
            first, in place of an earlier one; None: only draw.

    Returns:
        The path of report.html.

    Raises:
        CheckpointError: The folder is no checkpoint, or a file of results is damaged or of another version.
        StorageError: The system refused to write.
        ValueError: The checkpoint is not among the candidates of the comparison.
    """
    if result is not None:
        store_result(folder, result)
    return draw_results(read_results(folder))


def draw_results(results: Results) -> Path:
    path = results.path / PAGE_FILE
    with written_whole(path) as file:
        file.write(html.write(document(results)).encode())
    return path


def has_report(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder exists and has a report.html; False for the id of a model of the hub."""
    return Path(folder).is_dir() and (resolve_folder(folder) / PAGE_FILE).is_file()


def document(results: Results) -> Document:
    """Return the results, then on a page the details of each. A part that was not measured says how to measure it."""
    name = results.path.name
    details: list[Section] = []
    if results.comparison is not None:
        from minifloat.evaluate.compare import document as compare_document  # imports torch

        same = compare_document.verdict_section(results.comparison, results.others)
        details += compare_document.detail_sections(results.comparison)
    else:
        same = _missing("Is it still the same model?", f"minifloat compare MODEL {name}")
    if results.gains is not None:
        from minifloat.evaluate.bench import document as bench_document

        gained = bench_document.gains_section(results.gains)
        details += bench_document.detail_sections(results.gains)
    else:
        gained = _missing("What was gained", f"minifloat bench {name} --baseline MODEL")
    if results.done is None:
        unknown = Text("What was done is not known: the checkpoint has no minifloat.json.")
        done = section("What was done", unknown)
    else:
        done = quantize_document.done_section(results.done)
        details += quantize_document.detail_sections(results.done)
    loads = Bullets([str(verdict) for verdict in engine_verdicts(results.engines)])
    return Document(
        f"{name}: what was done, is it the same model, what was gained",
        [
            done,
            same,
            gained,
            engines_section(results.engines, name),
            section("", loads, on=On.TERMINAL),
            *(replace(detail, on=detail.on & On.PAGE) for detail in details),
        ],
    )


def _missing(title: str, command: str) -> Section:
    return section(title, Text(f"{title.rstrip('?')}: not measured yet. This adds it:"), Code(command))
