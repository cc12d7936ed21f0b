"""Quantize the base models with NVIDIA ModelOpt and export them as unified Hugging Face checkpoints.

Run by hand in a virtual environment with nvidia-modelopt (see README.md here); never imported by the test-suite.
Weights are decoded by ModelOpt's own tensor classes, in float32, from the tensors on disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import modelopt.torch.quantization as mtq
import torch
from expectation import INTEROP, STORED, read, save, versions
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
from transformers import AutoModelForCausalLM


class Fixture(NamedTuple):
    """The recipe of a folder, and the format of its weights."""

    base: str
    config: dict[str, Any]
    element: str
    granularity: str
    scale: str
    activation: dict[str, Any] | None
    stored: tuple[str, ...] = STORED[:1]


def activation(element: str, granularity: str, dynamic: bool) -> dict[str, Any]:
    """Return the entry of expected.json for quantized activations."""
    return {"element": element, "granularity": granularity, "dynamic": dynamic}


FP8_KV = update_quant_cfg_with_kv_cache_quant(mtq.FP8_DEFAULT_CFG, mtq.FP8_KV_CFG["quant_cfg"])
NVFP4 = (mtq.NVFP4_DEFAULT_CFG, "E2M1", "group 1x16", "E4M3", activation("E2M1", "group 1x16", False))

FIXTURES: dict[str, Fixture] = {
    "modelopt-fp8-kv": Fixture("base-llama", FP8_KV, "E4M3", "tensor", "FP32", activation("E4M3", "tensor", False)),
    "modelopt-fp8-channel": Fixture(
        "base-llama",
        mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "E4M3",
        "channel",
        "FP32",
        activation("E4M3", "token", True),
    ),
    "modelopt-mxfp8": Fixture(
        "base-llama", mtq.MXFP8_DEFAULT_CFG, "E4M3", "group 1x32", "E8M0", activation("E4M3", "group 1x32", True)
    ),
    "modelopt-nvfp4": Fixture("base-llama", *NVFP4, stored=STORED),
    "modelopt-moe-nvfp4": Fixture("base-qwen3-moe", *NVFP4, stored=("experts.0.down_proj", "experts.1.up_proj")),
}


def calibrate(model: torch.nn.Module) -> None:
    """Calibrate with eight sequences of 16 random tokens."""
    for row in torch.randint(3, 64, (8, 1, 16), generator=torch.Generator().manual_seed(7)):
        model(row)


def dequantize(tensors: dict[str, torch.Tensor], fixture: Fixture) -> torch.Tensor:
    """Decode the float32 weight of one module with ModelOpt's own tensor class."""
    weight, scale = tensors["weight"], tensors["weight_scale"]
    if fixture.element == "E2M1":
        shape = torch.Size((weight.shape[0], 2 * weight.shape[1]))
        return NVFP4QTensor(shape, torch.float32, weight).dequantize(
            scale=scale, double_scale=tensors["weight_scale_2"], block_sizes={-1: 16}
        )
    if fixture.scale == "E8M0":
        return MXFP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
    # Per-channel scales are stored as a vector [N].
    scale = scale[:, None] if scale.dim() == 1 else scale
    return FP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)


def facts(tensors: dict[str, torch.Tensor], fixture: Fixture) -> dict[str, Any]:
    """Return the entry of expected.json for one module."""
    rows, columns = tensors["weight"].shape
    entry: dict[str, Any] = {
        "element": fixture.element,
        "granularity": fixture.granularity,
        "scale": fixture.scale,
        "scale_shape": list(tensors["weight_scale"].shape),
        "shape": [rows, columns * (2 if fixture.element == "E2M1" else 1)],
        "activation": fixture.activation,
    }
    return entry | {name: tensors[name].item() for name in ("input_scale", "weight_scale_2") if name in tensors}


def quantize(base: Path, target: Path, config: dict[str, Any]) -> None:
    """Write the quantized `base` to `target`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    mtq.quantize(model, config, calibrate)
    shutil.rmtree(target, ignore_errors=True)
    export_hf_checkpoint(model, export_dir=target)


def make(name: str) -> None:
    """Write the fixture `name`, replacing what is there."""
    fixture, target = FIXTURES[name], INTEROP / name
    quantize(INTEROP / fixture.base, target, fixture.config)
    _, tensors = read(target)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    kv: dict[str, dict[str, float]] = {}
    for full, tensor in tensors.items():
        module, _, local = full.rpartition(".")
        if local in ("k_scale", "v_scale"):
            kv.setdefault(module, {})[local] = tensor.item()
        elif f"{module}.weight_scale" in tensors:
            modules.setdefault(module, {})[local] = tensor
    save(
        target,
        fixture.base,
        {module: dequantize(parts, fixture) for module, parts in modules.items()},
        {module: facts(parts, fixture) for module, parts in modules.items()},
        tool=versions("nvidia-modelopt"),
        command=f"python tests/interop_tools/make_modelopt.py {name}",
        dequantized_by="modelopt.torch.quantization.qtensor, in float32",
        stored=fixture.stored,
        quant_algo=json.loads((target / "hf_quant_config.json").read_text())["quantization"]["quant_algo"],
        kv_scales=kv,
    )


def main() -> None:
    """Make the fixtures that are named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*FIXTURES, []], help="folders to make; default: all")
    for name in parser.parse_args().names or FIXTURES:
        make(name)
        print(name)


if __name__ == "__main__":
    main()
