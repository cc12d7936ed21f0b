"""Quantize the base models with llm-compressor, and record the weights that compressed-tensors decodes.

Run by hand in a virtual environment with llmcompressor (see README.md here); never imported by the test-suite.
Each fixture is one `oneshot` call and `save_pretrained`, so config.json, tensor names and dtypes are the tool's own.

compressed-tensors decompresses in the dtype of the scales, which llm-compressor writes in BF16. Here the stored
scales are converted to float32 first, so that the expected weight is the exact product and not its BF16 rounding.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from expectation import INTEROP, STORED, read, save, versions
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
FP8_CHANNEL = {**FP8_TENSOR, "strategy": "channel"}


def modifier(**arguments: Any) -> QuantizationModifier:
    """Return llm-compressor's modifier for every linear except lm_head."""
    return QuantizationModifier(**{"targets": "Linear", "ignore": ["lm_head"], **arguments})


#: Folder name -> (base model, function that returns the modifier). A modifier keeps state, so each run needs a new one.
FIXTURES: dict[str, tuple[str, Callable[[], QuantizationModifier]]] = {
    "llmc-fp8-static": ("base-llama", lambda: modifier(scheme="FP8")),
    "llmc-fp8-dynamic": ("base-llama", lambda: modifier(scheme="FP8_DYNAMIC")),
    "llmc-fp8-block": ("base-llama", lambda: modifier(scheme="FP8_BLOCK")),
    "llmc-fp8-w8a16": (
        "base-llama",
        lambda: modifier(config_groups={"group_0": {"targets": ["Linear"], "weights": FP8_CHANNEL}}),
    ),
    "llmc-mxfp4": ("base-llama", lambda: modifier(scheme="MXFP4")),
    "llmc-mxfp4a16": ("base-llama", lambda: modifier(scheme="MXFP4A16")),
    "llmc-mxfp8": ("base-llama", lambda: modifier(scheme="MXFP8")),
    "llmc-mxfp8a16": ("base-llama", lambda: modifier(scheme="MXFP8A16")),
    "llmc-nvfp4": ("base-llama", lambda: modifier(scheme="NVFP4")),
    "llmc-nvfp4a16": ("base-llama", lambda: modifier(scheme="NVFP4A16")),
    "llmc-fp8-kv": ("base-llama", lambda: modifier(scheme="FP8", kv_cache_scheme=FP8_TENSOR)),
    "llmc-mixed": (
        "base-llama",
        lambda: modifier(
            config_groups={
                "group_0": {
                    "targets": [r"re:.*self_attn\.(q|k|v)_proj$"],
                    "weights": FP8_CHANNEL,
                    "input_activations": {**FP8_TENSOR, "strategy": "token", "dynamic": True},
                },
                "group_1": {
                    "targets": [r"re:.*mlp\.(gate|up)_proj$"],
                    **preset_name_to_scheme("NVFP4", []).model_dump(include={"weights", "input_activations"}),
                },
                "group_2": {
                    "targets": [r"re:.*mlp\.down_proj$"],
                    **preset_name_to_scheme("MXFP4A16", []).model_dump(include={"weights"}),
                },
            },
            ignore=["lm_head", r"re:.*o_proj$"],
        ),
    ),
    "llmc-moe-fp8-dynamic": (
        "base-qwen3-moe",
        lambda: modifier(scheme="FP8_DYNAMIC", ignore=["lm_head", r"re:.*mlp\.gate$"]),
    ),
}

SCALE_NAMES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.uint8: "E8M0", torch.float8_e4m3fn: "E4M3"}

