"""The bytes of KV caches: of our engine, of sliding windows, of latent attention and of layers without attention."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_configs import LLAMA_70B

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.estimate.shape import (
    ENGINE_BLOCK,
    CacheLayer,
    ModelShape,
    attention_operations,
    cache_bytes,
    model_shape,
    prefill_operations,
    state_bytes,
)
from minifloat.errors import ConfigError
from minifloat.kernels.decoder import BLOCK_TOKENS, KVCache
from minifloat.numerics.formats import BFLOAT16, E4M3, ElementFormat

STORYBOOK = Path(__file__).parents[3] / "examples" / "storybook-4m"


def shape_of(**changes: object) -> ModelShape:
    return model_shape({**LLAMA_70B, **changes}, Path())


@pytest.mark.parametrize(("element", "name"), [(BFLOAT16, "bfloat16"), (E4M3, "E4M3")])
def test_cache_bytes_equal_those_of_the_engine(element: ElementFormat, name: str) -> None:
    with Checkpoint.open(STORYBOOK) as checkpoint:
        shape = model_shape(checkpoint.config, checkpoint.path)
    assert ENGINE_BLOCK == BLOCK_TOKENS
    engine = KVCache.bytes_per_block([(4, 32)] * 4, name)
    assert cache_bytes(shape.cache, 1, element) * BLOCK_TOKENS == engine
    assert cache_bytes(shape.cache, 100 * BLOCK_TOKENS, element) == 100 * engine


def test_a_70b_llama_takes_320_kib_per_token() -> None:
    assert cache_bytes(shape_of().cache, 1, BFLOAT16) == 2 * 80 * 8 * 128 * 2 == 320 << 10
    assert cache_bytes(shape_of().cache, 1, E4M3) == 160 << 10


@pytest.mark.parametrize(("gpus", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_key_value_heads_are_divided_and_then_copied(gpus: int, heads: int) -> None:
    assert cache_bytes(shape_of().cache, 10, BFLOAT16, gpus) == 2 * 80 * heads * 128 * 2 * 10


def test_a_sliding_window_limits_bytes_and_operations_of_its_layers() -> None:
    kinds = ["sliding_attention", "full_attention"] * 40
    layers = shape_of(layer_types=kinds, sliding_window=100).cache
    assert cache_bytes(layers, 1000, E4M3) == 2 * 8 * 128 * 40 * (100 + 1000)
    assert attention_operations(layers, 1000) == 4 * 64 * 128 * 40 * (100 + 1000)
    by_hand = sum(min(token, 100) + token for token in range(1, 1001))
    assert prefill_operations(layers, 1000) == 4 * 64 * 128 * 40 * by_hand


@pytest.mark.parametrize(
    ("changes", "sliding"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 80),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False, "max_window_layers": 20}, 0),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 20}, 60),
        ({"model_type": "gemma2", "sliding_window": 64, "num_hidden_layers": 6}, 3),
        ({"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 12}, 10),
    ],
)
def test_sliding_layers_follow_the_fields_of_each_architecture(changes: dict[str, object], sliding: int) -> None:
    assert [layer.window for layer in shape_of(**changes).cache].count(64) == sliding


def test_layers_of_linear_attention_need_no_cache() -> None:
    layers = shape_of(layer_types=["linear_attention"] * 60 + ["full_attention"] * 20).cache
    assert cache_bytes(layers, 10, E4M3) == 2 * 20 * 8 * 128 * 10


def test_a_state_does_not_grow_with_the_context_and_is_divided_among_devices() -> None:
    layers = (CacheLayer(8, 256, 0), CacheLayer(0, 0, 0, 0, state=1000, state_operations=5000))
    assert cache_bytes(layers, 10, BFLOAT16) == 2 * 8 * 256 * 10
    assert (state_bytes(layers), state_bytes(layers, 8)) == (1000, 125)
    assert attention_operations(layers, 10) == 5000
    assert prefill_operations(layers, 10) == 50000


def test_the_latent_cache_is_copied_to_every_device() -> None:
    layers = shape_of(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128).cache
    assert cache_bytes(layers, 10, BFLOAT16) == cache_bytes(layers, 10, BFLOAT16, 8) == 80 * (512 + 64) * 2 * 10
    assert attention_operations(layers, 10) == 80 * 2 * 64 * (512 + 64 + 512) * 10


def test_missing_or_invalid_sizes_are_errors_that_name_the_field() -> None:
    bad = {"num_attention_heads": None, "hidden_size": "wide", "vocab_size": -1, "num_hidden_layers": 10**9}
    for name, value in bad.items():
        with pytest.raises(ConfigError, match=name):
            shape_of(**{name: value})
