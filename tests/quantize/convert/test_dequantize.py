"""`--dequantize` writes an unquantized model: the decoded weights, rounded once."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from converting import (
    FIXTURES,
    INTEROP,
    assert_expected_logits,
    dequantize,
    edited,
    sharded,
    stored,
    transformers_logits,
)
from safetensors.torch import load_file

from minifloat.checkpoint import Checkpoint
from minifloat.errors import NonFiniteError, UnknownNameError
from minifloat.model.layouts import describe, read_weight


@pytest.mark.parametrize("name", FIXTURES)
def test_dequantized_weights_are_those_of_the_oracle_and_of_the_tool_rounded_once(name: str, tmp_path: Path) -> None:
    dequantize(INTEROP / name, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    with Checkpoint.open(INTEROP / name) as checkpoint:
        for module, weight in describe(checkpoint).weights.items():
            decoded = read_weight(checkpoint, weight).dequantize(torch.bfloat16)
            if weight.expert is None:
                assert torch.equal(written[f"{module}.weight"], decoded), module
            else:
                assert torch.equal(written[module.rpartition(".")[0]][weight.expert], decoded.T), module
    expected = load_file(INTEROP / name / "expected.safetensors")
    for key in expected.keys() - {"logits", "input_ids"}:
        assert torch.equal(written[key], expected[key].to(torch.bfloat16)), key


@pytest.mark.parametrize("name", FIXTURES)
def test_tensors_are_those_of_the_plain_model_by_name_and_shape(name: str, tmp_path: Path) -> None:
    report = dequantize(INTEROP / name, tmp_path / "out")
    base = INTEROP / json.loads((INTEROP / name / "expected.json").read_text())["base"]
    facts = [{key: value[:2] for key, value in stored(folder).items()} for folder in (tmp_path / "out", base)]
    assert facts[0] == facts[1]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    with Checkpoint.open(tmp_path / "out") as plain, Checkpoint.open(INTEROP / name) as source:
        assert describe(plain).layout is None
        assert [tensor.name for tensor in report.tensors] == list(source.tensors)
        dropped = {
            scale
            for scale in source.tensors
            if scale.endswith(("k_scale", "v_scale", "input_scale", "input_global_scale"))
        }
    assert {tensor.name for tensor in report.tensors if tensor.action == "dropped"} == dropped


@pytest.mark.parametrize("name", FIXTURES)
def test_transformers_computes_the_logits_of_an_independent_dequantization(name: str, tmp_path: Path) -> None:
    dequantize(INTEROP / name, tmp_path / "out", "float32")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert_expected_logits(name, partial(transformers_logits, tmp_path / "out"))


def test_a_sharded_source_gives_the_same_tensors_and_shards_of_scales_alone_disappear(tmp_path: Path) -> None:
    source = INTEROP / "modelopt-mxfp8"
    dequantize(source, tmp_path / "whole")
    dequantize(sharded(source, tmp_path / "cards", 25), tmp_path / "out")
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    scales = sum(name.endswith("weight_scale") for name in stored(source))
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(stored(source)) - scales


def test_an_unknown_dtype_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="bfloat16, float16, float32"):
        dequantize(INTEROP / "llmc-mxfp4", tmp_path / "out", "int8")


def test_decoded_values_beyond_the_dtype_are_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale"
    source = edited(
        INTEROP / "llmc-fp8-dynamic", tmp_path / "model", tensors=lambda all: all | {name: all[name].float() * 1e9}
    )
    with pytest.raises(NonFiniteError, match=r"down_proj\.weight: NaN, or values beyond the range of F16"):
        dequantize(source, tmp_path / "out", "float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
