"""The page of `inspect --plot`: the sample of the weights against the dequantized weights, and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from pages import captions, loads_nothing, rows, sections

from minifloat import Checkpoint, quantize_checkpoint
from minifloat.commands.main import main
from minifloat.model.layouts import describe
from minifloat.model.layouts.document import sample_magnitudes
from minifloat.model.layouts.reading import read_weight
from minifloat.numerics.histogram import count_magnitudes


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "mxfp4", "nvfp4"])
def test_small_weights_are_counted_whole(scheme: str, llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "out", scheme)
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        description = describe(checkpoint)
        found = sample_magnitudes(checkpoint, description)[scheme]
        weights = [read_weight(checkpoint, stored) for stored in description.weights.values()]
        values = np.concatenate([weight.dequantize().float().numpy().ravel() for weight in weights])
        element = next(iter(description.weights.values())).spec.element
    assert found.weights == len(weights)
    assert found.elements == values.size
    assert found.zeros == np.count_nonzero(values == 0)
    assert np.array_equal(found.histogram, count_magnitudes(values))
    assert found.scales.sum() == sum(weight.scale.numel() for weight in weights)
    assert 0 < found.largest < values.size
    if element.bits == 8 and scheme == "fp8":  # a row has its largest element at the largest code
        assert found.largest >= sum(weight.shape[0] for weight in weights)


def test_other_matrices_are_shown_by_their_dtype(llama_folder: Path) -> None:
    with Checkpoint.open(llama_folder) as checkpoint:
        found = sample_magnitudes(checkpoint, describe(checkpoint))
        matrices = [info for info in checkpoint.tensors.values() if len(info.shape) == 2]
    (entry,) = found.values()
    assert entry.weights == len(matrices)
    assert not entry.scales.any()


def test_inspect_draws_a_checkpoint(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "out", "mxfp4")
    plot = tmp_path / "plot.html"
    result = CliRunner().invoke(main, ["inspect", str(tmp_path / "out"), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert f"Drawn to {plot}" in result.output
    page = plot.read_text(encoding="utf-8")
    assert loads_nothing(page)
    found = sections(page)
    assert list(found) == [
        "Checkpoint",
        "Bytes by kind",
        "Bytes by format",
        "Magnitudes of the weights",
        "Scales",
        "Tensors",
    ]
    assert {row[0] for row in rows(found["Magnitudes of the weights"])} >= {"mxfp4"}
    assert captions(found["Scales"]) == ["Scales of the blocks, by octave"]


def test_a_plot_into_a_folder_that_does_not_exist_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(llama_folder), "--plot", str(tmp_path / "absent" / "x.html")])
    assert result.exit_code == 2
    assert "not a file in a folder that exists" in result.output
