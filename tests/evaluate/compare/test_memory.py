"""Models that do not fit into memory together: one after the other, with the figures of all at once."""

from __future__ import annotations

import dataclasses
import gc
import logging
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare_models

from minifloat.errors import NonFiniteError, UsageError
from minifloat.evaluate.compare import memory, models
from minifloat.evaluate.compare import run as compare_run
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]
OPTIONS: dict[str, Any] = {"window": 32, "prompts": 3, "new_tokens": 4}


@pytest.fixture(scope="module")
def folders(
    llama_folder: Path, make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Path]]:
    folder = tmp_path_factory.mktemp("memory")
    quantize_checkpoint(llama_folder, folder / "quantized", "mxfp4")
    return llama_folder, [make_llama(folder / "other", seed=1), folder / "quantized"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("The quick brown fox jumps over the lazy dog; naïve café. " * 12, encoding="utf-8")
    return path


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with room for one model, whose temporary folder is returned."""
    monkeypatch.setattr(memory, "available_memory", lambda _: memory._LOGITS + memory._REST + 10**7)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def without_time(comparison: Any) -> Any:
    return dataclasses.replace(comparison, seconds=0.0, notes=(), machine={})


@pytest.mark.parametrize("runner", ["native", "transformers"])
def test_models_one_after_the_other_give_the_figures_of_all_together(
    folders: tuple[Path, list[Path]],
    text: Path,
    runner: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if runner == "transformers":
        monkeypatch.setattr(compare_run, "_why_no_engine", lambda *_: "of this test")
    together = compare_models(*folders, [text], **OPTIONS)
    assert together.baseline.runner == runner
    assert together.candidates[0].generation is not None
    crowded = request.getfixturevalue("crowded")
    alone = compare_models(*folders, [text], **OPTIONS)
    assert without_time(alone) == without_time(together)
    assert "the models do not fit into memory together, and ran one after the other" in alone.notes
    assert [path.name for path in crowded.iterdir()] == [text.name]


def test_no_two_models_are_in_memory_at_once(
    folders: tuple[Path, list[Path]], text: Path, crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[weakref.ref[models.EngineModel]] = []
    most = 0
    begin = models.EngineModel.__init__

    def counted(self: models.EngineModel, *arguments: Any) -> None:
        nonlocal most
        gc.collect()
        most = max(most, 1 + sum(each() is not None for each in alive))
        begin(self, *arguments)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(models.EngineModel, "__init__", counted)
    compare_models(*folders, [text], **OPTIONS)
    assert (len(alive), most) == (3, 1)


def test_what_is_taken_is_said_before_a_model_is_loaded(
    folders: tuple[Path, list[Path]], text: Path, crowded: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shown: list[str] = []
    compare_models(*folders, [text], **OPTIONS, progress=lambda done, total, what: shown.append(what))
    assert shown[0].startswith("loading; comparing takes about ")
    messages = [record.getMessage() for record in caplog.records]
    taken = next(i for i, message in enumerate(messages) if message.startswith("comparing takes about "))
    loading = next(i for i, message in enumerate(messages) if message.startswith("loading "))
    assert taken < loading
    assert "for 3 models" in messages[taken]
    assert messages[taken].endswith("are free on cpu: the models run one after the other")
    assert any("the logits of" in message and "deleted in the end" in message for message in messages)


def test_too_little_disk_is_refused_at_once_with_the_cure(
    folders: tuple[Path, list[Path]],
    text: Path,
    crowded: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    usage = memory.shutil.disk_usage(crowded)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UsageError, match=r"the logits of .* use less text \(--max-tokens\), or set TMPDIR"):
        compare_models(*folders, [text], **OPTIONS)
    assert not any("transformers' code runs the models" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("option", [{"variants": True}, {"attribute": 1.0}])
def test_what_needs_all_models_at_once_is_refused(
    folders: tuple[Path, list[Path]], text: Path, crowded: Path, option: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match=f"--{next(iter(option))} needs all models in memory"):
        compare_models(*folders, [text], **OPTIONS | option)


def test_nan_of_the_baseline_is_found_where_it_is_written_down(
    folders: tuple[Path, list[Path]], text: Path, crowded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = models.EngineModel.logits

    def broken(self: models.EngineModel, ids: torch.Tensor) -> Any:
        return (rows * (torch.nan if self.name == str(folders[0]) else 1) for rows in logits(self, ids))

    monkeypatch.setattr(models.EngineModel, "logits", broken)
    with pytest.raises(NonFiniteError, match=r"NaN or Inf where token 1 of fox\.txt is predicted"):
        compare_models(*folders, [text], **OPTIONS)
