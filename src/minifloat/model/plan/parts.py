"""The weights of the output that come from one source tensor; fused experts are split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from minifloat.checkpoint import TensorInfo
from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.model.architecture.family import GENERAL, Family, FusedTensor
from minifloat.model.architecture.roles import fused_group, text_config
from minifloat.model.layouts import WriteLayout
from minifloat.model.plan.tensor_plan import Part, module_name
from minifloat.numerics.scheme import Scheme

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
