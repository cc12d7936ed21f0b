"""The results that are kept beside a checkpoint: minifloat.json of `quantize`, report.json of `compare` and `bench`."""

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
from minifloat.deploy.check.deployment import Reports, check_everywhere
from minifloat.deploy.check.subject import Subject
from minifloat.errors import CheckpointError
from minifloat.report.json_values import from_values, to_values

if TYPE_CHECKING:  # the package `compare` imports torch, which `quantize` does without
    from minifloat.evaluate.bench.figures import GainsReport
    from minifloat.evaluate.compare.result import CandidateResult, Comparison

#: The results of `compare` and `bench`, beside the weights.
RESULTS_FILE = "report.json"
#: Version of `RESULTS_FILE`. It grows when the meaning of a key changes.
SCHEMA_VERSION = 1
_LARGEST = 256 << 20  #: bytes; minifloat.json has some hundred bytes per tensor
_DONE_KEYS = {"bytes", "provenance", "tensors"}


@dataclass(frozen=True)
class Results:
    """What is known of a checkpoint."""

    path: Path
    done: Mapping[str, Any] | None
    comparison: Comparison | None
    others: tuple[CandidateResult, ...]
    gains: GainsReport | None
    engines: Reports


def read_results(folder: str | os.PathLike[str]) -> Results:
    """Return the results that are beside a checkpoint, and the engines that load it."""
    root = resolve_folder(folder)
    with Checkpoint.open(root) as checkpoint:
        subject = Subject.of_checkpoint(checkpoint)
    stored = _read_stored(root)
    try:
        comparison, others = _comparison(stored)
        gains = _gains(stored)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            root / RESULTS_FILE, f"written by another version of minifloat or damaged ({error}); delete the file"
        ) from None
    done = _read(root, REPORT_FILE)
    if done is not None and not set(done) >= _DONE_KEYS:
        done = None  # of another tool
    return Results(root, done, comparison, others, gains, check_everywhere(subject, root.name))


def _comparison(stored: Mapping[str, Any]) -> tuple[Comparison | None, tuple[CandidateResult, ...]]:
    if "compare" not in stored:
        return None, ()
    from minifloat.evaluate.compare.result import CandidateResult, Comparison

    others = tuple(from_values(CandidateResult, values) for values in stored.get("others", ()))
    return from_values(Comparison, stored["compare"]), others


def _gains(stored: Mapping[str, Any]) -> GainsReport | None:
    if "bench" not in stored:
        return None
    from minifloat.evaluate.bench.figures import GainsReport

    return from_values(GainsReport, stored["bench"])


def store_result(folder: str | os.PathLike[str], result: Comparison | GainsReport) -> None:
    """Keep the result of `compare` or `bench` beside a checkpoint, in place of an earlier one."""
    root = resolve_folder(folder)
    try:
        stored = _read_stored(root)
    except CheckpointError:
        stored = {"schema_version": SCHEMA_VERSION}
    from minifloat.evaluate.bench.figures import GainsReport

    if isinstance(result, GainsReport):
        stored |= {"bench": to_values(result)}
    else:
        own, others = _split(result, os.fspath(folder))
        stored |= {"compare": to_values(own), "others": to_values(others)}
    with written_whole(root / RESULTS_FILE) as file:
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
    values = _read(root, RESULTS_FILE) or {"schema_version": SCHEMA_VERSION}
    if values.get("schema_version") != SCHEMA_VERSION:
        found = values.get("schema_version")
        raise CheckpointError(
            root / RESULTS_FILE, f"expected schema_version {SCHEMA_VERSION}, found {found!r}; delete the file"
        )
    return values


def _read(root: Path, name: str) -> dict[str, Any] | None:
    try:
        data = read_small(root, name, _LARGEST, CheckpointError)
        return parse_object(data, root / name, CheckpointError, surrogates=True)
    except FileNotFoundError:
        return None
