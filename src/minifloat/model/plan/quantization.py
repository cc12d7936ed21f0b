"""`make_plan`: plan the output of `quantize` for every tensor, from headers and config alone.

Every mistake of a user is an error here, within milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from minifloat.checkpoint import TensorInfo
from minifloat.errors import AlreadyQuantizedError, PatternError, ShapeError, UnsupportedTensorError, UsageError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import GENERAL, Family, FusedTensor, Role
from minifloat.model.architecture.roles import (
    EXPERTS,
    expert_group,
    fused_group,
    is_dense_float,
    is_matrix,
    is_mtp,
    role_of,
    text_config,
)
from minifloat.model.layouts import WriteLayout, compressed_tensors
from minifloat.model.plan.overrides import KEEP, Override
from minifloat.model.plan.tensor_plan import MTP, Part, QuantizationPlan, TensorPlan, module_name
from minifloat.numerics.scheme import Scheme, without_static_scales

#: Keys of the config with the inner size of an expert; the first that it has is taken.
_INNER_SIZES = ("moe_intermediate_size", "intermediate_size")


class ModelHeaders(Protocol):
    """The config and headers that a plan is made from: a `Checkpoint`, or a `ModelSource`."""

    @property
    def path(self) -> Path:
        """The folder, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """How the weights are quantized; None for an unquantized model."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors by name."""


def make_part(
    info: TensorInfo, module: str, shape: tuple[int, int], scheme: Scheme, layout: WriteLayout, family: Family = GENERAL
) -> Part:
    """Return the part that is the first rows of a source tensor."""
    rows, cols = shape
    _, block_cols = scheme.weight.granularity.block(shape)
    if rows == 0 or cols == 0:
        raise ShapeError(info.name, f"an empty weight {rows}x{cols}; keep it with --exclude")
    if not scheme.weight.divides(shape):
        raise ShapeError(
            info.name,
            f"{scheme.name} needs a multiple of {block_cols} columns, found {cols}; keep these weights with "
            f"--exclude '{_suffix_pattern(module)}' or give them a scheme without groups: "
            f"--override '{_suffix_pattern(module)}=fp8'",
        )
    tensors = layout.weight_tensors(module, scheme.weight, shape)
    return Part(module, scheme, shape, tensors, fused_group(module, family))


def _suffix_pattern(module: str) -> str:
    """Return a pattern for the modules of all layers with the same last two names, as in ``mlp.down_proj``."""
    return re.escape(".".join(re.sub(r"\.\d+\.", ".", module).rsplit(".", 2)[-2:])) + "$"


def expert_parts(
    checkpoint: ModelHeaders, family: Family, info: TensorInfo, scheme: Scheme, layout: WriteLayout
) -> tuple[Part, ...]:
    """Split fused experts into one linear per expert and projection, unless the layout holds them fused (gpt-oss)."""
    fused = family.fused_tensor(info.name)
    assert fused is not None
    whole = layout.only_experts_of is not None
    if not whole and any(member.interleaved for member in family.fused_experts):
        raise UnsupportedTensorError(
            info.name,
            f"engines load the experts of {family.name}, which have biases and interleave gate and up, from its own "
            f"layout alone: use --scheme mxfp4 --layout {family.name}, or keep them with --exclude 'experts' "
            "--allow-partial",
        )
    transposed = _are_transposed(checkpoint, family, info, fused)
    experts, rows, cols = (info.shape[0], *info.shape[:0:-1]) if transposed else info.shape
    if whole:
        return (_whole_part(info, scheme, (rows, cols), layout, transposed=transposed),)
    height = rows // len(fused.linears)
    parent = fused.parent(info.name)
    return tuple(
        replace(
            make_part(info, f"{parent}{linear.format(expert)}", (height, cols), scheme, layout, family),
            matrix=expert,
            first_row=height * position,
            transposed=transposed,
        )
        for expert in range(experts)
        for position, linear in enumerate(fused.linears)
    )


