"""Quantize one model with llm-compressor for `benchmarks/rounding_peers.py`, which starts this file as a process.

    PYTHON benchmarks/rounding_llmcompressor.py MODEL OUT --tokens tokens.json --scheme MXFP4A16 --method gptq

PYTHON is the Python of an environment that has llm-compressor (``tests/interop/requirements-llmcompressor.txt``); this
file does not import minifloat. The token file is a list of sequences of token ids. The process prints one JSON object:
the seconds that `oneshot` took, and the versions.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version
from typing import Any

import torch
from compressed_tensors.quantization import preset_name_to_scheme
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def modifier(method: str, scheme: str, observer: str | None) -> QuantizationModifier | GPTQModifier:
    """Return llm-compressor's modifier for every linear except lm_head; GPTQ with a static order of the columns."""
    preset = preset_name_to_scheme(scheme, ["Linear"])
    if observer is not None:
        preset.weights.observer = observer
    settings: dict[str, Any] = {"config_groups": {"group_0": preset}, "ignore": ["lm_head"]}
    return QuantizationModifier(**settings) if method == "nearest" else GPTQModifier(actorder="static", **settings)


def main() -> None:
    """Quantize the model that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--scheme", default="MXFP4A16")
    parser.add_argument("--method", choices=["nearest", "gptq"], default="gptq")
    parser.add_argument("--observer", help="observer of the weights; default: that of the scheme")
    arguments = parser.parse_args()
    with open(arguments.tokens) as file:
        rows = [torch.tensor([row]) for row in json.load(file)]
    batches = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    data: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # a list serves too
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    recipe = modifier(arguments.method, arguments.scheme, arguments.observer)
    started = time.perf_counter()
    oneshot(
        model=model,
        recipe=recipe,
        dataset=data,
        tokenizer=tokenizer,
        max_seq_length=rows[0].shape[1],
        num_calibration_samples=len(rows),
    )
    seconds = time.perf_counter() - started
    model.save_pretrained(arguments.out, save_compressed=True)
    tokenizer.save_pretrained(arguments.out)
    versions = {name: version(name) for name in ("llmcompressor", "compressed-tensors", "transformers", "torch")}
    print(json.dumps({"seconds": seconds, "versions": versions}))


if __name__ == "__main__":
    main()
