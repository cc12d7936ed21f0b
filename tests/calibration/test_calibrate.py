"""`calibrate`: a checkpoint and sequences of tokens in, statistics out."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minifloat import quantize_checkpoint
from minifloat.calibration import calibrate as calibrate_module
from minifloat.calibration import model as model_module
from minifloat.calibration.calibrate import calibrate_set
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.stats import ActivationStats, ModelIdentity
from minifloat.checkpoint import Checkpoint
from minifloat.errors import AlreadyQuantizedError, DataError
from minifloat.model.runtime.load import load, load_opened

MakeModel = Callable[..., Path]


def data(*lengths: int) -> CalibrationSet:
    source = random.Random(0)
    sequences = tuple(tuple(source.randrange(256) for _ in range(length)) for length in lengths)
    return CalibrationSet(sequences, {"sources": ["made up"]})


@pytest.fixture(scope="module")
def mixtral_folder(make_mixtral: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixtral(tmp_path_factory.mktemp("models") / "mixtral")


def test_the_statistics_are_those_of_an_observer(mixtral_folder: Path) -> None:
    text = data(5, 20, 1)
    stats = calibrate_set(mixtral_folder, text, CalibrateOptions(histogram=True, per_channel=True))
    with Observer(load(mixtral_folder), histogram=True, per_channel=True) as observer:
        for ids in text.sequences:
            observer.run(torch.tensor([ids]))
    with Checkpoint.open(mixtral_folder) as checkpoint:
        identity = ModelIdentity.of(checkpoint)
    assert stats == ActivationStats(identity, 3, 26, text.record, observer.inputs(), observer.kv())


def test_two_runs_give_the_same_bits_and_a_shuffled_one_the_same_maxima(mixtral_folder: Path) -> None:
    text = data(5, 20, 1, 7)
    stats = calibrate_set(mixtral_folder, text)
    assert calibrate_set(mixtral_folder, text) == stats
    shuffled = calibrate_set(mixtral_folder, CalibrationSet(text.sequences[2:] + text.sequences[:2], text.record))
    assert {n: s.max for n, s in shuffled.inputs.items()} == {n: s.max for n, s in stats.inputs.items()}
    for name, kv in stats.kv.items():
        assert (kv.k_amax.max(0) == shuffled.kv[name].k_amax.max(0)).all()
        assert (kv.v_amax.max(0) == shuffled.kv[name].v_amax.max(0)).all()


def test_the_dtype_can_be_chosen(llama_folder: Path) -> None:
    stats = calibrate_set(llama_folder, data(30), CalibrateOptions(dtype=torch.float32))
    amax = stats.inputs["model.layers.1.mlp.down_proj"].max
    assert amax != float(torch.tensor(amax).bfloat16())


def test_lm_head_is_not_run(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_without_head(*args: Any, **kwargs: Any) -> Any:
        model: Any = load_opened(*args, **kwargs)
        model.lm_head = None
        return model

    monkeypatch.setattr(model_module, "load_opened", load_without_head)
    assert calibrate_set(llama_folder, data(5)).sequences == 1


def test_progress_counts_tokens(llama_folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    calibrate_set(llama_folder, data(5, 3), progress=lambda *call: calls.append(call))
    assert calls == [(5, 8, "sequence 1 of 2"), (8, 8, "sequence 2 of 2")]


def test_a_run_stops_when_all_scales_have_settled_and_the_record_says_so(llama_folder: Path) -> None:
    same = CalibrationSet(data(6).sequences * 200, {"sources": ["made up"]})
    stats = calibrate_set(llama_folder, same, CalibrateOptions(until_stable=0.01))
    assert 32 < stats.sequences < 200
    assert stats.tokens == 6 * stats.sequences
    assert stats.data == {
        "sources": ["made up"],
        "stopped": {"sequences": stats.sequences, "tokens": stats.tokens, "until_stable": 0.01},
    }
    assert calibrate_set(llama_folder, data(6, 7, 8), CalibrateOptions(until_stable=0.01)).data == {
        "sources": ["made up"]
    }


def test_an_interrupted_run_raises_and_returns_no_statistics(llama_folder: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate_set(llama_folder, data(5, 3), progress=interrupt)


def test_a_model_larger_than_the_memory_limit_runs_layer_by_layer(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    def calibrate_layerwise(*args: Any) -> str:
        calls.append(args)
        return "layer by layer"

    monkeypatch.setattr(calibrate_module, "calibrate_layerwise", calibrate_layerwise)
    with Checkpoint.open(llama_folder) as checkpoint:
        nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    text = data(5)
    assert isinstance(calibrate_set(llama_folder, text, CalibrateOptions(max_memory=nbytes)), ActivationStats)
    assert not calls
    options = CalibrateOptions(max_memory=nbytes - 1, histogram=True)
    assert calibrate_set(llama_folder, text, options) == "layer by layer"  # type: ignore[comparison-overlap]
    assert calls[0][0].checkpoint.path == llama_folder
    assert calls[0][1:] == (text, options, None)
    calibrate_set(llama_folder, text, CalibrateOptions(max_memory=nbytes, dtype=torch.float32))
    assert len(calls) == 2, "in float32 the weights are twice as large"


def test_a_quantized_checkpoint_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "quantized", "fp8-dynamic")
    with pytest.raises(AlreadyQuantizedError, match="calibrate the original"):
        calibrate_set(tmp_path / "quantized", data(5))


@pytest.mark.parametrize(
    ("sequences", "problem"),
    [
        ((), "no calibration data"),
        (((1, 2), ()), "sequence 1 of the calibration data has no tokens"),
        (((1, 288),), "token ids from 1 to 288, beyond the model's vocabulary of 288"),
        (((-1, 5),), "token ids from -1 to 5"),
    ],
)
def test_data_that_the_model_cannot_run_is_refused(
    sequences: tuple[tuple[int, ...], ...], problem: str, llama_folder: Path
) -> None:
    with pytest.raises(DataError, match=problem):
        calibrate_set(llama_folder, CalibrationSet(sequences))
