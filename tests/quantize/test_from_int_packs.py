"""A Llama whose linears compressed-tensors packed as INT4 or INT8 becomes floats, and plain weights again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from converting import INTEROP, dequantize, requantize, stored, transformers_logits
from safetensors.torch import load_file, save_file

import minifloat
from minifloat.errors import ConversionError
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.quantize.convert import convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint

BASE = INTEROP / "base-llama"
ARGS: dict[str, dict[str, Any]] = {
    "int4": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True},
    "int4 asymmetric": {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False},
    "int8 asymmetric": {"num_bits": 8, "strategy": "channel", "symmetric": False},
}


def write_packed(folder: Path, **args: Any) -> dict[str, torch.Tensor]:
    """Pack every projection of the base with compressed-tensors; return the weights that it decompresses."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="int", **args))
    weights = scheme.weights
    assert weights is not None
    shutil.copytree(BASE, folder)
    tensors, decoded = load_file(BASE / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        groups = weight.float().unflatten(1, (-1, args.get("group_size") or weight.shape[1]))
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), weights)
        state = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero_point}
        packed = PackedQuantizationCompressor.compress(state, scheme)
        decoded[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{key}": tensor.contiguous() for key, tensor in packed.items()}
    save_file(tensors, folder / "model.safetensors")
    group = {"targets": ["Linear"], "weights": weights.model_dump(mode="json"), "format": "pack-quantized"}
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
    }
    (folder / "config.json").write_text(json.dumps(config))
    return decoded


@pytest.mark.parametrize("name", ARGS)
def test_dequantized_weights_are_those_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    expected = write_packed(tmp_path / "model", **ARGS[name])
    dequantize(tmp_path / "model", tmp_path / "plain")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    for key, weight in expected.items():
        assert torch.equal(written[key], weight.to(torch.bfloat16)), key
    base = {key: value[:2] for key, value in stored(BASE).items()}
    assert {key: value[:2] for key, value in stored(tmp_path / "plain").items()} == base


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp4"])
@pytest.mark.parametrize("name", ARGS)
def test_codes_are_those_of_the_dequantized_values(name: str, scheme: str, tmp_path: Path) -> None:
    write_packed(tmp_path / "model", **ARGS[name])
    report = requantize(tmp_path / "model", tmp_path / "out", scheme)
    dequantize(tmp_path / "model", tmp_path / "plain", "float32")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "expected", scheme)
    assert stored(tmp_path / "out") == stored(tmp_path / "expected")
    assert report.quantized_source is not None
    assert next(iter(report.quantized_source["formats"])).startswith(name[:4].upper())


@pytest.mark.parametrize("name", ARGS)
def test_load_and_transformers_compute_the_same_logits(name: str, tmp_path: Path) -> None:
    write_packed(tmp_path / "model", **ARGS[name])
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        ours = minifloat.load(tmp_path / "model", minifloat.LoadOptions(dtype=torch.float32))(ids).logits[0]
    dequantize(tmp_path / "model", tmp_path / "plain", "float32")
    plain = transformers_logits(tmp_path / "plain", ids)
    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-5 * float(plain.abs().max()))


def test_inspect_names_the_format_and_no_layout_of_floats_takes_it(tmp_path: Path) -> None:
    write_packed(tmp_path / "model", **ARGS["int4 asymmetric"])
    row = inspect_checkpoint(tmp_path / "model").rows[0]
    assert (row.kind, row.format) == ("quantized", "INT4 per group 1x32")
    for layout in ("compressed-tensors", "fp8", "modelopt"):
        with pytest.raises(ConversionError, match=r"_proj"):
            convert_checkpoint(tmp_path / "model", tmp_path / "out", layout)