def _whole_part(
    info: TensorInfo, scheme: Scheme, shape: tuple[int, int], layout: WriteLayout, *, transposed: bool
) -> Part:
    """Return the part that holds the matrices ``(N, K)`` of all experts, one below the other."""
    experts, (rows, cols) = info.shape[0], shape
    _, block_cols = scheme.weight.granularity.block(shape)
    if experts == 0 or rows == 0 or cols == 0:
        raise ShapeError(info.name, f"empty experts {list(info.shape)}")
    if not scheme.weight.divides(shape):
        raise ShapeError(
            info.name,
            f"{scheme.name} needs a multiple of {block_cols} columns, found {cols}: layout {layout.name!r} cannot hold "
            "these experts",
        )
    module = module_name(info)
    tensors = layout.weight_tensors(module, scheme.weight, shape, experts)
    return Part(module, scheme, (experts * rows, cols), tensors, module, transposed=transposed, matrices=experts)


def _are_transposed(checkpoint: ModelHeaders, family: Family, info: TensorInfo, fused: FusedTensor) -> bool:
    """Return whether fused experts are ``[E, in, out]``; of a square projection, another one decides."""
    config = text_config(checkpoint.config)
    hidden = config.get("hidden_size")
    key, inner = next(((key, config[key]) for key in _INNER_SIZES if config.get(key)), (_INNER_SIZES[0], None))
    sizes = f"fused experts {list(info.shape)}: hidden_size {hidden} and {key} {inner} of the config"
    if not hidden or not inner:
        raise UnsupportedTensorError(info.name, f"{sizes} do not tell rows from columns; keep them with --exclude")
    found = set()
    for member in family.fused_experts:
        name = f"{fused.parent(info.name)}{member.name.removesuffix('.weight')}"
        sibling = checkpoint.tensors.get(name) or checkpoint.tensors.get(f"{name}.weight")
        if sibling is None:
            continue
        as_linear = (len(member.linears) * inner, hidden) if member.reads_hidden else (hidden, inner)
        if sibling.shape[1:] not in (as_linear, as_linear[::-1]):
            raise UnsupportedTensorError(info.name, f"{sizes} do not fit {sibling.name}; keep them with --exclude")
        if as_linear[0] != as_linear[1]:
            found.add(sibling.shape[1:] != as_linear)
    if fused.both_exist and len(found) == 1:
        return found.pop()
    if not fused.both_exist and found <= {fused.transposed}:
        return fused.transposed
    raise UnsupportedTensorError(
        info.name, f"{sizes} do not tell rows from columns as {family.name} stores them; keep them with --exclude"
    )


#: The one scheme of embeddings: a scale per row, and no inputs.
EMBEDDING_SCHEME = "fp8"
#: Reason for copying fused experts whose rows and columns are unknown.
UNKNOWN_EXPERTS = "fused experts of unknown shape"
_EXPERTS = "expert"
_MATRIX_DIMENSIONS = 2
_FUSED_DIMENSIONS = 3


def make_plan(
    checkpoint: ModelHeaders,
    scheme: Scheme,
    layout: WriteLayout,
    overrides: Sequence[Override] = (),
    *,
    mtp: bool = False,
) -> QuantizationPlan:
    """Return the plan that quantizes or copies every tensor of a checkpoint."""
    if checkpoint.quantization_config is not None:
        method = checkpoint.quantization_config.get("quant_method", "unknown")
        raise AlreadyQuantizedError(
            f"{checkpoint.path} is quantized already (quant_method {method!r}); start from the original checkpoint, or "
            "from its plain weights, which `minifloat convert --dequantize` writes, or give `quantize` "
            "--from-quantized"
        )
    family = family_of(checkpoint.config)
    quantized_roles: tuple[Role, ...] = (Role.LINEAR, Role.EXPERTS)
    if layout.only_experts_of is not None:
        _require_model_type(checkpoint, layout)
        quantized_roles = (Role.EXPERTS,)
    matched_overrides: set[int] = set()
    tensors = []
    for info in checkpoint.tensors.values():
        role = role_of(info, family)
        drafts = is_mtp(info.name, checkpoint.config)
        kept = MTP if drafts and not mtp else "" if role in quantized_roles else role.value
        if role is Role.LINEAR and role not in quantized_roles:
            kept = f"layout {layout.name} holds experts only"
        default = without_static_scales(scheme) if drafts else scheme
        if kept == Role.OTHER.value and _is_of_experts(info, checkpoint):
            kept = UNKNOWN_EXPERTS
        tensor_scheme, reason = _choose_scheme(info, role, default, kept, overrides, matched_overrides)
        parts = () if tensor_scheme is None else _parts(checkpoint, family, info, role, tensor_scheme, layout)
        tensors.append(TensorPlan(info, role, parts, reason, drafts=drafts))
    for index, override in enumerate(overrides):
        if index not in matched_overrides:
            raise PatternError(_no_match(override, tensors, checkpoint))
    plan = QuantizationPlan(scheme, layout, tuple(overrides), tuple(tensors), _kept(tensors, family))
    _check_groups(plan, family)
    if layout.only_experts_of is not None:
        _require_all_experts(plan)
    if not plan.modules:
        raise UsageError(
            f"{checkpoint.path}: nothing to quantize: no weight of a numbered decoder layer was found; "
            "name the weights with --override 'REGEX=SCHEME'"
        )
    return plan


