"""Small Llama checkpoints written with numpy, without torch or a model class."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HIDDEN, INNER, VOCAB = 64, 160, 96


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the bits of float32 values as bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def llama_tensors(seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a small Llama whose MLP width, 160, is not a multiple of 128."""
    rng = np.random.default_rng(seed)
    tensors = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    tensors["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
            f"{prefix}.self_attn.q_proj.bias": (HIDDEN,),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INNER),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
        }
    return {name: (rng.standard_t(5, shape) * 0.02).astype(np.float32) for name, shape in tensors.items()}


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray], dtype: str) -> None:
    """Write a safetensors file: length, header, data."""
    header, data = {}, b""
    for name, array in arrays.items():
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
}


@pytest.fixture
def llama() -> Callable[[], dict[str, np.ndarray]]:
    """A function that returns the tensors of the small Llama, fresh each time."""
    return llama_tensors


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a checkpoint of float32 arrays as BF16 (or F16, F32), in one file or several."""

    def make(
        name: str = "source",
        tensors: Mapping[str, np.ndarray] | None = None,
        *,
        shards: int = 1,
        dtype: str = "BF16",
        config: Mapping[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(CONFIG) | dict(config or {})))
        (folder / "tokenizer_config.json").write_text("{}")
        arrays = dict(llama_tensors() if tensors is None else tensors)
        encode = {"BF16": to_bf16, "F16": lambda a: a.astype(np.float16), "F32": lambda a: a.astype(np.float32)}[dtype]
        names = list(arrays)
        weight_map = {}
        for shard in range(shards):
            file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            members = names[shard::shards]
            write_safetensors(folder / file, {member: encode(arrays[member]) for member in members}, dtype)
            weight_map |= dict.fromkeys(members, file)
        if shards > 1:
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make
