"""The config of the models that the decoders run, read without transformers.

transformers' config classes import torch's compiler, which takes seconds. The decoders support few model types, so
their fields, defaults and rules are stated here. A config.json that says anything else (another field, a value of
another type, a model type with sliding layers) is left to transformers, which knows all rules and their errors:
`read_decoder_config` then returns the reason. tests/architecture/test_decoder_config.py compares with transformers'
classes.

Source of names and defaults: transformers, ``configuration_<model_type>.py`` and ``modeling_rope_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Fields of config.json that no decoder reads and that change no other field.
IGNORED = frozenset(
    {
        "architectures",
        "attention_dropout",
        "compression_config",
        "dtype",
        "initializer_range",
        "model_type",
        "name_or_path",
        "_name_or_path",
        "output_router_logits",
        "pretraining_tp",
        "quantization_config",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_ROPE = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_WINDOWS = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})
_FULL_ATTENTION = "full_attention"


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_token(value: Any) -> bool:
    return value is None or (type(value) is int and value >= 0)


def is_tokens(value: Any) -> bool:
    """Return whether a value of a config.json is None, a token or a list of tokens."""
    return _is_token(value) or (isinstance(value, list) and all(type(item) is int and item >= 0 for item in value))


def _is_layers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


@dataclass(frozen=True)
class _Fields:
    """The fields of a model type."""

    required: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    optional: Mapping[str, tuple[Callable[[Any], bool], Any]] = field(default_factory=dict)
    theta: float = 10_000.0
    no_window: int | None = None
    has_window: bool = False
    has_layers: bool = False


_REQUIRED: dict[str, Callable[[Any], bool]] = dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
    ),
    _is_count,
) | {"rms_norm_eps": _is_number, "hidden_act": _is_text}
_OPTIONAL: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "tie_word_embeddings": (_is_flag, False),
    "pad_token_id": (_is_token, None),
    "bos_token_id": (_is_token, None),
    "eos_token_id": (is_tokens, None),
}
_LLAMA_TOKENS: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "bos_token_id": (_is_token, 1),
    "eos_token_id": (is_tokens, 2),
}
_HEAD_DIM: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "head_dim": (lambda value: value is None or _is_count(value), None)
}
_ATTENTION_BIAS: dict[str, tuple[Callable[[Any], bool], Any]] = {"attention_bias": (_is_flag, False)}
_SPARSE: dict[str, tuple[Callable[[Any], bool], Any]] = {
    "decoder_sparse_step": (_is_count, 1),
    "mlp_only_layers": (_is_layers, []),
    "norm_topk_prob": (_is_flag, False),
}
_EXPERTS = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), _is_count)

_TYPES: dict[str, _Fields] = {
    "llama": _Fields(
        optional=_LLAMA_TOKENS | _HEAD_DIM | _ATTENTION_BIAS | {"mlp_bias": (_is_flag, False)},
    ),
    "mistral": _Fields(optional=_LLAMA_TOKENS | _HEAD_DIM, has_window=True),
    "qwen2": _Fields(has_layers=True),
    "qwen3": _Fields(required={"head_dim": _is_count}, optional=_ATTENTION_BIAS, has_layers=True),
    "mixtral": _Fields(
        required=dict.fromkeys(("num_local_experts", "num_experts_per_tok"), _is_count),
        optional=_LLAMA_TOKENS | _HEAD_DIM,
        theta=1_000_000.0,
        has_window=True,
    ),
    "qwen2_moe": _Fields(
        required=_EXPERTS | {"shared_expert_intermediate_size": _is_count},
        optional=_SPARSE | {"qkv_bias": (_is_flag, True)},
        no_window=0,
        has_layers=True,
    ),
    "qwen3_moe": _Fields(required=_EXPERTS | {"head_dim": _is_count}, optional=_SPARSE | _ATTENTION_BIAS),
}


class DecoderConfig(SimpleNamespace):
    """The fields of a config.json with the defaults of its model type, under transformers' names."""

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> DecoderConfig:
        """Return the config of the text model, as transformers' method of the same name does."""
        text: DecoderConfig = getattr(self, "text_config", self)
        return text


def read_decoder_config(values: Mapping[str, Any], folder: Path) -> DecoderConfig | str:
    """Return the config of a model, or why transformers has to read it."""
    model_type = values.get("model_type")
    fields = _TYPES.get(model_type) if isinstance(model_type, str) else None
    if fields is None:
        return f"the model_type {model_type!r} is not one of {', '.join(_TYPES)}"
    required, optional = _REQUIRED | dict(fields.required), _OPTIONAL | dict(fields.optional)
    others = set(values) - IGNORED - _ROPE - _WINDOWS - set(required) - set(optional)
    if others:
        return f"it has the field {min(others)!r}"
    config = DecoderConfig(model_type=model_type, name_or_path=str(folder))
    for name, check in required.items():
        if name not in values or not check(values[name]):
            return f"{name} is missing or unusual"
        setattr(config, name, values[name])
    for name, (check, default) in optional.items():
        value = values.get(name, default)
        if not check(value):
            return f"{name} is unusual"
        setattr(config, name, value)
    if config.hidden_size % config.num_attention_heads:
        return "hidden_size is not a multiple of num_attention_heads"
    if "head_dim" in optional and config.head_dim is None and model_type != "mixtral":
        config.head_dim = config.hidden_size // config.num_attention_heads
    if (getattr(config, "head_dim", None) or 2) % 2:
        return "head_dim is odd"
    return _windows(config, values, fields) or _rope(config, values, fields) or config


def _windows(config: DecoderConfig, values: Mapping[str, Any], fields: _Fields) -> str:
    """Set the fields of sliding windows; return why transformers has to."""
    if fields.has_window:
        if "sliding_window" not in values or set(values) & (_WINDOWS - {"sliding_window"}):
            return "its sliding windows are not stated by sliding_window alone"
        window = values["sliding_window"]
        if window is not None and not _is_count(window):
            return "sliding_window is unusual"
        config.sliding_window = window
        return ""
    if config.model_type == "llama":
        return "it has sliding windows" if set(values) & _WINDOWS else ""
    if values.get("use_sliding_window", False) is not False:
        return "it uses sliding windows"
    config.sliding_window = fields.no_window
    layers = [_FULL_ATTENTION] * config.num_hidden_layers
    if values.get("layer_types") not in (None, *([layers] if fields.has_layers else [])):
        return "layer_types is unusual"
    if fields.has_layers:
        config.layer_types = layers
    return ""


def _rope(config: DecoderConfig, values: Mapping[str, Any], fields: _Fields) -> str:
    """Set `rope_parameters`; return why transformers has to."""
    stated = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(stated, dict) or any(isinstance(value, dict) for value in stated.values()):
        return "its rotary embedding is stated per layer type"
    if "partial_rotary_factor" in stated:
        return "its rotary embedding is partial"
    rope = dict(stated)
    rope.setdefault("rope_theta", values.get("rope_theta", fields.theta))
    rope.setdefault("rope_type", rope.get("type", "default"))
    if not _is_number(rope["rope_theta"]) or not _is_text(rope["rope_type"]):
        return "rope_theta or rope_type is unusual"
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", config.max_position_embeddings)
    config.rope_parameters = rope
    return ""
