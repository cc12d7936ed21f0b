"""What a server with an FP8 KV cache computes, by transformers' own code: keys and values are rounded as they come in.

Such a server writes each key and value once, as an E4M3 code of ``x / scale``, and attends to ``code * scale``. So a
cache that rounds what it is given, and is otherwise transformers' own, gives that server's attention: in a pass over a
whole window, where a query sees the rounded key of its own token too, and step by step in generation.

Left out: caches that hold something else than keys and values as attention sees them (multi-head latent attention,
compressed layers), which are refused, and the server's arithmetic after the cache: ``code * scale`` is rounded to the
model's dtype here, which a power of two as scale passes exactly.

Source: vLLM, `csrc/cache_kernels.cu` and `BaseKVCacheMethod`.
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
from minifloat.numerics.cast import torch_dtype
from minifloat.numerics.formats import E4M3
from minifloat.runtime.kv_scales import KVScales

_LOG = logging.getLogger(__name__)

#: Makes the empty cache of one batch.
CacheFactory = Callable[[], Any]

#: What a layer without scales has, in servers too.
_NO_SCALES = (1.0, 1.0)
_NUMBER = re.compile(r"\.(\d+)(?=\.)")
#: Layers that hand back the keys and values that they are given, behind those of before.
_KEEPING = (DynamicLayer.update, DynamicSlidingWindowLayer.update)


def kv_cache_factory(model: PreTrainedModel, scales: KVScales) -> CacheFactory:
    """What makes caches for a model: one for each batch, passed as `past_key_values` with ``use_cache=True``.

    Args:
        model: The one that the caches are for.
        scales: From `kv_scales`.

    Returns:
        A function without arguments that makes an empty `SimulatedKVCache`.

    Raises:
        UsageError: The model takes no cache, or one that is not made of keys and values, or a scale is of a layer that
            it does not have.
    """
    name, runner = type(model).__name__, cast(Any, model)
    check_takes_cache(model)
    config = runner.config.get_text_config(decoder=True)
    if not runner._supports_default_dynamic_cache():
        raise UsageError(f"an FP8 KV cache cannot be simulated for {name}: it has a cache of its own kind")
    if getattr(config, "kv_lora_rank", None):
        raise UsageError(
            f"an FP8 KV cache cannot be simulated for {name}: servers hold its latent vectors, transformers the keys "
            "and values made of them"
        )
    attentions = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        update = getattr(type(layer), "update", None)
        if isinstance(layer, DynamicLayer) and update not in _KEEPING:
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
            "%d of %d attention layers have no k_scale and v_scale: 1.0 is taken, as servers do",
            len(missing),
            len(attentions),
        )
    return lambda: SimulatedKVCache(config, by_layer)


def check_takes_cache(model: PreTrainedModel) -> None:
    """See that a model can be run step by step with a cache that it is given.

    Raises:
        UsageError: It cannot.
    """
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise UsageError(f"{type(model).__name__} takes no KV cache: it can be neither simulated nor generated with")


class SimulatedKVCache(DynamicCache):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """transformers' own cache, but what enters it is rounded to E4M3.

    Args:
        config: Of the model's decoder: it says which layers have sliding windows or recurrent states.
        scales: (k_scale, v_scale) by layer; 1.0 for others.
    """

    def __init__(self, config: Any, scales: Mapping[int, tuple[float, float]]) -> None:
        super().__init__(config=config)
        self._scales = scales

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values ``[B, kv_heads, T, head_dim]``; what comes back is rounded, the new ones too."""
        k_scale, v_scale = self._scales.get(layer_idx, _NO_SCALES)
        keys, values = round_to_cache(key_states, k_scale), round_to_cache(value_states, v_scale)
        updated: tuple[Tensor, Tensor] = super().update(keys, values, layer_idx, *args, **kwargs)
        return updated


def round_to_cache(x: Tensor, scale: float) -> Tensor:
    """Round as through an E4M3 cache: ``x / scale`` clamped, to nearest with ties to even, times scale.

    Args:
        x: Any shape; float32, bfloat16 or float16.
        scale: float32, positive.

    Returns:
        The shape and dtype of `x`. Inf is clamped, NaN stays.
    """
    # By a tensor: torch multiplies by the reciprocal of a number on some devices.
    divisor = torch.tensor(scale, dtype=torch.float32, device=x.device)
    codes = (x.float() / divisor).clamp(-E4M3.max, E4M3.max).to(torch_dtype(E4M3))
    return (codes.float() * divisor).to(x.dtype)


def _by_layer(scales: KVScales, layers: int) -> dict[int, tuple[float, float]]:
    """By the number in the name of the attention module."""
    numbered: dict[int, tuple[float, float]] = {}
    for name, pair in scales.items():
        numbers = [int(number) for number in _NUMBER.findall(f".{name}.")]
        if len(numbers) != 1 or not numbers[0] < layers or numbers[0] in numbered:
            raise UsageError(f"{name} has scales of a KV cache, but is none of the model's {layers} layers, once each")
        numbered[numbers[0]] = pair
    return numbered
