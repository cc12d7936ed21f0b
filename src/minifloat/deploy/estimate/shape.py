"""`ModelShape`: a model's sizes from its config, which the arithmetic of caches, activations and experts needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.checkpoint import CONFIG_FILE
from minifloat.errors import ConfigError
from minifloat.model.architecture.roles import EXPERTS, EXPERTS_PER_TOKEN, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from minifloat.checkpoint import OutputTensor
from minifloat.model.architecture.full_config import quiet_transformers
from minifloat.numerics.formats import ElementFormat

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Tokens of a block of our engine's cache (`kernels.decoder.BLOCK_TOKENS`, without its imports).
ENGINE_BLOCK = 16
#: Least operations per token and element of a recurrent state: one multiplication by the decay, one multiplication and
#: addition to update the element, and one to read it. The delta rule reads it a second time.
STATE_OPERATIONS = 5


@dataclass(frozen=True)
class CacheLayer:
    """The KV cache of one layer."""

    heads: int
    width: int
    operations: int
    window: int | None = None  # number of tokens that are kept; None: all, 0: none
    state: int = 0
    state_operations: int = 0

    def with_window(self, window: int | None) -> CacheLayer:
        return replace(self, heads=0, width=0, operations=0) if window == 0 else replace(self, window=window)

    def cached_tokens(self, tokens: int) -> int:
        """Return the number of tokens of a sequence of `tokens` that stay in the cache."""
        return tokens if self.window is None else min(tokens, self.window)

    def elements(self, gpus: int) -> int:
        """Return the elements of a token on one device; heads are copied where there are fewer heads than devices."""
        return self.width * (-(-self.heads // gpus) if self.heads else 1)


def cache_bytes(layers: Sequence[CacheLayer], tokens: int, element: ElementFormat, gpus: int = 1) -> int:
    """Return the bytes of the keys and values of one sequence on one of `gpus` devices."""
    return sum(layer.cached_tokens(tokens) * layer.elements(gpus) for layer in layers) * element.bits // 8


def state_bytes(layers: Sequence[CacheLayer], gpus: int = 1) -> int:
    """Return the bytes of the states of one sequence on one of `gpus` devices."""
    return sum(-(-layer.state // gpus) for layer in layers)


def attention_operations(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Return the operations of attention for one new token, the last of `tokens`."""
    return sum(layer.cached_tokens(tokens) * layer.operations + layer.state_operations for layer in layers)


def prefill_operations(layers: Sequence[CacheLayer], tokens: int) -> int:
    """Return the operations of attention for a prompt, in which each token attends to itself and earlier tokens."""
    total = 0
    for layer in layers:
        cached = layer.cached_tokens(tokens)
        total += layer.operations * (cached * (cached + 1) // 2 + (tokens - cached) * cached)
        total += layer.state_operations * tokens
    return total


#: Model types whose caches follow from the fields of config.json alone, without transformers.
KNOWN_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "granite"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"),
)
#: Fields that such a config.json must have; the class of the model type has defaults for those that are missing.
_EXPLICIT = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
#: Largest number of layers, so that a damaged config cannot exhaust memory.
_MOST_LAYERS = 1 << 14
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
    if is_known(config):
        fields = Fields(text_config(config), folder)
        return _shape(fields, _conventional_caches(fields), ())
    from minifloat.model.architecture.full_config import quiet_transformers

    with quiet_transformers():
        return _shape_by_transformers(config, folder)


def _shape_by_transformers(config: Mapping[str, Any], folder: Path) -> ModelShape:
    """Return the sizes of a model that config.json alone does not tell."""
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
    visited = fields.optional(*EXPERTS_PER_TOKEN)
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


#: Tokens of the pass that fills the caches.
_TOKENS = 2
#: Attributes of a layer of transformers' cache that hold its state, as a tensor or as tensors by number.
_STATE_FIELDS = ("conv_states", "recurrent_states")
_RECURRENT = "recurrent_states"
_CACHE_MODULE = "transformers.cache_utils"
_LONGEST_REASON = 200  # characters
_KEYS_DIMENSIONS = 4  # [batch, heads, tokens, width]


