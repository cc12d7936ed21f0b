"""Write checkpoints in layouts whose own tools need a GPU or the hub: block FP8, per-tensor FP8, gpt-oss MXFP4.

Run by hand in a virtual environment with transformers (see README.md here); never imported by the test-suite. The
layouts are those of published checkpoints; the arithmetic is the plain formula in torch, apart from
`deepseek-block32-transformers*`, whose tensors transformers' own conversion operations quantize. Where transformers
can read a result, it is loaded back here and must give the recorded logits.

transformers cannot check partial blocks: it derives the block from the shape of the scale grid, so 160 rows
under two rows of scales are decoded in blocks of 80. Those fixtures are decoded by the formula only.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from expectation import INPUT_IDS, INTEROP, STORED, read, save, versions
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SCALE_NAMES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float8_e8m0fnu: "E8M0"}

Tensors = dict[str, torch.Tensor]
Facts = dict[str, dict[str, Any]]


def linears(tensors: Tensors) -> list[str]:
    """Return the names of the modules to quantize: projections, not lm_head, embeddings, norms or the router."""
    return [name.removesuffix(".weight") for name in sorted(tensors) if name.endswith("_proj.weight")]


def to_e4m3(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``weight / scale`` rounded to E4M3 and clamped to its largest value."""
    return (weight.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def expand(scales: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """Return the scale of each element, repeated from a grid of blocks of which the last may be partial."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def write(target: Path, base: str, tensors: Tensors, quantization: dict[str, Any]) -> None:
    """Write the checkpoint: the base's config with a quantization_config, and `tensors`."""
    config, _ = read(INTEROP / base)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}, indent=2) + "\n")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def check_loads(target: Path, **arguments: Any) -> None:
    """transformers must read the fixture and compute the recorded logits."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager", **arguments)
    model.float()  # transformers keeps the file's dtype for unquantized tensors, whatever dtype is requested
    with torch.no_grad():
        logits = model(INPUT_IDS).logits[0]
    torch.testing.assert_close(logits, load_file(target / "expected.safetensors")["logits"], rtol=1e-5, atol=1e-5)


def block_fp8(tensors: Tensors, scale_dtype: torch.dtype) -> tuple[Tensors, Tensors, Facts]:
    """Return ``(tensors on disk, weights, facts)`` for DeepSeek's 128x128 blocks, including partial blocks."""
    block = (128, 128)
    stored, weights, facts = dict(tensors), {}, {}
    for name in linears(tensors):
        weight = tensors[f"{name}.weight"].float()
        rows, columns = (-(-size // length) for size, length in zip(weight.shape, block, strict=True))
        amax = torch.zeros(rows, columns)
        for i in range(rows):
            for j in range(columns):
                part = weight[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
                amax[i, j] = part.abs().amax()
        scale = (amax / E4M3_MAX).to(scale_dtype)
        codes = to_e4m3(weight, expand(scale.float(), block, weight.shape))
        stored[f"{name}.weight"], stored[f"{name}.weight_scale_inv"] = codes, scale
        weights[name] = codes.float() * expand(scale.float(), block, weight.shape)
        facts[name] = {
            "element": "E4M3",
            "granularity": "block 128x128",
            "scale": SCALE_NAMES[scale_dtype],
            "scale_shape": list(scale.shape),
            "shape": list(weight.shape),
            "activation": {"element": "E4M3", "granularity": "group 1x128", "dynamic": True},
        }
    return stored, weights, facts


def make_deepseek(name: str, scale_dtype: torch.dtype, quantization: dict[str, Any], stored: tuple[str, ...]) -> None:
    """Write a block FP8 Llama, quantized and decoded by the formula."""
    _, tensors = read(INTEROP / "base-llama")
    on_disk, weights, facts = block_fp8(tensors, scale_dtype)
    common = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    write(INTEROP / name, "base-llama", on_disk, common | quantization)
    record(name, "base-llama", weights, facts, "float32 codes * scales, in the generator", stored)


def make_transformers_block(name: str, base: str, scale_fmt: str, stored: tuple[str, ...]) -> None:
    """Write block FP8 by transformers' own operations, in 32x32 blocks, which divide every matrix of `base` exactly."""
    _, tensors = read(INTEROP / base)
    skipped = sorted({key.removesuffix(".weight") for key in tensors} - set(linears(tensors)))
    config = FineGrainedFP8Config(
        weight_block_size=(32, 32), modules_to_not_convert=skipped, **({"scale_fmt": scale_fmt} if scale_fmt else {})
    )
    owner = SimpleNamespace(quantization_config=config)
    on_disk, weights, facts = dict(tensors), {}, {}
    for module in linears(tensors):
        key = f"{module}.weight"
        on_disk |= Fp8Quantize(owner)._quantize_one(key, tensors[key])
        scale = on_disk[f"{key}_scale_inv"]
        weights[module] = Fp8Dequantize(owner)._dequantize_one(on_disk[key], scale, output_dtype=torch.float32)
        facts[module] = {
            "element": "E4M3",
            "granularity": "block 32x32",
            "scale": SCALE_NAMES[scale.dtype],
            "scale_shape": list(scale.shape),
            "shape": list(weights[module].shape),
            "activation": {"element": "E4M3", "granularity": "group 1x32", "dynamic": True},
        }
    quantization = json.loads(config.to_json_string(use_diff=False))
    write(INTEROP / name, base, on_disk, quantization)
    record(name, base, weights, facts, "transformers' Fp8Dequantize in float32", stored)
    check_loads(INTEROP / name)


def input_amax(base: str) -> dict[str, float]:
    """Return the amax of the input of each linear of `base` over 128 random tokens."""
    model = AutoModelForCausalLM.from_pretrained(INTEROP / base, dtype=torch.float32, attn_implementation="eager")
    amax: dict[str, float] = {}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(
                lambda _, arguments, name=name: amax.update({name: arguments[0].abs().amax().item()})
            )
    with torch.no_grad():
        model(torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(7)))
    return amax


def make_vllm_static(name: str) -> None:
    """Write vLLM's per-tensor form: ``weight_scale`` and ``input_scale`` in float32 of shape ``[]``."""
    _, tensors = read(INTEROP / "base-llama")
    on_disk, weights, facts, amax = dict(tensors), {}, {}, input_amax("base-llama")
    for module in linears(tensors):
        weight = tensors[f"{module}.weight"].float()
        scale = weight.abs().amax() / E4M3_MAX
        input_scale = torch.tensor(amax[module] / E4M3_MAX)
        codes = to_e4m3(weight, scale)
        on_disk |= {f"{module}.weight": codes, f"{module}.weight_scale": scale, f"{module}.input_scale": input_scale}
        weights[module] = codes.float() * scale
        facts[module] = {
            "element": "E4M3",
            "granularity": "tensor",
            "scale": "FP32",
            "scale_shape": [],
            "shape": list(weight.shape),
            "activation": {"element": "E4M3", "granularity": "tensor", "dynamic": False},
            "input_scale": input_scale.item(),
        }
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    write(INTEROP / name, "base-llama", on_disk, quantization)
    record(name, "base-llama", weights, facts, "float32 codes * scale, in the generator", STORED[:1])


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``[..., K]`` to MXFP4: blocks ``[..., K/32, 16]`` and scales ``[..., K/32]``, both uint8.

    The scale is the smallest power of two that clips nothing; elements are rounded to nearest, ties to the even code;
    the even element of a pair is in the low nibble.
    """
    groups = weight.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1)
    exponent = torch.ceil(torch.log2(amax / E2M1_VALUES[-1])).clamp(min=-127)
    magnitude = groups.abs() / torch.exp2(exponent)[..., None]
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for lower, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        codes += magnitude >= middle if lower % 2 else magnitude > middle
    codes |= (groups < 0).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


def make_gpt_oss(name: str) -> None:
    """Write gpt-oss with experts in MXFP4 blocks and scales, packed by `mxfp4` and decoded by transformers."""
    _, tensors = read(INTEROP / "base-gpt-oss")
    on_disk, weights, facts = dict(tensors), {}, {}
    for key in sorted(tensors):
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        # [experts, in, out] in BF16, [experts, out, in] packed along `in`.
        blocks, scales = mxfp4(on_disk.pop(key).transpose(1, 2))
        on_disk |= {f"{key}_blocks": blocks.contiguous(), f"{key}_scales": scales.contiguous()}
        weights[key] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        facts[key] = {
            "element": "E2M1",
            "granularity": "group 1x32",
            "scale": "E8M0",
            "scale_shape": list(scales.shape),
            "blocks_shape": list(blocks.shape),
            "shape": list(weights[key].transpose(1, 2).shape),
            "activation": None,
        }
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    write(INTEROP / name, "base-gpt-oss", on_disk, {"modules_to_not_convert": skipped, "quant_method": "mxfp4"})
    by = "transformers' convert_moe_packed_tensors in float32; [experts, in, out], the transpose of what is packed"
    record(name, "base-gpt-oss", weights, facts, by, ("experts.down_proj",))
    check_loads(INTEROP / name, quantization_config=Mxfp4Config(dequantize=True))


def record(name: str, base: str, weights: Tensors, facts: Facts, dequantized_by: str, stored: tuple[str, ...]) -> None:
    """Write the expectation of a fixture of this file."""
    save(
        INTEROP / name,
        base,
        weights,
        facts,
        tool=versions(),
        command=f"python tests/interop_tools/make_by_hand.py {name}",
        dequantized_by=dequantized_by,
        stored=stored,
        kv_scales={},
    )


FIXTURES: dict[str, Callable[[str], None]] = {
    # With a skip list, as in Qwen's checkpoints.
    "deepseek-block128": lambda name: make_deepseek(
        name, torch.float32, {"modules_to_not_convert": ["lm_head", "model.norm"]}, (*STORED, "mlp.down_proj")
    ),
    # Without a skip list, as in DeepSeek's checkpoints: only the presence of a scale marks a quantized module.
    "deepseek-block128-bf16-scales": lambda name: make_deepseek(name, torch.bfloat16, {}, STORED),
    "deepseek-block32-moe": lambda name: make_transformers_block(
        name, "base-qwen3-moe", "", ("experts.0.down_proj", "experts.1.up_proj", "layers.1.self_attn.k_proj")
    ),
    "deepseek-block32-ue8m0": lambda name: make_transformers_block(name, "base-llama", "ue8m0", STORED[:1]),
    "vllm-fp8-static": make_vllm_static,
    "gpt-oss-mxfp4": make_gpt_oss,
}


def main() -> None:
    """Make the fixtures that are named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*FIXTURES, []], help="folders to make; default: all")
    for name in parser.parse_args().names or FIXTURES:
        FIXTURES[name](name)
        print(name)


if __name__ == "__main__":
    main()
