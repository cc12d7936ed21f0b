"""Packs of INT4 and INT8 are decoded as compressed-tensors decodes them, and bad ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError, MinifloatError, ShapeError, UnsupportedTensorError
from minifloat.model.layouts import describe, read_weight
from minifloat.model.layouts.reading import read_rows

MODULE = "model.layers.0.mlp.down_proj"
ARGS: dict[str, dict[str, Any]] = {
    "int4 group": {"num_bits": 4, "group_size": 32, "strategy": "group"},
    "int4 group asymmetric": {"num_bits": 4, "group_size": 16, "strategy": "group", "symmetric": False},
    "int4 channel, padded": {"num_bits": 4, "strategy": "channel", "columns": 70},
    "int4 channel asymmetric, padded": {"num_bits": 4, "strategy": "channel", "symmetric": False, "columns": 70},
    "int4 tensor": {"num_bits": 4, "strategy": "tensor"},
    "int8 group": {"num_bits": 8, "group_size": 32, "strategy": "group"},
    "int8 channel asymmetric, padded": {"num_bits": 8, "strategy": "channel", "symmetric": False, "columns": 70},
}


def write_pack(folder: Path, rows: int = 37, columns: int = 96, **args: Any) -> dict[str, torch.Tensor]:
    """Write one packed linear as compressed-tensors compresses it; return the tensors by their names in the module."""
    generator = torch.Generator().manual_seed(5)
    parsed = QuantizationArgs(type="int", **args)
    scheme = QuantizationScheme(targets=["Linear"], weights=parsed)
    low, high = -(1 << (parsed.num_bits - 1)), (1 << (parsed.num_bits - 1)) - 1
    grid = {"group": (rows, columns // (parsed.group_size or 1)), "channel": (rows, 1), "tensor": (1,)}[parsed.strategy]
    state = {
        "weight": torch.randn(rows, columns, generator=generator),
        "weight_scale": (torch.rand(grid, generator=generator) * 0.3 + 0.01).to(torch.bfloat16),
        "weight_zero_point": torch.randint(low, high + 1, grid, generator=generator, dtype=torch.int8),
    }
    if parsed.symmetric:
        state["weight_zero_point"].zero_()
    packed = PackedQuantizationCompressor.compress(state, scheme)
    folder.mkdir()
    save_file(
        {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in packed.items()}, folder / "model.safetensors"
    )
    weights = {key: value for key, value in parsed.model_dump(mode="json").items() if value is not None}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": group},
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return dict(PackedQuantizationCompressor.decompress(packed, scheme))


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Replace tensors of the linear, or drop those that are None."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        tensors.pop(f"{MODULE}.{name}", None)
        if tensor is not None:
            tensors[f"{MODULE}.{name}"] = tensor
    save_file(tensors, folder / "model.safetensors")


def described(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        describe(checkpoint)


@pytest.mark.parametrize("name", ARGS)
def test_a_pack_is_decoded_as_compressed_tensors_decodes_it(name: str, tmp_path: Path) -> None:
    tensors = write_pack(tmp_path / "model", **ARGS[name])
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        stored = describe(checkpoint).weights[MODULE]
        decoded = read_weight(checkpoint, stored).dequantize()
        by_rows = [torch.from_numpy(read_rows(checkpoint, stored, row, min(row + 5, 37))) for row in range(0, 37, 5)]
    # compressed-tensors multiplies in the dtype of the scales, bfloat16: one rounding of the exact product
    assert torch.equal(decoded.to(torch.bfloat16), tensors["weight"].to(torch.bfloat16))
    assert torch.equal(torch.cat(by_rows), decoded)


def test_without_the_recorded_shape_groups_tell_the_number_of_columns(tmp_path: Path) -> None:
    write_pack(tmp_path / "model", num_bits=4, group_size=32, strategy="group")
    rewrite(tmp_path / "model", weight_shape=None)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        assert describe(checkpoint).weights[MODULE].shape == (37, 96)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], type[MinifloatError], str]] = {
    "odd width": (
        {"columns": 69, "num_bits": 4, "strategy": "channel"},
        {},
        ShapeError,
        r"down_proj\.weight_packed: an INT4 weight has an even number of columns.*found 69: quantize the original",
    ),
    "narrow": (
        {"num_bits": 4, "strategy": "channel"},
        {"weight_packed": torch.zeros(37, 11, dtype=torch.int32)},
        ShapeError,
        r"weight_packed: a pack of INT4 holds 8 columns in each int32, so a 37x96 weight has the shape \[37, 12\]",
    ),
    "scales of another shape": (
        {"num_bits": 4, "group_size": 32, "strategy": "group"},
        {"weight_scale": torch.ones(3, 37)},
        ShapeError,
        r"down_proj\.weight_scale: group 1x32 scales of a 37x96 weight are a grid of 37x3; found shape \[3, 37\]",
    ),
    "zero points of another shape": (
        {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False},
        {"weight_zero_point": torch.zeros(37, 3, dtype=torch.int32)},
        ShapeError,
        r"weight_zero_point: expected the shape \[5, 3\] beside scales \[37, 3\], found \[37, 3\]",
    ),
    "no zero points": (
        {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False},
        {"weight_zero_point": None},
        ConfigError,
        r"down_proj declares asymmetric weights, yet there is no \S+weight_zero_point",
    ),
    "unexpected zero points": (
        {"num_bits": 4, "group_size": 32, "strategy": "group"},
        {"weight_zero_point": torch.zeros(5, 3, dtype=torch.int32)},
        ConfigError,
        r"down_proj declares symmetric weights, yet \S+weight_zero_point is stored",
    ),
    "no scale": (
        {"num_bits": 4, "group_size": 32, "strategy": "group"},
        {"weight_scale": None},
        UnsupportedTensorError,
        r"down_proj\.weight_packed: I32 codes without a scale .* download it again",
    ),
    "columns in another order": (
        {"num_bits": 4, "group_size": 32, "strategy": "group"},
        {"weight_g_idx": torch.zeros(96, dtype=torch.int32)},
        UnsupportedTensorError,
        r'weight_g_idx: groups of columns in the order of activations \(actorder "group"\) are not read; use',
    ),
    "a shape of three numbers": (
        {"num_bits": 4, "group_size": 32, "strategy": "group"},
        {"weight_shape": torch.tensor([1, 37, 96])},
        ShapeError,
        r"weight_shape: expected two integers, N and K, found I64 \[3\]",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bad_pack_is_refused_by_the_name_of_its_tensor(name: str, tmp_path: Path) -> None:
    args, changed, error, message = REFUSALS[name]
    write_pack(tmp_path / "model", **args)
    rewrite(tmp_path / "model", **changed)
    with pytest.raises(error, match=message):
        described(tmp_path / "model")