def meta_tensors(config: PreTrainedConfig, dtype: str, folder: Path) -> tuple[tuple[OutputTensor, ...], str]:
    """Return the tensors of the checkpoint that transformers saves for a config."""
    from transformers.core_model_loading import revert_weight_conversion

    note = ""
    try:
        model = _build(config, dtype, folder)
    except ConfigError as error:
        text = config.get_text_config(decoder=True)
        if text is config or not isinstance(error.__cause__, ImportError):
            raise
        missing = " ".join(str(error.__cause__).split())
        note = f"Towers are not counted, because a library for them is missing: {missing}"
        model = _build(text, dtype, folder, text_only=True)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    strict = [re.compile(rf"(^|\.){name}(\.|$)") for name in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    state = {
        name: tensor.float() if any(pattern.search(name) for pattern in strict) else tensor
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    saved = revert_weight_conversion(model, state)
    tensors = (OutputTensor(name, _dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in saved.items())
    return tuple(tensors), note


def meta_caches(config: PreTrainedConfig, heads: int, folder: Path) -> tuple[tuple[CacheLayer, ...], str]:
    """Return the cache of every layer that keeps one, as a pass of transformers' code fills it."""
    import torch

    model = _build(config, "bfloat16", folder, text_only=True)
    model.eval()
    try:
        with torch.no_grad(), torch.device("meta"), quiet_transformers():
            output = model(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long), use_cache=True)
    except Exception as error:  # whatever modelling code makes of tensors without values
        raise ConfigError(folder / CONFIG_FILE, f"a pass without weights fails: {_first_line(error)}") from error
    cache = getattr(output, "past_key_values", None)
    if cache is None:
        cache = getattr(output, "cache_params", None)
    stored = getattr(cache, "layers", None)
    if stored is None:
        kind = "fills no KV cache" if cache is None else f"keeps a {type(cache).__name__} of its own"
        return (), f"The model {kind} in transformers: no KV cache and no state is counted."
    own = {type(layer).__name__ for layer in stored if type(layer).__module__ != _CACHE_MODULE}
    note = f"Caches of {', '.join(sorted(own))} are counted as keys and values of every token." if own else ""
    return tuple(_layer(layer, config, heads) for layer in stored), note


def _build(config: PreTrainedConfig, dtype: str, folder: Path, *, text_only: bool = False) -> Any:
    """Return the model of a config on the meta device."""
    import torch
    import transformers

    autos: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModel]
    if not text_only:
        composite = config.get_text_config(decoder=True) is not config
        autos.insert(0 if composite else 1, transformers.AutoModelForImageTextToText)
    builders = [] if text_only else [*_named(config)]
    builders += [auto.from_config for auto in autos if type(config) in auto._model_mapping]
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"
    failures: list[Exception] = []
    for build in builders:
        try:
            with torch.device("meta"), quiet_transformers():
                return build(config, dtype=getattr(torch, dtype))
        except Exception as error:  # whatever a model's constructor makes of numbers that do not fit
            failures.append(error)
    if not failures:
        raise ConfigError(folder / CONFIG_FILE, f"transformers has no language model of a {type(config).__name__}")
    raise ConfigError(
        folder / CONFIG_FILE,
        f"transformers {transformers.__version__} cannot build this model: {_first_line(failures[0])}",
    ) from failures[0]


def _named(config: PreTrainedConfig) -> Iterator[Any]:
    """Yield the constructors of the classes under ``architectures`` that transformers has for this config."""
    import transformers

    for name in config.architectures or ():
        cls: Any = getattr(transformers, str(name), None)
        is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
        if is_model and cls.config_class is type(config):
            yield cls._from_config


def _first_line(error: Exception) -> str:
    return textwrap.shorten(str(error).strip().partition("\n")[0], _LONGEST_REASON, placeholder=" ...")


def _dtype_name(dtype: Any) -> str:
    import torch

    floats = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    return floats.get(dtype) or str(dtype).removeprefix("torch.").replace("int", "I").replace("uI", "U").upper()


def _layer(layer: Any, config: PreTrainedConfig, heads: int) -> CacheLayer:
    states = {name: list(_tensors(getattr(layer, name, None))) for name in _STATE_FIELDS}
    state = sum(tensor.nbytes for tensors in states.values() for tensor in tensors)
    updated = STATE_OPERATIONS * sum(tensor.numel() for tensor in states[_RECURRENT])
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None or keys.dim() != _KEYS_DIMENSIONS or not keys.numel():
        return CacheLayer(0, 0, 0, 0, state, updated)
    kv_heads, width = keys.shape[1], keys.shape[-1] + values.shape[-1]
    window = getattr(layer, "sliding_window", None)
    index = getattr(layer, "indexer_keys", None)
    indexed = 0 if index is None else index.shape[-1]
    latent = getattr(config, "kv_lora_rank", None)
    if latent is None:
        return CacheLayer(kv_heads, width, 2 * heads * width, window, state, updated)
    rope = int(getattr(config, "qk_rope_head_dim", 0) or 0)
    latent, rope = (keys.shape[-1], values.shape[-1]) if kv_heads == 1 else (int(latent), rope)
    return CacheLayer(0, latent + rope + indexed, 2 * heads * (latent + rope + latent), window, state, updated)


def _tensors(value: Any) -> Iterator[Any]:
    """Yield the tensors of a state: itself, or those of a mapping or a list."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (item for item in value.values() if isinstance(item, torch.Tensor))
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, torch.Tensor))
