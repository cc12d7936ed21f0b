"""Tiny models with random weights, made on the spot: no network, no files from elsewhere."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: ``make_llama(folder, dtype="float32", **config) -> folder``, and the same for the other architectures.
MakeModel = Callable[..., Path]

#: A byte each, then the special tokens; the rest of the vocabulary is never produced by the tokenizer.
_VOCABULARY = 288
_BOS, _EOS = 256, 257

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": _BOS,
    "eos_token_id": _EOS,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}

#: Model type -> what its config has beyond the common sizes.
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, **_MOE},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **_MOE},
    "qwen3_next": {
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        **_MOE,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, **_MOE},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 1,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        **_MOE,
    },
}


def _make(folder: Path, model_type: str, *, dtype: str = "bfloat16", seed: int = 0, **config: Any) -> Path:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = {**_COMMON, **_CONFIGS.get(model_type, {}), **config}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> Any:
    """One token per byte of UTF-8, so that a character may take several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: index for index, character in enumerate(sorted(alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """``make_model(folder, model_type, *, dtype, seed, **config)`` writes a model and returns its folder."""
    return _make


@pytest.fixture(scope="session")
def make_llama() -> MakeModel:
    """``make_llama(folder, *, dtype="bfloat16", seed=0, **config)``."""
    return functools.partial(_make, model_type="llama")


@pytest.fixture(scope="session")
def make_qwen3() -> MakeModel:
    """As `make_llama`, with query and key norms."""
    return functools.partial(_make, model_type="qwen3")


@pytest.fixture(scope="session")
def make_mixtral() -> MakeModel:
    """As `make_llama`; experts are one tensor each on disk, under other names than in the model."""
    return functools.partial(_make, model_type="mixtral")


@pytest.fixture(scope="session")
def make_qwen3_moe() -> MakeModel:
    """As `make_llama`; experts are one tensor each on disk."""
    return functools.partial(_make, model_type="qwen3_moe")


@pytest.fixture(scope="session")
def make_gpt_oss() -> MakeModel:
    """As `make_llama`; experts are fused and transposed on disk and in the model."""
    return functools.partial(_make, model_type="gpt_oss")


@pytest.fixture(scope="session")
def llama_folder(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in BF16 that tests share: do not write into it."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama")
