"""The one report beside a checkpoint: what was done, whether it is the same model, what was gained, where it loads.

`compare` and `bench` keep their results in report.json, and draw report.html again from all results that are there.
`push` uploads neither file, because they quote texts that the models were compared on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import parse_object, read_small, resolve_folder, written_whole
from minifloat.checkpoint.rewrite import REPORT_FILE
from minifloat.deploy.check.document import engines_section
from minifloat.deploy.check.judge import Reports, check_everywhere, engine_verdicts
from minifloat.deploy.check.subject import Subject
from minifloat.errors import CheckpointError
from minifloat.quantize import document as quantize_document
from minifloat.report import html
from minifloat.report.document import Bullets, Code, Document, On, Section, Text, section
from minifloat.report.json_values import from_values, to_values

if TYPE_CHECKING:  # the package `compare` imports torch, which `quantize` does without
    from minifloat.evaluate.bench.figures import GainsReport
    from minifloat.evaluate.compare.result import CandidateResult, Comparison

PAGE_FILE = "report.html"
#: The results of `compare` and `bench`, beside the weights.
_RESULTS_FILE = "report.json"
#: Version of `_RESULTS_FILE`. It grows when the meaning of a key changes.
_SCHEMA_VERSION = 1
_LARGEST = 256 << 20  #: bytes; minifloat.json has some hundred bytes per tensor
_DONE_KEYS = {"bytes", "provenance", "tensors"}


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
        done = section("What was done", Text("What was done is not known: the checkpoint has no minifloat.json."))
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


@dataclass(frozen=True)
class Results:
    """What is known of a checkpoint: None where a command has not run."""

    path: Path
    done: Mapping[str, Any] | None  # minifloat.json, which `quantize` or `convert` wrote
    comparison: Comparison | None
    others: tuple[CandidateResult, ...]
    gains: GainsReport | None
    engines: Reports


def read_results(folder: str | os.PathLike[str]) -> Results:
    root = resolve_folder(folder)
    with Checkpoint.open(root) as checkpoint:
        subject = Subject.of_checkpoint(checkpoint)
    stored = _read_stored(root)
    comparison, gains = None, None
    others: tuple[Any, ...] = ()
    try:
        if "compare" in stored:
            from minifloat.evaluate.compare.result import CandidateResult, Comparison

            comparison = from_values(Comparison, stored["compare"])
            others = tuple(from_values(CandidateResult, values) for values in stored.get("others", ()))
        if "bench" in stored:
            from minifloat.evaluate.bench.figures import GainsReport

            gains = from_values(GainsReport, stored["bench"])
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            root / _RESULTS_FILE, f"written by another version of minifloat or damaged ({error}); delete the file"
        ) from None
    done = _read(root, REPORT_FILE)
    if done is not None and not set(done) >= _DONE_KEYS:
        done = None  # of another tool
    return Results(root, done, comparison, others, gains, check_everywhere(subject, root.name))


def store_result(folder: str | os.PathLike[str], result: Comparison | GainsReport) -> None:
    root = resolve_folder(folder)
    try:
        stored = _read_stored(root)
    except CheckpointError:
        stored = {"schema_version": _SCHEMA_VERSION}
    from minifloat.evaluate.bench.figures import GainsReport

    if isinstance(result, GainsReport):
        stored |= {"bench": to_values(result)}
    else:
        own, others = _split(result, os.fspath(folder))
        stored |= {"compare": to_values(own), "others": to_values(others)}
    with written_whole(root / _RESULTS_FILE) as file:
        file.write(json.dumps(stored).encode())  # in ASCII: tokens may hold halves of surrogate pairs


def _split(comparison: Comparison, name: str) -> tuple[Comparison, list[CandidateResult]]:
    """Return the comparison of one candidate and its variants, and the others without their samples of text."""

    def is_own(candidate: CandidateResult) -> bool:
        return candidate.model.name == name or candidate.model.name.startswith(f"{name} (")

    own = tuple(candidate for candidate in comparison.candidates if is_own(candidate))
    if not own:
        raise ValueError(f"{name} is not among the candidates")
    others = [candidate for candidate in comparison.candidates if not is_own(candidate)]
    short = [replace(other, worst=(), generation=None, attribution=None) for other in others]
    return replace(comparison, candidates=own), short


def _read_stored(root: Path) -> dict[str, Any]:
    values = _read(root, _RESULTS_FILE) or {"schema_version": _SCHEMA_VERSION}
    if values.get("schema_version") != _SCHEMA_VERSION:
        found = values.get("schema_version")
        text = f"expected schema_version {_SCHEMA_VERSION}, found {found!r}; delete the file"
        raise CheckpointError(root / _RESULTS_FILE, text)
    return values


def _read(root: Path, name: str) -> dict[str, Any] | None:
    try:
        data = read_small(root, name, _LARGEST, CheckpointError)
        return parse_object(data, root / name, CheckpointError, surrogates=True)
    except FileNotFoundError:
        return None
