"""`ModelSource`: the tensors of a model, from its headers, or from its config alone where there are no weights."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minifloat.checkpoint import CONFIG_FILE, Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.hub import list_model_files
from minifloat.checkpoint.layout import is_weights
from minifloat.checkpoint.reader import read_config
from minifloat.deploy.estimate.shape import Fields
from minifloat.errors import ConfigError
from minifloat.kernels.decoder_layout import ExpertsLayout, NotNative
from minifloat.model.architecture.decoder import decoder_layout
from minifloat.model.architecture.decoder_config import read_config as read_decoder_config
from minifloat.model.architecture.families import NATIVE, family_of
from minifloat.model.architecture.family import Family, Role
from minifloat.model.architecture.roles import EXPERTS, fused_group, is_mtp, mtp_layers, role_of, text_config
from minifloat.model.layouts import compressed_tensors, describe
from minifloat.model.layouts.contradictions import refuse_contradictions
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.stored import StoredWeight
from minifloat.model.plan.tensor_plan import Part, TensorPlan
from minifloat.numerics.scheme import Scheme

_NUMBER = re.compile(r"\.\d+\.")
_MATRIX = 2


@dataclass(frozen=True)
class ModelSource:
    """A model as its headers or its config describe it."""

    path: Path
    config: Mapping[str, Any]
    quantization_config: Mapping[str, Any] | None  # how its weights are quantized; None for an unquantized model
    tensors: Mapping[str, TensorInfo]
    copies: Mapping[str, int]
    # The weights of a model that is already quantized; None: it is not quantized, or has no weights.
    stored: QuantizedModel | None
    estimated: bool
    notes: tuple[str, ...] = ()

    @property
    def plans(self) -> tuple[TensorPlan, ...]:
        """The plans that leave every tensor as it is."""
        if self.stored is not None:
            return self.stored.tensors
        family = family_of(self.config)
        return tuple(
            TensorPlan(info, role_of(info, family), drafts=is_mtp(info.name, self.config))
            for info in self.tensors.values()
        )


def open_source(model: str | os.PathLike[str], *, revision: str | None = None) -> ModelSource:
    """Read the config, and the headers of a model that has weights."""
    files = list_model_files(model, revision=revision)
    root = files.root
    if any(is_weights(name) for name in files.names):
        with files.open() as checkpoint:
            quantization, tensors = checkpoint.quantization_config, checkpoint.tensors
            refuse_contradictions(checkpoint.config, tensors, root)
            stored = None if quantization is None else quantized_model(checkpoint)
            distinct = (
                _distinct(tensors.values(), checkpoint.config)
                if stored is None
                else (tensors, dict.fromkeys(tensors, 1))
            )
            return ModelSource(root, checkpoint.config, quantization, *distinct, stored, estimated=False)
    config = read_config(root)
    try:
        outputs, left_out = derive_tensors(config, root)
    except ConfigError as error:
        problem = f"{error.problem}; a folder with its weights, or the model of the hub, can be planned"
        raise ConfigError(root / CONFIG_FILE, problem) from error
    infos = (TensorInfo(output.name, output.dtype, output.shape, "", 0, output.nbytes) for output in outputs)
    distinct = _distinct(infos, config)
    notes = [
        "No weights here: names and shapes of the tensors follow from config.json.",
        *([left_out] if left_out else []),
    ]
    if mtp_layers(config):
        notes.append(f"{mtp_layers(config)} layers of multi-token prediction are not counted.")
    quantized = config.get("quantization_config") or text_config(config).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "another format")
        notes.append(
            f"config.json declares weights in {method}; without them the plan is that of the unquantized model."
        )
    return ModelSource(root, config, None, *distinct, None, estimated=True, notes=tuple(notes))


def _distinct(tensors: Iterable[TensorInfo], config: Mapping[str, Any]) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Return the first of each kind of repeated tensors by name, and the number of tensors of its kind."""
    # So that a mixture of 45,000 tensors is planned as fast as a small model. Fused experts keep a row each, because
    # their neighbours decide which of their sides are rows.
    first: dict[tuple[str, str, tuple[int, ...], bool], TensorInfo] = {}
    copies: Counter[str] = Counter()
    for info in tensors:
        pattern = info.name if len(info.shape) > _MATRIX else _NUMBER.sub(".*.", info.name)
        copies[first.setdefault((pattern, info.dtype, info.shape, is_mtp(info.name, config)), info).name] += 1
    return {info.name: info for info in first.values()}, dict(copies)


@dataclass(frozen=True)
class QuantizedModel:
    """A quantized checkpoint, written by any tool."""

    scheme: Scheme
    tensors: tuple[TensorPlan, ...]
    nbytes: int


def quantized_model(checkpoint: Checkpoint) -> QuantizedModel | None:
    """Return the weights of a quantized checkpoint; None if nothing in it is quantized."""
    description = describe(checkpoint)
    if not description.weights:
        return None
    family = family_of(checkpoint.config)
    plans = [_weight_plan(checkpoint, stored, family) for stored in description.weights.values()]
    elements: Counter[Scheme] = Counter()
    for plan in plans:
        for part in plan.parts:
            elements[part.scheme] += math.prod(part.shape)
    used = {name for stored in description.weights.values() for name in stored.tensors}
    plans += [
        TensorPlan(
            info,
            Role.VECTOR if name in description.auxiliary else role_of(info, family),
            drafts=is_mtp(name, checkpoint.config),
        )
        for name, info in checkpoint.tensors.items()
        if name not in used
    ]
    nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    return QuantizedModel(elements.most_common(1)[0][0], tuple(plans), nbytes)


def _weight_plan(checkpoint: Checkpoint, stored: StoredWeight, family: Family) -> TensorPlan:
    scheme = Scheme(format_name(stored.spec, stored.activation), "", stored.spec, stored.activation)
    tensors = compressed_tensors.WRITER.weight_tensors(stored.module, stored.spec, stored.shape)
    part = Part(stored.module, scheme, stored.shape, tensors, fused_group(stored.module, family))
    drafts = is_mtp(stored.module, checkpoint.config)
    return TensorPlan(checkpoint.tensors[stored.codes], Role.LINEAR, (part,), drafts=drafts)


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
    from minifloat.deploy.estimate.shape import meta_tensors
    from minifloat.model.architecture.full_config import full_config, quiet_transformers

    with quiet_transformers():
        complete = full_config(config, folder)
        _refuse_huge(Fields(complete.get_text_config(decoder=True), folder))
        return meta_tensors(complete, _dtype(config, folder), folder)


def _of_native_decoder(config: Mapping[str, Any], folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the parameters of a native decoder; None where there is none, or names on disk are others."""
    if config.get("model_type") not in NATIVE:
        return None
    values: Any = read_decoder_config(config, folder)
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
