"""`ModelShape`: a model's sizes from its config, which the arithmetic of caches, activations and experts needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.checkpoint import CONFIG_FILE
from minifloat.deploy.estimate.cache import CacheLayer
from minifloat.errors import ConfigError
from minifloat.model.architecture.roles import EXPERTS, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Model types whose caches follow from the fields of config.json alone, without transformers.
KNOWN_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "granite"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
)
#: Fields that such a config.json must have; the class of the model type has defaults for those that are missing.
_EXPLICIT = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
#: Largest number of layers, so that a damaged config cannot exhaust memory.
_MOST_LAYERS = 1 << 14
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "top_k")
#: Values of `layer_types` of layers without keys and values.
_STATES = ("linear_attention", "mamba", "conv")
_WITHOUT_KEYS = (*_STATES, "moe", "mlp")
#: Architectures whose `sliding_window` applies to every layer, unless `layer_types` says otherwise.
_ALL_SLIDE = frozenset({"mistral", "mixtral", "phi3"})


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    hidden: int
    heads: int
    query_dim: int
    inner: int
    vocab: int
    positions: int | None  # tokens of the longest sequence; None: the config does not say
    experts: int
    experts_per_token: int
    cache: tuple[CacheLayer, ...]
    notes: tuple[str, ...] = ()

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; 0 if no layer has key-value heads (latent or no attention)."""
        return max((layer.heads for layer in self.cache), default=0)


class Fields:
    """The language model's part of a config, with errors that name the file and the field."""

    def __init__(self, config: Mapping[str, Any] | PreTrainedConfig, folder: Path) -> None:
        self._config = config
        if not isinstance(config, Mapping):  # fields that vary by layer have a value for most layers
            config.allow_global_per_layer_attribute_access = True
        self._path = folder / CONFIG_FILE

    def get(self, name: str) -> Any:
        """Return a field, or None if it is missing."""
        if isinstance(self._config, Mapping):
            return self._config.get(name)
        return getattr(self._config, name, None)

    def error(self, problem: str) -> ConfigError:
        """Return an error that names the config file."""
        return ConfigError(self._path, problem)

    def size(self, *names: str) -> int:
        """Return the first of these fields that the config has."""
        size = self.optional(*names)
        if size is None:
            raise self.error(f"{names[0]} is missing: the sizes of this architecture are unknown")
        return size

    def optional(self, *names: str) -> int | None:
        """Return the first of these fields that the config has, or None."""
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if not isinstance(self._config, Mapping) and (type(value) is not int or value < 1):
                continue  # a list of sizes, one per layer, or the class's word for "none"
            if type(value) is not int or value < 1:
                raise self.error(f"{name}: expected a positive integer, found {value!r}")
            return value
        return None


def is_known(config: Mapping[str, Any]) -> bool:
    """Return whether config.json alone tells the caches: a type of `KNOWN_TYPES`, no field left out."""
    text = text_config(config)
    return text.get("model_type") in KNOWN_TYPES and all(text.get(field) is not None for field in _EXPLICIT)


