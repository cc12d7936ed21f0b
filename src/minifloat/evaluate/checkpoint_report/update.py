"""Drawing report.html beside a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.checkpoint.files import resolve_folder, written_whole
from minifloat.evaluate.checkpoint_report.document import document
from minifloat.evaluate.checkpoint_report.results import Results, read_results, store_result
from minifloat.report import html

if TYPE_CHECKING:
    from minifloat.evaluate.bench.gains import GainsReport
    from minifloat.evaluate.compare.result import Comparison

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
    """Write report.html beside the checkpoint that the results are of, and return its path."""
    path = results.path / PAGE_FILE
    with written_whole(path) as file:
        file.write(html.write(document(results)).encode())
    return path


def has_report(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder exists and has a report.html; False for the id of a model of the hub."""
    return Path(folder).is_dir() and (resolve_folder(folder) / PAGE_FILE).is_file()
