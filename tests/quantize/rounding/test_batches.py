"""Sequences of one length run through layers together: what batches are, and that they give what single ones do."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from rounding_cases import round_model, write_model

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise import layer_stack
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.quantize.rounding.texts import SplitBatches, SplitText


def make_sequences(count: int, length: int, seed: int) -> CalibrationSet:
    ids = np.random.default_rng(seed).integers(3, 288, (count, length))
    return CalibrationSet(tuple(map(tuple, ids.tolist())))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("batches") / "llama", "llama", intermediate_size=160)


@pytest.mark.parametrize(
    ("tokens", "values", "lengths"),
    [
        (24, 1 << 24, [[8, 8, 8], [8], [5, 5], [8], [30], [30]]),
        (1 << 24, 20 * 160, [[8, 8], [8, 8], [5, 5], [8], [30], [30]]),  # the widest activation has 160 channels
        (1, 1 << 24, [[8], [8], [8], [8], [5], [5], [8], [30], [30]]),
    ],
)
def test_neighbours_of_one_length_share_a_batch(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, values: int, lengths: list[list[int]]
) -> None:
    monkeypatch.setattr(layer_stack, "BATCH_TOKENS", tokens)
    monkeypatch.setattr(layer_stack, "_BATCH_VALUES", values)
    sequences = [(number,) * length for number, length in enumerate(itertools.chain(*lengths))]
    with Checkpoint.open(llama) as checkpoint:
        model = CalibrationModel(checkpoint, CalibrateOptions())
        batches = LayerStack(model, model.loader(), None).batches(sequences)
    assert [sequence for batch in batches for sequence in batch] == sequences
    assert [[len(sequence) for sequence in batch] for batch in batches] == lengths


def test_a_batch_is_of_one_part_and_names_its_sequences() -> None:
    parts = (CalibrationSet(tuple((number,) for number in numbers)) for numbers in (range(5), range(5, 7), [7]))
    found = SplitBatches.of(SplitText(*parts), lambda sequences: [[*sequences][:2], [*sequences][2:]])
    assert [len(batch) for batch in found.batches] == [2, 3, 2, 0, 1, 0]
    assert (found.first_chosen_on, found.first_reported) == (2, 4)
    assert [found.name(number) for number in (0, 1, 4)] == ["sequences 0 to 1", "sequences 2 to 4", "sequence 7"]


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "qwen3_moe", "phi3"])
def test_a_model_is_rounded_as_by_one_sequence_at_a_time(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", model_type)
    text = make_sequences(20, 40, seed=0), make_sequences(4, 40, seed=1)
    together = round_model(folder, tmp_path / "work", *text)
    monkeypatch.setattr(layer_stack, "BATCH_TOKENS", 1)
    alone = round_model(folder, tmp_path / "work", *text)
    assert together.tensors.keys() == alone.tensors.keys()
    assert together.held_out["nearest_by_sequence"] == pytest.approx(alone.held_out["nearest_by_sequence"], rel=0.02)
    assert together.held_out["method"] == pytest.approx(alone.held_out["method"], rel=0.2)
    for name, row in alone.weights.items():
        assert together.weights[name]["tokens"] == row["tokens"]
        assert together.weights[name]["nearest_error"] == pytest.approx(row["nearest_error"], rel=0.25)
        assert together.weights[name]["method_error"] == pytest.approx(row["method_error"], rel=0.25)
