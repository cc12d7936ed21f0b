"""The option --full, and tiny models with random weights, made on the spot: no network, no files from elsewhere."""

from __future__ import annotations

import functools
import gc
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from covering import covering_pairs
from modes import FULL_VARIABLE, is_full

os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Parameters whose values are instruction sets of this machine.
_ISA_PARAMETERS = ("kernels", "isa")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        default=is_full(),
        help="run every case: those marked `full`, and the kernels' whole matrices on every instruction set",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("full"):
        os.environ[FULL_VARIABLE] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only --full runs, unless the command line names single tests (``file.py::test``)."""
    if config.getoption("full") or any("::" in argument for argument in config.args):
        return
    left_out = _beside_covering_pairs(items) | {item for item in items if item.get_closest_marker("full")}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _beside_covering_pairs(items: list[pytest.Item]) -> set[pytest.Item]:
    """The cases of instruction sets between the best and the portable one that covering pairs do without."""
    cases_by_test: dict[str, list[tuple[pytest.Item, dict[str, int]]]] = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        name = next((name for name in _ISA_PARAMETERS if callspec and name in callspec.params), None)
        if callspec and name and callspec.params[name] in _middle_isas():
            # Values need not be hashable: all cases of a test share them, so that their identity serves.
            values = {name: id(value) for name, value in callspec.params.items()}
            cases_by_test[item.nodeid.partition("[")[0]].append((item, values))
    left_out: set[pytest.Item] = set()
    for cases in cases_by_test.values():
        kept = set(covering_pairs([case for _, case in cases]))
        left_out.update(item for index, (item, _) in enumerate(cases) if index not in kept)
    return left_out


@functools.cache
def _middle_isas() -> tuple[str, ...]:
    from minifloat.kernels import native

    library = native.load()
    return () if library is None else library.isas[1:-1]


def pytest_collection_finish() -> None:
    """Keep the thousands of collected tests out of every later garbage collection."""
    gc.collect()
    gc.freeze()


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
def make_gpt_oss() -> MakeModel:
    """As `make_llama`; experts are fused and transposed on disk and in the model."""
    return functools.partial(_make, model_type="gpt_oss")


@pytest.fixture(scope="session")
def llama_folder(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in BF16 that tests share: do not write into it."""
    return make_llama(tmp_path_factory.mktemp("models") / "llama")


def _quantized(scheme: str) -> Any:
    """Return a fixture: `llama_folder` in a scheme; do not write into it."""

    @pytest.fixture(scope="session", name=f"{scheme.replace('-', '_')}_folder")
    def folder(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
        from minifloat.quantize.job import quantize_checkpoint

        made = tmp_path_factory.mktemp("quantized") / f"llama-{scheme}"
        quantize_checkpoint(llama_folder, made, scheme)
        return made

    return folder


mxfp4_folder, fp8_folder, fp8_dynamic_folder = map(_quantized, ("mxfp4", "fp8", "fp8-dynamic"))
