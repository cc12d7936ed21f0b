"""Tensors derived from a config are those that transformers saves for the same config."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.estimate.model_source import tensors_of

_WIDE = {"head_dim": 16, "vocab_size": 288, "sliding_window": 32}
_QWEN_MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "num_experts": 4}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("phi3", {}),
        ("granite", {}),
        ("gemma2", _WIDE),
        ("gemma3_text", _WIDE),
        ("mixtral", {}),
        ("qwen2_moe", {**_QWEN_MOE, "num_experts_per_tok": 2}),
        ("qwen2_moe", {**_QWEN_MOE, "num_experts_per_tok": 2, "mlp_only_layers": [0]}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
    ],
)
def test_a_config_gives_the_tensors_of_its_checkpoint(
    model_type: str, changes: dict[str, object], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "model", model_type, **changes)
    with Checkpoint.open(folder) as checkpoint:
        saved = {info.name: info.shape for info in checkpoint.tensors.values()}
    config = json.loads((folder / "config.json").read_text())
    assert {tensor.name: tensor.shape for tensor in tensors_of(config, folder)} == saved
