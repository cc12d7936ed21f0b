"""Quantize a model and read checkpoints with compressed-tensors; runs in llm-compressor's Python environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def make(source: str, scheme: str, target: str, tokens: list[list[int]]) -> None:
    """Quantize a model as users do; also write ``<target>.weights``, compressed-tensors' float32 decoding of it."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    rows = [{"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row))} for row in tokens]
    data = torch.utils.data.DataLoader(rows, batch_size=None)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    oneshot(model=model, recipe=recipe, dataset=data, tokenizer=tokenizer, max_seq_length=len(tokens[0]))
    model.save_pretrained(target, save_compressed=True)
    tokenizer.save_pretrained(target)
    schemes = {name: getattr(module, "quantization_scheme", None) for name, module in model.named_modules()}
    tensors = load_file(Path(target) / "model.safetensors")
    weights = {}
    for name, scheme_of_module in schemes.items():
        parts = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        if scheme_of_module is not None and "weight_scale" in parts:
            weights[name] = decompress(parts, scheme_of_module).contiguous()
    save_file(weights, f"{target}.weights")


def decompress(parts: dict[str, torch.Tensor], scheme: QuantizationScheme) -> torch.Tensor:
    """Decode a weight with compressed-tensors' own functions, with float32 scales so that nothing is rounded."""
    if "weight_global_scale" in parts:
        rows, half = parts["weight_packed"].shape
        return dequantize(
            unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float32),
            scale=parts["weight_scale"].float(),
            args=scheme.weights,
            dtype=torch.float32,
            global_scale=parts["weight_global_scale"],
        )
    scale = parts["weight_scale"]
    wide = parts | {"weight_scale": scale.float() if scale.dtype == torch.bfloat16 else scale}
    compressor = BaseCompressor.get_value_from_registry(str(getattr(scheme.format, "value", scheme.format)))
    return compressor.decompress(wide, scheme)["weight"].float()


def read(folder: str, tokens: list[list[int]], out: str) -> None:
    """Write the logits of a checkpoint in BF16, and the weights of the model's linears after the forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = model(torch.tensor(tokens)).logits.float()
    linears = {
        name: module.weight.detach().float().contiguous()
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }
    save_file(linears | {"logits": logits.contiguous()}, out)


def main() -> None:
    """Run the jobs of the request file, and append a line with the error or null for each."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for name, arguments in request["jobs"]:
        answer: dict[str, Any] = {"error": None}
        try:
            {"make": make, "read": read}[name](**arguments, tokens=request["tokens"])
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        with open(sys.argv[2], "a") as file:
            print(json.dumps(answer), file=file)


if __name__ == "__main__":
    main()