def model_shape(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """Return the sizes of a model."""
    if is_known(config):
        fields = Fields(text_config(config), folder)
        return _shape(fields, _conventional_caches(fields), ())
    from minifloat.model.architecture.full_config import quiet_transformers

    with quiet_transformers():
        return _shape_by_transformers(config, folder)


def _shape_by_transformers(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """Return the sizes of a model that config.json alone does not tell."""
    from minifloat.deploy.estimate.meta_model import meta_caches
    from minifloat.model.architecture.full_config import full_config, is_in_transformers

    if not is_in_transformers(config):
        model_type = text_config(config).get("model_type")
        return _shape_by_convention(Fields(text_config(config), folder), f"transformers does not have {model_type!r}")
    text = full_config(config, folder).get_text_config(decoder=True)
    fields = Fields(text, folder)
    if fields.optional("num_hidden_layers") is not None:
        _number_of_layers(fields)
    try:
        caches, note = meta_caches(text, fields.optional("num_attention_heads") or 0, folder)
    except ConfigError as error:
        return _shape_by_convention(fields, error.problem)
    return _shape(fields, caches, (note,) if note else ())


def _shape_by_convention(fields: Fields, reason: str) -> ModelShape:
    """Return the sizes of a model whose caches are unknown, with a note that names the reason."""
    caches = _conventional_caches(fields)
    counted = "is counted by the usual meaning of the config's fields" if caches else "is not counted"
    notes = [f"The KV cache {counted}: {reason.rstrip('.!')}."]
    if {str(kind) for kind in fields.get("layer_types") or ()} & set(_STATES):
        notes.append("The state of layers without keys and values (linear attention, Mamba) is not counted.")
    return _shape(fields, caches, tuple(notes))


def _shape(fields: Fields, caches: tuple[CacheLayer, ...], notes: tuple[str, ...]) -> ModelShape:
    """Return the shape with the sizes that a config has; 0 for those that it lacks, with a note."""
    experts = fields.optional(*EXPERTS) or 0
    visited = fields.optional(*_EXPERTS_PER_TOKEN)
    if experts and visited is None:
        notes = (*notes, "The config does not tell how many experts a token visits: a token is counted to visit all.")
    experts_per_token = min(visited or experts, experts)
    dense = fields.optional("intermediate_size") or 0
    routed = (fields.optional("moe_intermediate_size") or dense) * experts_per_token
    sizes = {name: fields.optional(name) for name in ("hidden_size", "num_attention_heads", "vocab_size")}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        notes = (*notes, f"The config does not tell {', '.join(missing)}: activations are counted without them.")
    return ModelShape(
        sizes["hidden_size"] or 0,
        sizes["num_attention_heads"] or 0,
        head_size(fields) or 0,
        max(dense, routed),
        sizes["vocab_size"] or 0,
        fields.optional("max_position_embeddings"),
        experts,
        experts_per_token,
        caches,
        notes,
    )


def _conventional_caches(fields: Fields) -> tuple[CacheLayer, ...]:
    """Return the caches by the usual meaning of the fields of a config; none if it does not tell layers and heads."""
    heads, head_dim = fields.optional("num_attention_heads"), head_size(fields)
    if heads is None or head_dim is None or fields.optional("num_hidden_layers") is None:
        return ()
    latent = fields.optional("kv_lora_rank")
    if latent is None:
        kv_heads = fields.optional("num_key_value_heads") or heads
        layer = CacheLayer(kv_heads, 2 * head_dim, 2 * heads * 2 * head_dim)
    else:
        rope = fields.optional("qk_rope_head_dim") or 0
        layer = CacheLayer(0, latent + rope, 2 * heads * (latent + rope + latent))
    windows = _windows(fields)
    shared = fields.optional("num_kv_shared_layers") or 0  # the last layers read the keys and values of earlier ones
    own = len(windows) - min(shared, len(windows))
    return tuple(layer.with_window(window) for window in [*windows[:own], *[0] * (len(windows) - own)])


def head_size(fields: Fields) -> int | None:
    """Return the width of a head of queries and keys; None if the config does not tell."""
    nope, rope = fields.optional("qk_nope_head_dim"), fields.optional("qk_rope_head_dim")
    if fields.optional("kv_lora_rank") and nope and rope:
        return nope + rope
    hidden, heads = fields.optional("hidden_size"), fields.optional("num_attention_heads")
    return fields.optional("head_dim") or (hidden // heads if hidden and heads else None)


def _number_of_layers(fields: Fields) -> int:
    """Return the number of layers."""
    layers = fields.size("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise fields.error(f"num_hidden_layers: expected at most {_MOST_LAYERS}, found {layers}")
    return layers


def _windows(fields: Fields) -> list[int | None]:
    """Return the window of each layer in tokens: None for all tokens, 0 for a layer without a cache."""
    layers = _number_of_layers(fields)
    window = fields.optional("sliding_window") if fields.get("sliding_window") else None
    kinds = fields.get("layer_types")
    if isinstance(kinds, Sequence) and len(kinds) == layers:
        chunk = fields.optional("attention_chunk_size")
        windows = {"sliding_attention": window, "chunked_attention": chunk, **dict.fromkeys(_WITHOUT_KEYS, 0)}
        return [windows.get(str(kind)) for kind in kinds]
    if window is None or fields.get("use_sliding_window") is False:
        return [None] * layers
    model_type = str(fields.get("model_type"))
    if model_type in _ALL_SLIDE:
        return [window] * layers
    first = fields.optional("max_window_layers")
    if fields.get("use_sliding_window") and first is not None:
        return [window if layer >= first else None for layer in range(layers)]
    return [None] * layers