def _require_model_type(checkpoint: ModelHeaders, layout: WriteLayout) -> None:
    """Refuse a model that the readers of the layout would run unquantized."""
    model_type = text_config(checkpoint.config).get("model_type")
    if model_type != layout.only_experts_of:
        raise UsageError(
            f"layout {layout.name!r} holds the experts of {layout.only_experts_of}, and servers would run "
            f"{model_type} in it unquantized: use --layout compressed-tensors"
        )


def _require_all_experts(plan: QuantizationPlan) -> None:
    """Refuse experts in 16 bits beside quantized ones, which readers of a layout of experts do not expect."""
    kept = [tensor.source.name for tensor in plan.tensors if tensor.role is Role.EXPERTS and not tensor.parts]
    if kept and plan.modules:
        raise UsageError(
            f"{kept[0]} would stay in 16 bits: layout {plan.layout.name!r} holds the experts of every layer; remove "
            "the --exclude or --override that matches it"
        )


def _choose_scheme(
    info: TensorInfo, role: Role, scheme: Scheme, kept: str, overrides: Sequence[Override], matched: set[int]
) -> tuple[Scheme | None, str]:
    """Return the scheme of a tensor, or None and the reason why it is copied; add matching overrides to `matched`."""
    if not (is_matrix(info) or role is Role.EXPERTS):
        _refuse_unknown_experts(info, kept, overrides)
        return None, kept if kept == UNKNOWN_EXPERTS else role.value
    tensor_scheme, reason = (None, kept) if kept else (scheme, "")
    for index, override in enumerate(overrides):
        if re.search(override.pattern, module_name(info)):
            matched.add(index)
            tensor_scheme = override.scheme
            reason = str(override) if tensor_scheme is None else ""
    if tensor_scheme is not None and role is Role.EMBEDDING and tensor_scheme.name != EMBEDDING_SCHEME:
        raise UnsupportedTensorError(
            info.name, f"embeddings are looked up row by row, in {EMBEDDING_SCHEME} or 16 bits; remove the override"
        )
    if tensor_scheme is not None and not is_dense_float(info):
        raise UnsupportedTensorError(
            info.name, f"weights are quantized from BF16, F16 or F32, found {info.dtype}; keep it with --exclude"
        )
    return tensor_scheme, reason


def _is_of_experts(info: TensorInfo, checkpoint: ModelHeaders) -> bool:
    """Return whether a tensor that no family describes holds experts, by name or first dimension (DBRX, JetMoE)."""
    if is_matrix(info) or len(info.shape) not in (_MATRIX_DIMENSIONS, _FUSED_DIMENSIONS) or info.name.endswith("bias"):
        return False
    count = next((text_config(checkpoint.config)[key] for key in EXPERTS if text_config(checkpoint.config).get(key)), 0)
    return _EXPERTS in info.name or (len(info.shape) == _FUSED_DIMENSIONS and info.shape[0] == count)


