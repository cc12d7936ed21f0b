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

from minifloat.checkpoint import CONFIG_FILE, Checkpoint, TensorInfo
from minifloat.checkpoint.hub import list_model_files
from minifloat.checkpoint.layout import is_weights
from minifloat.checkpoint.reader import read_config
from minifloat.deploy.estimate.config_tensors import derive_tensors
from minifloat.errors import ConfigError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, Role
from minifloat.model.architecture.roles import fused_group, is_mtp, mtp_layers, role_of, text_config
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
