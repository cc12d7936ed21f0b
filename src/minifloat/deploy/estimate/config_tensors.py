"""The tensors of a model, derived from its config alone, for folders without weights and for models yet to be made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint import CONFIG_FILE, OutputTensor
from minifloat.deploy.estimate.shape import Fields
from minifloat.errors import ConfigError
from minifloat.kernels.decoder_layout import ExpertsLayout, NotNative
from minifloat.model.architecture.decoder import decoder_layout
from minifloat.model.architecture.decoder_config import read_config
from minifloat.model.architecture.families import NATIVE, family_of
from minifloat.model.architecture.roles import EXPERTS, text_config

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
#: Largest number of layers times experts, so that a damaged config cannot exhaust memory.
_MOST_MODULES = 1 << 20
#: The router's bias, which is kept in float32.
_CORRECTION = "e_score_correction_bias"


def tensors_of(config: Mapping[str, Any], folder: Path) -> tuple[OutputTensor, ...]:
    """Return `derive_tensors` without its note."""
    return derive_tensors(config, folder)[0]


def derive_tensors(config: Mapping[str, Any], folder: Path) -> tuple[tuple[OutputTensor, ...], str]:
    """Return all tensors of a model, in the order of its layers, and a sentence about those that are left out."""
    _refuse_huge(Fields(text_config(config), folder))
    shapes = _of_native_decoder(config, folder)
    if shapes is not None:
        dtype = _DTYPES[_dtype(config, folder)]
        named = ((name, "F32" if _CORRECTION in name else dtype, shape) for name, shape in shapes.items())
        return tuple(OutputTensor(*tensor) for tensor in named), ""
    from minifloat.deploy.estimate.meta_model import meta_tensors
    from minifloat.model.architecture.full_config import full_config, quiet_transformers

    with quiet_transformers():
        complete = full_config(config, folder)
        _refuse_huge(Fields(complete.get_text_config(decoder=True), folder))
        return meta_tensors(complete, _dtype(config, folder), folder)


def _of_native_decoder(config: Mapping[str, Any], folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the parameters of a native decoder; None where there is none, or names on disk are others."""
    if config.get("model_type") not in NATIVE:
        return None
    values: Any = read_config(config, folder)
    if isinstance(values, str):
        from minifloat.model.architecture.full_config import full_config, quiet_transformers

        with quiet_transformers():
            values = full_config(config, folder)
            _refuse_huge(Fields(values, folder))
    try:
        layout = decoder_layout(values)
    except NotNative:
        return None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ConfigError(
            folder / CONFIG_FILE, f"no {values.model_type} model can be built of it: {error!r}"
        ) from error
    has_experts = any(isinstance(layer.mlp, ExpertsLayout) for layer in layout.layers)
    if layout.renamings or (has_experts and family_of(config).stored_fused is not False):
        return None
    shapes = dict(layout.shapes())
    if values.tie_word_embeddings:
        del shapes[layout.lm_head.weight]
    return shapes


def _refuse_huge(fields: Fields) -> None:
    """Raise ConfigError for numbers of layers and experts that would exhaust memory."""
    layers, experts = fields.optional("num_hidden_layers") or 0, fields.optional(*EXPERTS) or 1
    if layers * experts > _MOST_MODULES:
        raise fields.error(f"{layers} layers of {experts} experts: no model is that large")


def _dtype(config: Mapping[str, Any], folder: Path) -> str:
    """Return the dtype of the parameters that the config names, by default BF16."""
    nested = text_config(config)
    name = str(next((c[k] for c in (config, nested) for k in ("dtype", "torch_dtype") if c.get(k)), "bfloat16"))
    if name not in _DTYPES:
        raise ConfigError(folder / CONFIG_FILE, f"dtype {name!r}: expected one of {', '.join(_DTYPES)}")
    return name
