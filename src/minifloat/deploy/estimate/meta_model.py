"""What transformers builds from a config on the meta device: the tensors of a checkpoint, and the caches of a pass."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat.checkpoint import CONFIG_FILE, OutputTensor
from minifloat.deploy.estimate.cache import STATE_OPERATIONS, CacheLayer
from minifloat.errors import ConfigError
from minifloat.model.architecture.full_config import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

#: Tokens of the pass that fills the caches.
_TOKENS = 2
#: Attributes of a layer of transformers' cache that hold its state, as a tensor or as tensors by number.
_STATES = ("conv_states", "recurrent_states")
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
    builders = [*([] if text_only else _named(config)), *(auto.from_config for auto in autos if _has(auto, config))]
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


def _has(auto: Any, config: PreTrainedConfig) -> bool:
    """Return whether an auto class of transformers has a model of a config."""
    return type(config) in auto._model_mapping


def _first_line(error: Exception) -> str:
    return textwrap.shorten(str(error).strip().partition("\n")[0], _LONGEST_REASON, placeholder=" ...")


def _dtype_name(dtype: Any) -> str:
    """Return the name of a torch dtype in safetensors headers."""
    import torch

    floats = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    return floats.get(dtype) or str(dtype).removeprefix("torch.").replace("int", "I").replace("uI", "U").upper()


def _layer(layer: Any, config: PreTrainedConfig, heads: int) -> CacheLayer:
    """Return one layer of transformers' cache as its sizes."""
    states = {name: list(_tensors(getattr(layer, name, None))) for name in _STATES}
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
