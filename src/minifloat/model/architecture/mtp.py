"""Layers of multi-token prediction (MTP), which draft tokens for speculative decoding.

A checkpoint holds them beside the decoder: as layers after the last one of the decoder (DeepSeek-V3, GLM-4.5), or under
a name of their own (Qwen3-Next, MiMo, ERNIE). transformers builds none of them, so no text runs through them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minifloat.model.architecture.roles import text_config

#: Names that hold these layers: ``mtp.layers.0.``, ``model.mtp_layers.0.``, ``model.mtp_block.0.``
_NAMED = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?\.")
#: A layer of the decoder, below the names that outer models put before it; towers have other names.
_LAYER = re.compile(r"^((model|language_model|llm|thinker|transformer)\.)*layers\.(?P<index>\d+)\.")
#: Parts that only these layers have: the norms of embedding and hidden state, and the projection of both.
_OWN_PARTS = re.compile(r"\.(enorm|hnorm|eh_proj)\.")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")


def is_mtp(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor or module belongs to a layer of multi-token prediction."""
    if _NAMED.search(name):
        return True
    layers = text_config(config).get("num_hidden_layers")
    match = _LAYER.match(name)
    return match is not None and isinstance(layers, int) and int(match["index"]) >= layers


def mtp_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers of multi-token prediction that a config declares."""
    text = text_config(config)
    return next((count for key in _COUNTS if isinstance(count := text.get(key), int) and count > 0), 0)


def decoder_layer(name: str) -> int | None:
    """Return the index of the decoder layer that a tensor belongs to; None for all other tensors."""
    match = _LAYER.match(name)
    return None if match is None else int(match["index"])


def is_own_part(name: str) -> bool:
    """Return whether only layers of multi-token prediction have a tensor of this name."""
    return _OWN_PARTS.search(name) is not None
