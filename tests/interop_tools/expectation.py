"""Write the expected result of reading a fixture next to its checkpoint: dequantized weights, facts and logits.

The generators share this file. It contains no quantization code: the generators pass weights that the tool itself (or a
formula in the generator) has dequantized, and the logits come from plain transformers in float32 on those weights, with
activations and KV cache left in float32 whatever the scheme declares. It imports nothing from minifloat, so that an
expectation cannot share a mistake with the reader under test.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

INTEROP = Path(__file__).resolve().parent.parent / "data" / "interop"
DATE = "2026-11-21"
INPUT_IDS = torch.tensor([[3, 41, 17, 59, 8, 26, 33, 50]])

#: Weights stored in full by default: more rows than a block of 128, an all-zero row and grouped-query attention.
STORED = ("self_attn.k_proj", "layers.0.mlp.up_proj")


def versions(*packages: str) -> dict[str, str]:
    """Return the installed versions of `packages`, torch and transformers."""
    return {name: version(name) for name in (*packages, "torch", "transformers")}


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the config and all tensors of a one-file checkpoint."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def reference_logits(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits ``[8, vocab]`` of a float32 model with exactly these weights, on `INPUT_IDS`."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"} | {"dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain))
        contiguous = {name: tensor.float().contiguous() for name, tensor in weights.items()}
        save_file(contiguous, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {key: value for key, value in info.items() if value}
    if problems:
        raise RuntimeError(f"the reference model did not load exactly these weights: {problems}")
    with torch.no_grad():
        return model(INPUT_IDS).logits[0]


def save(
    folder: Path,
    base: str,
    weights: Mapping[str, torch.Tensor],
    modules: Mapping[str, Mapping[str, Any]],
    *,
    tool: Mapping[str, str],
    command: str,
    dequantized_by: str,
    stored: Collection[str] = STORED,
    **facts: Any,
) -> None:
    """Write ``expected.safetensors`` and ``expected.json`` into `folder`."""
    config, base_tensors = read(INTEROP / base)
    # Fused experts are parameters without the suffix `.weight`; all other tensors are the `weight` of a module.
    names = {module: module if module in base_tensors else f"{module}.weight" for module in weights}
    if set(weights) != set(modules) or not set(names.values()) <= set(base_tensors):
        raise RuntimeError(f"weights, modules and base disagree: {set(weights) ^ set(modules)}, {names}")
    replaced = {names[module]: weight.float().contiguous() for module, weight in weights.items()}
    tensors = {names[module]: replaced[names[module]] for module in sorted(weights) if module.endswith(tuple(stored))}
    tensors["logits"] = reference_logits(config, {**base_tensors, **replaced}).contiguous()
    tensors["input_ids"] = INPUT_IDS
    save_file(tensors, folder / "expected.safetensors")
    document = {
        "made": DATE,
        "command": command,
        "versions": dict(tool),
        "base": base,
        "dequantized_by": dequantized_by,
        "modules": {name: modules[name] for name in sorted(modules)},
        **facts,
    }
    (folder / "expected.json").write_text(json.dumps(document, indent=1) + "\n")
