"""Killed at any moment and resumed, a run gives the codes of an undisturbed one; damaged work is done again."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from killing import finished_in, forking_server, run_and_kill
from rounding_cases import Rounding, make_text, round_model, write_model

from minifloat.calibration.layerwise import storage
from minifloat.checkpoint.progress import Progress
from minifloat.errors import StorageError

KEPT, HELD_OUT = make_text(5, 30), make_text(2, 30, seed=1)
LAYERS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("resume") / "llama", "llama", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def undisturbed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Rounding:
    return rounded(folder, tmp_path_factory.mktemp("undisturbed") / "work")


def rounded(folder: Path, work: Path, progress: Progress | None = None, **other: Any) -> Rounding:
    return round_model(folder, work, **{"kept": KEPT, "held_out": HELD_OUT, "fold": True, **other}, progress=progress)


def rounded_again(folder: Path, work: Path, **other: Any) -> tuple[list[int], Rounding]:
    """The layers that a run went through, and its result."""
    seen: dict[int, None] = {}

    def progress(_: int, __: int, what: str) -> None:
        if what.startswith("layer "):
            seen.setdefault(int(what.split()[1]))

    result = rounded(folder, work, progress, **other)
    assert not work.exists()
    return list(seen), result


class _InterruptedError(Exception):
    pass


def interrupt(folder: Path, work: Path, layer: int, calls: int = 20, **other: Any) -> None:
    """Stop in the middle of a layer."""
    left = calls

    def progress(_: int, __: int, what: str) -> None:
        nonlocal left
        left -= what.startswith(f"layer {layer} ")
        if not left:
            raise _InterruptedError

    with pytest.raises(_InterruptedError):
        rounded(folder, work, progress, **other)


SERVER = """
import transformers.models.llama.modeling_llama  # once, instead of in every child
from rounding_cases import round_model
def run(progress, folder, work, kept, held_out):
    round_model(folder, work, kept, held_out, progress=progress, fold=True)
"""


def test_a_run_killed_several_times_gives_the_same_bits_and_runs_no_finished_layer_again(
    folder: Path, undisturbed: Rounding, tmp_path: Path
) -> None:
    work, log = tmp_path / "work", tmp_path / "log"
    moments, kills = random.Random(2026), 0
    with forking_server(SERVER, log, folder, work, KEPT, HELD_OUT, pause=0.003) as server:
        while (before := finished_in(work)) < LAYERS - 2:
            lines = run_and_kill(server, log, moments.randrange(5, 80))  # a layer has 40 steps
            lines = [line for line in lines if not line.startswith("gradients of ")]
            assert not lines or lines[0].startswith(f"layer {before + 1} of {LAYERS}")
            kills += 1
    assert kills > 2
    left = finished_in(work)
    seen, result = rounded_again(folder, work)
    assert seen == list(range(left + 1, LAYERS + 1))
    assert result == undisturbed


@pytest.mark.parametrize("calls", [1, 8, 25, 40])
def test_an_interrupted_run_continues_in_the_layer_that_it_was_in(
    folder: Path, undisturbed: Rounding, tmp_path: Path, calls: int
) -> None:
    interrupt(folder, tmp_path / "work", 3, calls)
    assert finished_in(tmp_path / "work") == 2
    seen, result = rounded_again(folder, tmp_path / "work")
    assert seen == [3, 4, 5]
    assert result == undisturbed


def test_a_run_whose_caller_failed_is_not_computed_again(
    folder: Path, undisturbed: Rounding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("rounding_cases.Rounding", None)  # the block under `round_checkpoint` fails
        with pytest.raises(TypeError):
            rounded(folder, tmp_path / "work")
    assert finished_in(tmp_path / "work") == LAYERS + 1
    seen, result = rounded_again(folder, tmp_path / "work")
    assert seen == []
    assert result == undisturbed


@pytest.mark.parametrize("change", ["kept", "held_out", "method", "scheme", "fold", "layout"])
def test_work_with_other_text_or_options_is_not_continued(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "num_key_value_heads": 4}
    folder = write_model(tmp_path / "model", "llama", **sizes)
    values: dict[str, Any] = {"kept": make_text(4, 30), "held_out": make_text(3, 30), "method": "gptq"}
    values |= {"scheme": "fp8-block", "fold": False, "layout": "compressed-tensors"}
    others: dict[str, Any] = {"kept": make_text(4, 30, seed=9), "held_out": make_text(3, 30, seed=9)}
    others |= {"method": "match", "scheme": "fp8", "fold": True, "layout": "fp8"}
    interrupt(folder, tmp_path / "work", 2, 5, **values)
    changed = values | {change: others[change]}
    seen, result = rounded_again(folder, tmp_path / "work", **changed)
    assert seen == [1, 2]
    assert result == rounded(folder, tmp_path / "other", **changed)
    assert any("not continued" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("write", [10, 120, 220])
def test_a_full_disk_leaves_a_folder_from_which_the_run_continues(
    folder: Path, undisturbed: Rounding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    plain, left = os.pwrite, write

    def pwrite(*args: Any) -> int:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(*args)

    with monkeypatch.context() as patched:
        patched.setattr(storage.os, "pwrite", pwrite)
        with pytest.raises(StorageError, match=r"No space left on device"):
            rounded(folder, tmp_path / "work")
    finished = finished_in(tmp_path / "work")
    assert finished < LAYERS
    seen, result = rounded_again(folder, tmp_path / "work")
    assert seen == list(range(finished + 1, LAYERS + 1))
    assert result == undisturbed