def _refuse_unknown_experts(info: TensorInfo, kept: str, overrides: Sequence[Override]) -> None:
    """Refuse an override that asks for fused experts that no family describes."""
    if kept != UNKNOWN_EXPERTS:
        return
    if any(override.scheme is not None and re.search(override.pattern, info.name) for override in overrides):
        raise UnsupportedTensorError(
            info.name,
            f"no family describes fused experts {list(info.shape)} of this name, so that rows and columns are unknown; "
            "remove the override, or add the family to minifloat.model.architecture.families",
        )


def _parts(
    checkpoint: ModelHeaders, family: Family, info: TensorInfo, role: Role, scheme: Scheme, layout: WriteLayout
) -> tuple[Part, ...]:
    layout.check(scheme)
    if family.conv1d:
        raise UnsupportedTensorError(
            info.name,
            f"{family.name} stores weights [in, out] (Conv1D). Servers transpose these tensors as they load them, and "
            "not their scales; compressed-tensors loads codes into Linear only. Keep this model in 16 bits",
        )
    if role is Role.EXPERTS:
        return expert_parts(checkpoint, family, info, scheme, layout)
    rows, cols = info.shape
    return (make_part(info, module_name(info), (rows, cols), scheme, layout, family),)


def _kept(tensors: Sequence[TensorPlan], family: Family) -> tuple[str, ...]:
    """Return the linears that a server would otherwise expect to be quantized."""
    return kept_linears(
        (tensor.source for tensor in tensors if not tensor.parts),
        {part.module for tensor in tensors for part in tensor.parts},
        family,
    )


def kept_linears(copied: Iterable[TensorInfo], quantized: Collection[str], family: Family = GENERAL) -> tuple[str, ...]:
    """Return the linears among copied tensors, for a config's list of exceptions; heads even where they are tied."""
    kept = tuple(module_name(info) for info in copied if is_matrix(info) and role_of(info) is not Role.EMBEDDING)
    return (*kept, *(head for head in family.heads if head not in quantized and head not in kept))


def kept_experts(plan: QuantizationPlan, family: Family) -> tuple[str, ...]:
    """Return entries for a config's list of exceptions that name the fused experts that are copied."""
    names: dict[str, None] = {}
    for tensor in plan.tensors:
        fused = family.fused_tensor(tensor.source.name)
        if fused is None or tensor.role is not Role.EXPERTS or tensor.parts:
            continue
        parent = fused.parent(tensor.source.name)
        if plan.layout.name == compressed_tensors.NAME:  # vLLM renames the experts of some models
            experts = parent + fused.linears[0].partition("{}")[0]
            names[f"re:{re.escape(experts)}.*"] = None
        for expert in range(tensor.source.shape[0]):
            names |= dict.fromkeys(parent + linear.format(expert) for linear in fused.linears)
    return tuple(names)


def _check_groups(plan: QuantizationPlan, family: Family) -> None:
    """Refuse different schemes in modules that servers run as one."""
    fused_and_kept = [
        module_name(tensor.source) for tensor in plan.tensors if tensor.role is Role.EXPERTS and not tensor.parts
    ]
    modules: Mapping[str, Scheme | None] = dict.fromkeys([*plan.kept, *fused_and_kept], None) | plan.modules
    first: dict[str, str] = {}
    for module in modules:
        for group in {fused_group(module, family), expert_group(module) or module}:
            first_module = first.setdefault(group, module)
            if modules[first_module] != modules[module]:
                names = [scheme.name if scheme else KEEP for scheme in (modules[first_module], modules[module])]
                raise UsageError(
                    f"{first_module} ({names[0]}) and {module} ({names[1]}) run as one layer in servers and must share "
                    "a scheme; widen the override so that it matches both"
                )


def _no_match(override: Override, tensors: Sequence[TensorPlan], checkpoint: ModelHeaders) -> str:
    names = [
        module_name(tensor.source) for tensor in tensors if is_matrix(tensor.source) or tensor.role is Role.EXPERTS
    ]
    message = f"the pattern {override.pattern!r} matches no weight of {checkpoint.path}"
    if "lm_head" not in names and re.search(override.pattern, "lm_head"):
        return f"{message}: lm_head is tied to the embedding and has no weight of its own; --embedding fp8 is for both"
    return f"{message}; weights are named like {', '.join(names[:3])}"
