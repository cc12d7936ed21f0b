"""The weights of the output that come from one source tensor; fused experts are split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from minifloat.architecture.groups import fused_group
from minifloat.architecture.roles import text_config
from minifloat.checkpoint import TensorInfo
from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.layouts import WriteLayout
from minifloat.numerics.scheme import Scheme
from minifloat.plan.tensor_plan import Part, module_name


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
    module: str,
    scheme: Scheme,
    shape: tuple[int, int],
    layout: WriteLayout,
    info: TensorInfo,
    *,
    matrix: int = 0,
    first_row: int = 0,
    transposed: bool = False,
) -> Part:
    """Return one part of a source tensor.

    Args:
        module: Name of the linear in the output.
        scheme: Scheme that it is quantized to.
        shape: ``(N, K)``.
        layout: Layout of the output.
        info: The source tensor.
        matrix: Index of the matrix in the source, for fused experts.
        first_row: First row of the weight in that matrix (after transposing).
        transposed: Whether the source stores the matrix as ``[K, rows]``.

    Raises:
        ShapeError: The weight is empty, or its columns are no multiple of the scheme's groups.
    """
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
    return Part(module, scheme, shape, tensors, fused_group(module), matrix, first_row, transposed)


def _suffix_pattern(module: str) -> str:
    """Return a pattern for the modules of all layers with the same last two names, as in ``mlp.down_proj``."""
    return re.escape(".".join(re.sub(r"\.\d+\.", ".", module).rsplit(".", 2)[-2:])) + "$"


def expert_parts(checkpoint: ModelHeaders, info: TensorInfo, scheme: Scheme, layout: WriteLayout) -> tuple[Part, ...]:
    """Split fused experts into one linear per expert and projection, the form that servers load quantized.

    ``gate_up_proj`` is ``[E, 2 I, H]`` or ``[E, H, 2 I]``, ``down_proj`` is ``[E, H, I]`` or ``[E, I, H]``. The sizes
    in the config decide between the two.

    Raises:
        UnsupportedTensorError: The sizes do not decide, or the model interleaves gate and up (gpt-oss).
    """
    config = text_config(checkpoint.config)
    if config.get("model_type") == "gpt_oss":
        raise UnsupportedTensorError(
            info.name,
            "gpt-oss interleaves gate and up and ships its experts as MXFP4 already; keep them with --exclude",
        )
    stem, _, projection = module_name(info).rpartition(".")
    hidden = config.get("hidden_size")
    inner = next((config[key] for key in ("moe_intermediate_size", "intermediate_size") if config.get(key)), None)
    transposed = _are_transposed(checkpoint, stem, hidden, inner)
    if transposed is None:
        raise UnsupportedTensorError(
            info.name,
            f"fused experts {list(info.shape)}: hidden_size {hidden} and moe_intermediate_size {inner} of the config "
            "do not tell rows from columns; keep them with --exclude",
        )
    is_gate_up = projection == "gate_up_proj"
    experts, rows, cols = (info.shape[0], *info.shape[:0:-1]) if transposed else info.shape
    names = (("gate_proj", 0), ("up_proj", rows // 2)) if is_gate_up else (("down_proj", 0),)
    return tuple(
        make_part(
            f"{stem}.{expert}.{name}",
            scheme,
            (rows // len(names), cols),
            layout,
            info,
            matrix=expert,
            first_row=first_row,
            transposed=transposed,
        )
        for expert in range(experts)
        for name, first_row in names
    )


def _are_transposed(checkpoint: ModelHeaders, stem: str, hidden: int | None, inner: int | None) -> bool | None:
    """Return whether fused experts are stored ``[E, in, out]``; None if the sizes do not decide.

    At most one of the two projections is square; the other decides for both.
    """
    if not hidden or not inner:
        return None
    transposed = set()
    for projection, as_linear in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
        for suffix in ("", ".weight"):
            info = checkpoint.tensors.get(f"{stem}.{projection}{suffix}")
            if info is None:
                continue
            if info.shape[1:] not in (as_linear, as_linear[::-1]):
                return None
            if as_linear[0] != as_linear[1]:
                transposed.add(info.shape[1:] != as_linear)
    return transposed.pop() if len(transposed) == 1 else None
