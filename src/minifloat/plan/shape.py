"""`ModelShape`: a model's sizes from its config, which the arithmetic of caches, activations and experts needs.

The shapes of weights come from the headers, or from `plan.config_tensors` if there are no weights. The config adds
heads, windows, and the number of experts that a token visits. A missing field without a convention is an error, never a
guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.architecture.roles import text_config
from minifloat.checkpoint import CONFIG_FILE
from minifloat.errors import ConfigError
from minifloat.plan.cache import CacheLayer

#: Names of the field with the number of routed experts of a layer.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Largest number of layers, so that a damaged config cannot exhaust memory.
_MOST_LAYERS = 1 << 14
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k")
#: Architectures whose `sliding_window` applies to every layer, unless `layer_types` says otherwise.
_ALL_SLIDE = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
#: Architecture -> n: every n-th layer has full attention, if the config has no `sliding_window_pattern`.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder.

    Attributes:
        hidden: Width of the residual stream.
        heads: Number of query heads.
        query_dim: Width of a head of queries and keys.
        inner: Inner width of the MLP; of a mixture, the sum over the experts that a token visits.
        vocab: Number of tokens in the vocabulary.
        positions: Tokens of the longest sequence; None: the config does not say.
        experts: Number of routed experts of a layer; 0: the model is no mixture.
        experts_per_token: Number of routed experts that a token visits.
        cache: The KV cache of each layer.
    """

    hidden: int
    heads: int
    query_dim: int
    inner: int
    vocab: int
    positions: int | None
    experts: int
    experts_per_token: int
    cache: tuple[CacheLayer, ...]

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; 0 if no layer has key-value heads (latent or no attention)."""
        return max((layer.heads for layer in self.cache), default=0)


class Fields:
    """The language model's part of a config, with errors that name the file and the field.

    Args:
        config: The whole config.
        folder: The folder of the config.
    """

    def __init__(self, config: Mapping[str, Any], folder: Path) -> None:
        self._config = text_config(config)
        self._path = folder / CONFIG_FILE

    def get(self, name: str) -> Any:
        """Return a field, or None if it is missing."""
        return self._config.get(name)

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the config file."""
        return ConfigError(self._path, problem)

    def size(self, *names: str) -> int:
        """Return the first of these fields that the config has.

        Raises:
            ConfigError: All are missing, or the field is no positive integer.
        """
        size = self.optional(*names)
        if size is None:
            raise self.error(f"{names[0]} is missing: the sizes of this architecture are unknown")
        return size

    def optional(self, *names: str) -> int | None:
        """Return the first of these fields that the config has, or None.

        Raises:
            ConfigError: The field is no positive integer.
        """
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if type(value) is not int or value < 1:
                raise self.error(f"{name}: expected a positive integer, found {value!r}")
            return value
        return None


def model_shape(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """Return the sizes of a model.

    Raises:
        ConfigError: A field is missing or is no size.
    """
    fields = Fields(config, folder)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    experts = fields.optional(*EXPERTS) or 0
    experts_per_token = min(fields.size(*_EXPERTS_PER_TOKEN), experts) if experts else 0
    dense = fields.optional("intermediate_size") or 0
    routed = (fields.optional("moe_intermediate_size") or dense) * experts_per_token
    head_dim = head_size(fields)
    latent = fields.optional("kv_lora_rank")
    if latent is None:
        kv_heads = fields.optional("num_key_value_heads") or heads
        layer = CacheLayer(kv_heads, 2 * head_dim, 2 * heads * 2 * head_dim)
    else:
        rope = fields.size("qk_rope_head_dim")
        layer = CacheLayer(0, latent + rope, 2 * heads * (latent + rope + latent))
    return ModelShape(
        hidden,
        heads,
        head_dim,
        max(dense, routed),
        fields.size("vocab_size"),
        fields.optional("max_position_embeddings"),
        experts,
        experts_per_token,
        tuple(layer.with_window(window) for window in _windows(fields)),
    )


def head_size(fields: Fields) -> int:
    """Return the width of a head of queries and keys."""
    nope, rope = fields.optional("qk_nope_head_dim"), fields.optional("qk_rope_head_dim")
    if fields.optional("kv_lora_rank") and nope and rope:
        return nope + rope
    return fields.optional("head_dim") or fields.size("hidden_size") // fields.size("num_attention_heads")


def _windows(fields: Fields) -> list[int | None]:
    """Return the window of each layer in tokens: None for all tokens, 0 for a layer without a cache."""
    layers = fields.size("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.error(f"num_hidden_layers: expected at most {_MOST_LAYERS}, found {layers}")
    window = fields.optional("sliding_window")
    kinds = fields.get("layer_types")
    if isinstance(kinds, Sequence) and len(kinds) == layers:
        chunk = fields.optional("attention_chunk_size")
        windows = {"sliding_attention": window, "chunked_attention": chunk, "linear_attention": 0, "mamba": 0}
        return [windows.get(str(kind)) for kind in kinds]
    if window is None or fields.get("use_sliding_window") is False:
        return [None] * layers
    model_type = str(fields.get("model_type"))
    if model_type in _ALL_SLIDE:
        return [window] * layers
    pattern = fields.optional("sliding_window_pattern") or _PATTERNS.get(model_type)
    if pattern is not None:
        return [None if (layer + 1) % pattern == 0 else window for layer in range(layers)]
    first = fields.optional("max_window_layers")
    if fields.get("use_sliding_window") and first is not None:
        return [window if layer >= first else None for layer in range(layers)]
    return [None] * layers
