"""The input of the rules: a checkpoint, or a plan to write one, reduced to what decides whether an engine loads it."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.check.target import Target
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, Role
from minifloat.model.architecture.roles import expert_group, role_of, text_config
from minifloat.model.layouts import compressed_tensors, describe, gguf, gpt_oss
from minifloat.model.layouts.decoded import quantized_model_config
from minifloat.model.layouts.gguf.blocks import BLOCKS
from minifloat.model.layouts.inspection import Inspection
from minifloat.model.layouts.stored import by_name_or_pattern, kv_scale_of, scale_rule_of
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, TENSOR
from minifloat.numerics.scheme import ActivationSpec, KVSpec, ScaleRule, WeightSpec

_HEAD = "lm_head"
#: The class of linears, as a target of a config group.
_LINEAR = "Linear"
#: Fused experts are ``[E, N, K]`` or ``[E, K, N]``.
_FUSED_DIMENSIONS = 3
#: Roles of the unquantized weights that rules look at.
_MULTIPLIED = (Role.LINEAR, Role.LM_HEAD, Role.UNQUANTIZED_IN_SERVERS)


class Kind(enum.Enum):
    """How weights and inputs are quantized, as far as engines distinguish it; the value is the text in reports."""

    FP8_STATIC = "FP8 per tensor, static inputs"
    FP8_DYNAMIC = "FP8 per channel or tensor, inputs per token"
    FP8_BLOCK = "FP8 in 128x128 blocks"
    FP8_WEIGHT_ONLY = "FP8 weight-only"
    MXFP8 = "MXFP8 weight-only"
    MXFP8_W8A8 = "MXFP8 with MXFP8 inputs"
    MXFP4 = "MXFP4 weight-only"
    MXFP4_W4A4 = "MXFP4 with MXFP4 inputs"
    MXFP4_W4A8 = "MXFP4 with FP8 inputs"
    NVFP4 = "NVFP4 weight-only"
    NVFP4_W4A4 = "NVFP4 with NVFP4 inputs"
    OTHER = "another mixture of formats"


#: Kinds with the same weights, whatever their inputs.
MXFP8_KINDS = (Kind.MXFP8, Kind.MXFP8_W8A8)
MXFP4_KINDS = (Kind.MXFP4, Kind.MXFP4_W4A4, Kind.MXFP4_W4A8)
NVFP4_KINDS = (Kind.NVFP4, Kind.NVFP4_W4A4)


def kind_of(spec: WeightSpec, activation: ActivationSpec | None) -> Kind:
    """Return the kind of a quantized weight."""
    if (spec.element, spec.scale, spec.granularity) == (E4M3, E8M0, GROUP_32):
        return Kind.MXFP8 if activation is None else Kind.MXFP8_W8A8
    if (spec.element, spec.scale, spec.granularity) == (E2M1, E8M0, GROUP_32):
        if activation is None:
            return Kind.MXFP4
        return Kind.MXFP4_W4A4 if activation.element is E2M1 else Kind.MXFP4_W4A8
    if (spec.element, spec.scale, spec.granularity) == (E2M1, E4M3, GROUP_16):
        return Kind.NVFP4 if activation is None else Kind.NVFP4_W4A4
    if (spec.element, spec.scale) != (E4M3, FLOAT32):
        return Kind.OTHER
    if spec.granularity not in (TENSOR, CHANNEL, BLOCK_128):
        return Kind.OTHER
    if activation is None:
        return Kind.FP8_WEIGHT_ONLY
    if spec.granularity == BLOCK_128:
        return Kind.FP8_BLOCK
    return Kind.FP8_DYNAMIC if activation.dynamic else Kind.FP8_STATIC


@dataclass(frozen=True)
class Weight:
    """A linear or an expert."""

    module: str
    shape: tuple[int, int]
    spec: WeightSpec | None = None  # how the weight is quantized; None: it is not quantized
    activation: ActivationSpec | None = None  # how its inputs are quantized; None: they are not quantized

    @property
    def kind(self) -> Kind | None:
        """Kind of the quantized weight; None where it is not quantized."""
        return None if self.spec is None else kind_of(self.spec, self.activation)

    @property
    def leaf(self) -> str:
        """Last part of the module name that is no number; gpt-oss' fused experts end in the number of the expert."""
        return next(part for part in reversed(self.module.split(".")) if not part.isdecimal())

    @property
    def is_expert(self) -> bool:
        """Whether the weight belongs to an expert of a layer."""
        return expert_group(self.module) is not None