#: Weights that a fixture stores in full, where not `STORED`: fewer for variants that share their tensors' layout.
STORED_BY = {
    "llmc-fp8-block": (*STORED, "mlp.down_proj"),
    "llmc-fp8-kv": STORED[:1],
    "llmc-fp8-w8a16": STORED[:1],
    "llmc-mxfp4a16": STORED[:1],
    "llmc-mxfp8a16": STORED[:1],
    "llmc-nvfp4a16": STORED[:1],
    "llmc-mixed": (*STORED, "mlp.down_proj"),
    "llmc-moe-fp8-dynamic": ("layers.1.self_attn.k_proj", "experts.0.down_proj", "experts.1.up_proj"),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a placeholder tokenizer: oneshot requires one with calibration data, but never calls it on token ids."""
    words = {str(i): i for i in range(64)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), pad_token="2")


def calibration_data() -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    """Return eight sequences of 16 random token ids."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 64, (8, 1, 16), generator=generator)
    return torch.utils.data.DataLoader(
        [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids], batch_size=None
    )


def quantize(base: Path, target: Path, recipe: QuantizationModifier) -> dict[str, QuantizationScheme]:
    """Write the quantized `base` to `target` and return the scheme that the tool assigned to each module."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    oneshot(model=model, recipe=recipe, dataset=calibration_data(), tokenizer=tokenizer(), max_seq_length=16)
    model.save_pretrained(target, save_compressed=True)
    schemes = {name: getattr(module, "quantization_scheme", None) for name, module in model.named_modules()}
    return {name: scheme for name, scheme in schemes.items() if scheme is not None and scheme.weights is not None}


def decompress(tensors: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """Decode one module's tensors on disk to float32 with compressed-tensors' own functions."""
    wide = dict(tensors)
    if wide["weight_scale"].dtype == torch.bfloat16:
        wide["weight_scale"] = wide["weight_scale"].float()
    compressor = BaseCompressor.get_value_from_registry(str(getattr(scheme.format, "value", scheme.format)))
    weight = compressor.decompress(wide, scheme)["weight"].float()
    if "weight_global_scale" not in tensors:
        return weight
    # NVFP4's decompress always rounds to BF16: run its two steps in float32 and compare with its rounded result.
    rows, half = tensors["weight_packed"].shape
    exact = dequantize(
        unpack_fp4_from_uint8(tensors["weight_packed"], rows, 2 * half, dtype=torch.float32),
        scale=tensors["weight_scale"].float(),
        args=scheme.weights,
        dtype=torch.float32,
        global_scale=tensors["weight_global_scale"],
    )
    torch.testing.assert_close(exact, weight, rtol=2**-7, atol=0)
    return exact


def granularity(args: QuantizationArgs) -> str:
    """Return the name of the granularity of the scales."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "block":
        return "block " + "x".join(map(str, args.block_structure))
    return f"group 1x{args.group_size}" if strategy in ("group", "tensor_group") else strategy


def element(args: QuantizationArgs) -> str:
    """Return the name of the element format of float quantization."""
    return {8: "E4M3", 4: "E2M1"}[args.num_bits]


def facts(tensors: dict[str, torch.Tensor], scheme: QuantizationScheme) -> dict[str, Any]:
    """Return the entry of expected.json for one module."""
    packed = "weight_packed" in tensors
    weight = tensors["weight_packed" if packed else "weight"]
    scale = tensors["weight_scale"]
    entry: dict[str, Any] = {
        "element": element(scheme.weights),
        "granularity": granularity(scheme.weights),
        "scale": SCALE_NAMES[scale.dtype],
        "scale_shape": list(scale.shape),
        "shape": [weight.shape[0], weight.shape[1] * (2 if packed else 1)],
        "format": str(getattr(scheme.format, "value", scheme.format)),
        "activation": None,
    }
    inputs = scheme.input_activations
    if inputs is not None:
        dynamic = getattr(inputs.dynamic, "value", inputs.dynamic)
        entry["activation"] = {"element": element(inputs), "granularity": granularity(inputs), "dynamic": dynamic}
    for name in ("input_scale", "weight_global_scale", "input_global_scale"):
        if name in tensors:
            entry[name] = tensors[name].item()
    return entry


def make(name: str) -> None:
    """Write the fixture `name`, replacing what is there."""
    base, recipe = FIXTURES[name]
    target = INTEROP / name
    shutil.rmtree(target, ignore_errors=True)
    schemes = quantize(INTEROP / base, target, recipe())
    _, tensors = read(target)
    per_module: dict[str, dict[str, torch.Tensor]] = {module: {} for module in schemes}
    kv: dict[str, dict[str, float]] = {}
    for full, tensor in tensors.items():
        module, _, local = full.rpartition(".")
        if module in per_module:
            per_module[module][local] = tensor
        elif local in ("k_scale", "v_scale"):
            kv.setdefault(module, {})[local] = tensor.item()
    save(
        target,
        base,
        {module: decompress(parts, schemes[module]) for module, parts in per_module.items()},
        {module: facts(parts, schemes[module]) for module, parts in per_module.items()},
        tool=versions("llmcompressor", "compressed-tensors"),
        command=f"python tests/interop_tools/make_llmcompressor.py {name}",
        dequantized_by="compressed-tensors, scales widened to float32",
        stored=STORED_BY.get(name, STORED),
        kv_scales=kv,
    )


def main() -> None:
    """Make the fixtures that are named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*FIXTURES, []], help="folders to make; default: all")
    for name in parser.parse_args().names or FIXTURES:
        make(name)


if __name__ == "__main__":
    main()
