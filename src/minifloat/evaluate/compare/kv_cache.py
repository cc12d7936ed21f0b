"""A simulated FP8 KV cache: transformers' own cache that rounds keys and values as they enter it.

A server with such a cache writes each key and value as an E4M3 code of ``x / scale`` and attends to ``code * scale``
(vLLM: `csrc/cache_kernels.cu`, `BaseKVCacheMethod`). Here ``code * scale`` is rounded to the model's dtype, which is
exact if the scale is a power of two. Caches that hold something other than keys and values are refused.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from minifloat.errors import UsageError
from minifloat.model.runtime.kv_scales import KVScales
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.formats import E4M3

_LOG = logging.getLogger(__name__)

#: Function without arguments that returns an empty cache for one batch.
CacheFactory = Callable[[], Any]

#: (k_scale, v_scale) of a layer for which the checkpoint has no scales; servers use the same.
_NO_SCALES = (1.0, 1.0)
_NUMBER = re.compile(r"\.(\d+)(?=\.)")
#: `update` methods that append the new keys and values to the earlier ones and return all of them.
_APPENDING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)


def kv_cache_factory(model: PreTrainedModel, scales: KVScales) -> CacheFactory:
    """Return a function that makes simulated FP8 KV caches for a model."""
    name, runner = type(model).__name__, cast(Any, model)
    check_takes_cache(model)
    config = runner.config.get_text_config(decoder=True)
    if not runner._supports_default_dynamic_cache():
        raise UsageError(f"an FP8 KV cache cannot be simulated for {name}: it has a cache of its own kind")
    if getattr(config, "kv_lora_rank", None):
        raise UsageError(
            f"an FP8 KV cache cannot be simulated for {name}: servers hold its latent vectors, transformers holds the "
            "keys and values computed from them"
        )
    attentions = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        update = getattr(type(layer), "update", None)
        if isinstance(layer, DynamicLayer) and update not in _APPENDING:
            raise UsageError(
                f"an FP8 KV cache cannot be simulated for {name}: layer {index} holds its keys and values in a "
                f"{type(layer).__name__}"
            )
        if isinstance(layer, DynamicLayer):
            attentions.append(index)
    by_layer = _by_layer(scales, config.num_hidden_layers)
    missing = [index for index in attentions if index not in by_layer]
    if missing:
        _LOG.warning(
            "%d of %d attention layers have no k_scale and v_scale: 1.0 is used, as in servers",
            len(missing),
            len(attentions),
        )
    return lambda: SimulatedKVCache(config, by_layer)


def check_takes_cache(model: PreTrainedModel) -> None:
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UsageError(f"{type(model).__name__} takes no KV cache, so an FP8 cache and generation are impossible")


class SimulatedKVCache(DynamicCache):  # type: ignore[misc, no-any-unimported, unused-ignore]
    def __init__(self, config: Any, scales: Mapping[int, tuple[float, float]]) -> None:
        super().__init__(config=config)
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, kv_heads, T, head_dim]``, and return all of the layer's, rounded."""
        k_scale, v_scale = self._scales.get(layer_idx, _NO_SCALES)
        keys, values = round_to_cache(key_states, k_scale), round_to_cache(value_states, v_scale)
        updated: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return updated


def round_to_cache(x: Tensor, scale: float) -> Tensor:
    """Round values as an E4M3 cache does: divide by the scale, clamp, round to nearest even, multiply by the scale."""
    # The divisor is a tensor because torch, on some devices, multiplies by the reciprocal of a Python number.
    divisor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    codes = (x.float() / divisor).clamp(-E4M3.max, E4M3.max).to(torch_dtype(E4M3))
    return (codes.float() * divisor).to(x.dtype)


def _by_layer(scales: KVScales, layers: int) -> dict[int, tuple[float, float]]:
    """Return the scales by number of the layer, which the name of the attention module contains."""
    numbered: dict[int, tuple[float, float]] = {}
    for name, pair in scales.items():
        numbers = [int(number) for number in _NUMBER.findall(f".{name}.")]
        if len(numbers) != 1 or not numbers[0] < layers or numbers[0] in numbered:
            raise UsageError(f"{name} has scales of a KV cache, but is none of the model's {layers} layers, once each")
        numbered[numbers[0]] = pair
    return numbered
