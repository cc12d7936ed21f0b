"""Quantize a model with mlx-lm, load folders and write the logits of a text; runs in mlx-lm's Python environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.convert import convert
from mlx_lm.utils import load_model


def main() -> None:
    """Quantize into the folders of ``made``; write ``<folder>.logits`` of each of ``folders``, a line for each."""
    request: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for folder, mode in request["made"].items():
        convert(request["source"], folder, quantize=True, q_mode=mode)
    for folder in request["folders"]:
        answer: dict[str, Any] = {"error": None}
        try:
            model, _ = load_model(Path(folder))
            model.set_dtype(mx.float32)
            mx.save_safetensors(f"{folder}.logits", {"logits": model(mx.array(request["tokens"]))})
            Path(f"{folder}.logits.safetensors").rename(f"{folder}.logits")
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        with open(sys.argv[2], "a") as file:
            print(json.dumps(answer), file=file)


if __name__ == "__main__":
    main()
