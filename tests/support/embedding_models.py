"""Tiny models of random weights that make vectors or scores of texts, as sentence-transformers and vLLM save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

NAME = "sentence_transformers.models."
#: As rerankers have it.
PAIRS = (
    "Judge.\n{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    "|{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}?"
)


def write_modules(folder: Path, *types: str, **configs: dict[str, Any]) -> Path:
    """Write modules.json, and the configs of the modules that have one."""
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": NAME + kind}
        for number, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        if (kind := module["type"].removeprefix(NAME)) in configs:
            path = folder / str(module["path"])
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(configs[kind]))
    return folder


def change_config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def embedding_model(source: Path, folder: Path, kind: str = "lasttoken", *, normalize: bool = True) -> Path:
    """Save the model in `source` without its head, whose names then have no prefix, with modules that pool."""
    AutoModel.from_pretrained(source, dtype="auto").save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    types = ("Transformer", "Pooling", *(["Normalize"] if normalize else []))
    flag = {"lasttoken": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}[kind]
    return write_modules(folder, *types, Pooling={"word_embedding_dimension": 64, flag: True, "include_prompt": True})


def hidden_states(source: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the last hidden states of transformers' model in float32, as float64 ``[tokens, hidden]``."""
    with torch.no_grad():
        output = AutoModel.from_pretrained(source, dtype=torch.float32)(torch.tensor([tokens]))
    return output.last_hidden_state[0].double()


def logits_after(source: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of transformers' model after a text, in float32, as float64 ``[vocab]``."""
    with torch.no_grad():
        output = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(torch.tensor([tokens]))
    return output.logits[0, -1].double()