@dataclass(frozen=True)
class Subject:
    """A checkpoint that is judged."""

    layout: str | None  # name by `minifloat.model.layouts.describe`; None for a model that is not quantized
    model_type: str
    heads: int
    kv_heads: int
    config: Mapping[str, Any]
    weights: tuple[Weight, ...]
    kv: KVSpec | None = None  # how the checkpoint declares the KV cache to be quantized; None: it does not
    kv_scales: bool = False
    misnamed: bool = False
    outer_type: str = ""
    head_named: bool = False
    unlisted_experts: tuple[Weight, ...] = ()
    file: Inspection | None = None  # a GGUF file, of whose weights only those in formats of ours are in `weights`

    @cached_property
    def family(self) -> Family:
        """The description of the model's family."""
        text = {"model_type": self.model_type}
        return family_of({"model_type": self.outer_type or self.model_type, "text_config": text})

    @property
    def quantized(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.weights if weight.spec is not None)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of its quantized weights, in the order of their first weight."""
        return tuple(dict.fromkeys(weight.kind for weight in self.weights if weight.kind is not None))

    @property
    def head_size(self) -> int:
        """Elements of a head of queries and keys; 0 where the config does not say, or attention is latent (MLA)."""
        if _count(self.config, "kv_lora_rank"):
            return 0
        head_dim = _count(self.config, "head_dim")
        return head_dim or (_count(self.config, "hidden_size") // self.heads if self.heads else 0)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Subject:
        """Describe a checkpoint on disk."""
        facts, config = _facts(checkpoint.config), checkpoint.quantization_config or {}
        if config.get("quant_method") == "mxfp4" and not any(name.endswith("_blocks") for name in checkpoint.tensors):
            return cls(layout=gpt_oss.NAME, weights=(), misnamed=True, **facts)
        description = describe(checkpoint)
        stored = description.weights.values()
        rule = ScaleRule.RCEIL if scale_rule_of(checkpoint) == ScaleRule.RCEIL.value else ScaleRule.AMAX
        quantized = (Weight(w.module, w.shape, replace(w.spec, rule=rule), w.activation) for w in stored)
        used = {name for weight in stored for name in weight.tensors} | description.auxiliary
        plain = _unquantized_linears(checkpoint, {name.removesuffix(".weight") for name in used})
        is_listed = description.layout == compressed_tensors.NAME
        return cls(
            layout=description.layout,
            weights=(*quantized, *plain),
            kv=description.kv,
            kv_scales=any(kv_scale_of(name) is not None for name in description.auxiliary),
            head_named=_names_head(config),
            unlisted_experts=_unlisted_experts(checkpoint, config) if is_listed else (),
            **facts,
        )

    @classmethod
    def of_file(cls, file: Inspection) -> Subject:
        """Describe a GGUF file."""
        specs = {blocks.name: blocks.spec for blocks in BLOCKS}
        weights = tuple(
            Weight(row.name.removesuffix(".weight"), (row.shape[-2], row.shape[-1]), specs[row.format])
            for row in file.rows
            if row.format in specs
        )
        return cls(gguf.NAME, file.architecture, 0, 0, {}, weights, file=file)

    @classmethod
    def of_plan(cls, checkpoint: Checkpoint, plan: QuantizationPlan) -> Subject:
        """Describe the checkpoint that `minifloat.quantize.job.quantize_checkpoint` would write."""
        quantized = (weight for tensor in plan.tensors for part in tensor.parts for weight in _weights_of(part))
        planned = {tensor.source.name.removesuffix(".weight") for tensor in plan.tensors if tensor.parts}
        quantization = plan.layout.quantization_config(plan.modules, plan.kept, plan.kv)
        config = quantized_model_config(checkpoint.config, plan.layout, quantization)
        return cls(
            layout=plan.layout.name,
            weights=(*quantized, *_unquantized_linears(checkpoint, planned)),
            kv=plan.kv,
            kv_scales=plan.kv is not None,
            head_named=_names_head(quantization),
            **_facts(checkpoint.config) | {"config": text_config(config)},
        )


@dataclass(frozen=True)
class Case:
    """A checkpoint and the target it is to run on: the input of every condition."""

    subject: Subject
    target: Target

    @property
    def tp(self) -> int:
        return self.target.tp

    def weights(self, *kinds: Kind, experts: bool | None = None) -> tuple[Weight, ...]:
        """Return the quantized weights of these kinds, by default of all."""
        return tuple(
            weight
            for weight in self.subject.quantized
            if (not kinds or weight.kind in kinds) and experts in (None, weight.is_expert)
        )


def _weights_of(part: Part) -> tuple[Weight, ...]:
    """Return the weights of a part; those of experts that stay fused have the number of the expert in their name."""
    scheme, (rows, cols) = part.scheme, part.shape
    if part.matrices == 1:
        return (Weight(part.module, part.shape, scheme.weight, scheme.activation),)
    shape = (rows // part.matrices, cols)
    return tuple(
        Weight(f"{part.module}.{expert}", shape, scheme.weight, scheme.activation) for expert in range(part.matrices)
    )


def _names_head(config: Mapping[str, Any]) -> bool:
    """Return whether a config group targets lm_head by name or pattern."""
    groups = config.get("config_groups") or {}
    targets = [str(target) for group in groups.values() for target in group.get("targets") or ()]
    patterns = [target.removeprefix("re:") for target in targets if target.startswith("re:")]
    return _HEAD in targets or any(re.match(pattern, _HEAD) for pattern in patterns)


def _unlisted_experts(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Return the fused experts whose single experts the list of exceptions does not have; the shape is that of one."""
    groups = (config.get("config_groups") or {}).values()
    if not any(_LINEAR in (group.get("targets") or ()) for group in groups):
        return ()
    family, listed, unlisted = family_of(checkpoint.config), config.get("ignore") or (), []
    for info in checkpoint.tensors.values():
        fused = family.fused_tensor(info.name)
        if fused is None or len(info.shape) != _FUSED_DIMENSIONS:
            continue
        single = [fused.parent(info.name) + linear.format(0) for linear in fused.linears]
        if not all(any(by_name_or_pattern(entry, name) for entry in listed) for name in single):
            unlisted.append(Weight(info.name.removesuffix(".weight"), (info.shape[1], info.shape[2])))
    return tuple(unlisted)


def _unquantized_linears(checkpoint: Checkpoint, quantized_modules: set[str]) -> tuple[Weight, ...]:
    """Return the linears that are not quantized; fused experts as one of their matrices."""
    weights, family = [], family_of(checkpoint.config)
    for info in checkpoint.tensors.values():
        module, role = info.name.removesuffix(".weight"), role_of(info, family)
        if role in _MULTIPLIED and module not in quantized_modules:
            weights.append(Weight(module, (info.shape[0], info.shape[1])))
    return tuple(weights)


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Subject` that follow from a model's config."""
    text = text_config(config)
    heads = _count(text, "num_attention_heads")
    return {
        "model_type": str(text.get("model_type", "unknown")),
        "outer_type": str(config.get("model_type", "")),
        "heads": heads,
        "kv_heads": _count(text, "num_key_value_heads") or heads,
        "config": text,
    }


def _count(config: Mapping[str, Any], key: str) -> int:
    """Return a positive integer of the config; 0 where it is missing."""
    value = config.get(key)
    return value if isinstance(value, int) and value > 0 else 0
