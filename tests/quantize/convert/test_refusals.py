"""A checkpoint that a layout cannot hold without loss is refused before anything is written, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from converting import INTEROP, edited

from minifloat.errors import (
    ConversionError,
    MinifloatError,
    NonFiniteError,
    UnknownNameError,
    UnsupportedTensorError,
    UsageError,
)
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint

PROJ = "model.layers.0.mlp.down_proj"
ATTENTION = "model.layers.0.self_attn"

Tensors = dict[str, torch.Tensor]


def refused(source: Path, tmp_path: Path, layout: str | None, problem: str, kind: type[MinifloatError]) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(kind, match=problem):
        convert_checkpoint(source, tmp_path / "out", layout, ConvertOptions(dequantize=layout is None))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "layout", "problem"),
    [
        ("llmc-fp8-w8a16", "fp8", "holds fp8-block only, not 'fp8'; use compressed-tensors"),
        (
            "llmc-fp8-w8a16",
            "modelopt",
            "no quant_algo for 'fp8': FP8_PER_CHANNEL_PER_TOKEN has these weights with",
        ),
        ("llmc-mxfp8a16", "modelopt", "MXFP8 has these weights .* quantize with --scheme mxfp8-w8a8, or use layout"),
        ("llmc-mxfp8a16", "mxfp8", "requires inputs quantized at run time"),
        ("llmc-fp8-static", "fp8", "holds fp8-block only, not 'fp8-static'"),
        ("llmc-fp8-block", "fp8", "is not made of whole 128x128 blocks"),
        ("llmc-fp8-block", "modelopt", "no quant_algo for 'fp8-block'"),
        (
            "llmc-mxfp4a16",
            "modelopt",
            "none of FP8, .* has weights in E2M1 with E8M0 scales per group 1x32",
        ),
        ("llmc-mixed", "fp8", "holds fp8-block only"),
        ("llmc-mixed", "mxfp8", "holds MXFP8 with MXFP8 inputs only"),
        ("llmc-nvfp4", "modelopt", r"weight_global_scale: .* reciprocal .* no float32; --allow-rounding"),
        ("modelopt-nvfp4", "compressed-tensors", r"weight_scale_2: .* reciprocal .* no float32; --allow-rounding"),
        ("gpt-oss-mxfp4", "compressed-tensors", "no engine reads them from another layout .* use --dequantize"),
        ("gpt-oss-mxfp4", "gpt-oss", "does not convert to gpt-oss' layout"),
        ("llmc-mxfp4", "gpt-oss", "vLLM runs any other model in this layout unquantized"),
    ],
)
def test_a_layout_that_cannot_hold_the_quantization_is_refused_with_the_reason(
    name: str, layout: str, problem: str, tmp_path: Path
) -> None:
    refused(INTEROP / name, tmp_path, layout, problem, ConversionError)


def test_blocks_with_16_bit_inputs_are_not_converted_to_a_layout_with_quantized_inputs(tmp_path: Path) -> None:
    source = edited(
        INTEROP / "llmc-fp8-block",
        tmp_path / "model",
        config=lambda config: config["config_groups"]["group_0"].update(input_activations=None),
    )
    refused(source, tmp_path, "fp8", "requires inputs quantized at run time in groups of 128, unlike", ConversionError)


@pytest.mark.parametrize(
    ("name", "added", "problem"),
    [
        (
            "modelopt-nvfp4",
            {f"{PROJ}.pre_quant_scale": torch.ones(160)},
            "pre_quant_scale: a tensor of a quantized linear",
        ),
        (
            "llmc-fp8-dynamic",
            {f"{PROJ}.weight_zero_point": torch.ones(1)},
            "weight_zero_point: a tensor of a quantized",
        ),
        ("llmc-fp8-kv", {f"{ATTENTION}.q_scale": torch.ones(1)}, "q_scale: layout 'modelopt' has no place for it"),
        ("llmc-fp8-kv", {f"{ATTENTION}.k_scale": torch.ones(2, 1, 1)}, "k_scale: expected one float"),
    ],
)
def test_a_tensor_that_no_layout_can_hold_is_refused_by_name(
    name: str, added: Tensors, problem: str, tmp_path: Path
) -> None:
    source = edited(INTEROP / name, tmp_path / "model", tensors=lambda before: before | added)
    refused(source, tmp_path, "modelopt", problem, ConversionError)


def test_packed_codes_without_a_scale_are_refused_by_name(tmp_path: Path) -> None:
    added = {"a.weight": torch.ones(4, 4, dtype=torch.uint8)}
    source = edited(INTEROP / "llmc-fp8-dynamic", tmp_path / "model", tensors=lambda before: before | added)
    refused(source, tmp_path, "modelopt", "a.weight: U8 codes without a scale", UnsupportedTensorError)


def algorithm(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(quant_algo=name)


@pytest.mark.parametrize("layout", ["compressed-tensors", None])
@pytest.mark.parametrize(
    ("name", "edit", "problem"),
    [
        (
            "llmc-mxfp4",
            lambda config: config.update(transform_config={"config_groups": {}, "x": 1}),
            "transform_config",
        ),
        ("modelopt-nvfp4", algorithm("W4A8_NVFP4_FP8"), "quant_algo W4A8_NVFP4_FP8 is not one of"),
        ("modelopt-nvfp4", algorithm("NVFP4_AWQ"), "quant_algo NVFP4_AWQ is not one of"),
    ],
)
def test_quantization_beyond_codes_and_scales_is_refused(
    name: str, edit: Callable[[dict[str, Any]], None], problem: str, layout: str | None, tmp_path: Path
) -> None:
    source = edited(INTEROP / name, tmp_path / "model", config=edit)
    refused(source, tmp_path, layout, problem, ConversionError)


def test_declared_static_inputs_without_a_scale_are_refused(tmp_path: Path) -> None:
    source = edited(
        INTEROP / "llmc-fp8-static",
        tmp_path / "model",
        tensors=lambda before: {name: tensor for name, tensor in before.items() if name != f"{PROJ}.input_scale"},
    )
    refused(source, tmp_path, "modelopt", rf"{PROJ}: its inputs are declared .* which is missing", ConversionError)


def test_input_scales_of_inputs_without_static_quantization_are_dropped_with_a_note(tmp_path: Path) -> None:
    name = f"{PROJ}.input_scale"
    source = edited(
        INTEROP / "llmc-fp8-dynamic", tmp_path / "model", tensors=lambda before: before | {name: torch.ones(1)}
    )
    report = convert_checkpoint(source, tmp_path / "out", "modelopt")
    assert [tensor.name for tensor in report.tensors if tensor.action == "dropped"] == [name]
    assert "1 scales of inputs were dropped" in report.notes[0]


def test_modelopt_refuses_an_unquantized_module_whose_name_starts_a_quantized_name(tmp_path: Path) -> None:
    gate = {"model.layers.0.mlp.gate.weight": torch.ones(2, 64, dtype=torch.bfloat16)}
    source = edited(INTEROP / "llmc-fp8-dynamic", tmp_path / "model", tensors=lambda before: before | gate)
    problem = r"mlp\.gate_proj is quantized and model\.layers\.0\.mlp\.gate is not: .* leave out both"
    refused(source, tmp_path, "modelopt", problem, ConversionError)


def test_a_nan_scale_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    name = f"{PROJ}.weight_scale"
    source = edited(
        INTEROP / "llmc-fp8-dynamic", tmp_path / "model", tensors=lambda all: all | {name: all[name] * torch.nan}
    )
    refused(source, tmp_path, "modelopt", rf"{name}: \d+ scales are NaN or Inf", NonFiniteError)


def test_an_unquantized_model_is_refused(tmp_path: Path) -> None:
    refused(INTEROP / "base-llama", tmp_path, "modelopt", "is not quantized", UsageError)
    refused(INTEROP / "base-llama", tmp_path, None, "is not quantized", UsageError)


def test_contradicting_or_unknown_arguments_are_refused(tmp_path: Path) -> None:
    source = INTEROP / "llmc-mxfp8"
    with pytest.raises(UsageError, match="either a layout to convert to, or dequantize"):
        convert_checkpoint(source, tmp_path / "out")
    with pytest.raises(UsageError, match="either a layout to convert to, or dequantize"):
        convert_checkpoint(source, tmp_path / "out", "mxfp8", ConvertOptions(dequantize=True))
    with pytest.raises(UsageError, match="dtype needs dequantize"):
        convert_checkpoint(source, tmp_path / "out", "mxfp8", ConvertOptions(dtype="bfloat16"))
    with pytest.raises(UnknownNameError, match="valid: compressed-tensors, fp8, modelopt, mxfp8"):
        convert_checkpoint(source, tmp_path / "out", "exl2")
    with pytest.raises(UsageError, match="lies inside it"):
        convert_checkpoint(source, source / "out", "mxfp8")
