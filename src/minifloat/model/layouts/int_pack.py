"""Packs of INT4 and INT8, the `pack-quantized` format of compressed-tensors (also Kimi K2); read only.

``weight_packed`` is int32 ``[N, ceil(K * bits / 32)]``, the first element of a row in the lowest bits; ``weight_shape``
holds N and K. ``weight_zero_point`` is packed alike along the rows: int32 ``[ceil(N * bits / 32), K / group]``.

Source: compressed-tensors 0.20, `compressors/pack_quantized`.
"""

from __future__ import annotations

import math

import numpy as np

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.tensors import DTYPES
from minifloat.errors import ConfigError, ShapeError, UnsupportedTensorError
from minifloat.numerics.formats import ElementFormat
from minifloat.numerics.granularity import TENSOR, Granularity

CODES_DTYPE = "I32"
_PLAIN_DTYPE = "I8"  # of zero points that are not packed: those of one scale per tensor
_AGAIN = "the checkpoint is damaged, download it again"


def pack_shape(
    checkpoint: Checkpoint, module: str, codes: TensorInfo, element: ElementFormat, granularity: Granularity
) -> tuple[int, int]:
    """Return ``(N, K)`` of a pack, from its ``weight_shape``; where that cannot be read, from its scales or width."""
    if len(codes.shape) != 2:
        raise ShapeError(codes.name, f"expected a matrix of packed codes, found shape {list(codes.shape)}")
    order = f"{module}.weight_g_idx"
    if order in checkpoint.tensors:
        raise UnsupportedTensorError(
            order,
            'groups of columns in the order of activations (actorder "group") are not read; use a checkpoint with '
            'actorder "weight" or none',
        )
    per_word = DTYPES[CODES_DTYPE] // element.bits
    rows, words = codes.shape
    declared = _declared_shape(checkpoint, module)
    if declared is None:
        grid = checkpoint.tensors[f"{module}.weight_scale"].shape
        grouped = granularity.rows == 1 and granularity.cols is not None and len(grid) == 2
        declared = (rows, grid[1] * (granularity.cols or 1) if grouped else words * per_word)
    if declared[0] != rows or -(-declared[1] // per_word) != words:
        raise ShapeError(
            codes.name,
            f"a pack of {element.name} holds {per_word} columns in each int32, so a {declared[0]}x{declared[1]} weight "
            f"has the shape [{declared[0]}, {-(-declared[1] // per_word)}]; found {list(codes.shape)}: {_AGAIN}",
        )
    if declared[1] * element.bits % 8:
        raise ShapeError(
            codes.name,
            f"an {element.name} weight has an even number of columns, because two share a byte; found {declared[1]}: "
            "quantize the original model instead",
        )
    return declared


def zero_point_name(
    checkpoint: Checkpoint, module: str, element: ElementFormat, granularity: Granularity, symmetric: bool
) -> str | None:
    name = f"{module}.weight_zero_point"
    info = checkpoint.tensors.get(name)
    if symmetric == (info is not None):
        found = f"{name} is stored" if info is not None else f"there is no {name}"
        raise ConfigError(
            checkpoint.path / "config.json",
            f"the config group of {module} declares {'symmetric' if symmetric else 'asymmetric'} weights, yet {found}: "
            f"{_AGAIN}",
        )
    if info is None:
        return None
    grid = checkpoint.tensors[f"{module}.weight_scale"].shape
    expected: tuple[int, ...] = tuple(grid)
    if info.dtype == CODES_DTYPE and granularity != TENSOR and grid:
        per_word = DTYPES[CODES_DTYPE] // element.bits
        expected = (-(-grid[0] // per_word), *grid[1:])
    elif info.dtype != _PLAIN_DTYPE:
        raise UnsupportedTensorError(
            name, f"zero points are stored as {CODES_DTYPE} or {_PLAIN_DTYPE}; found {info.dtype}"
        )
    if math.prod(info.shape) != math.prod(expected):
        raise ShapeError(
            name, f"expected the shape {list(expected)} beside scales {list(grid)}, found {list(info.shape)}: {_AGAIN}"
        )
    return name


def _declared_shape(checkpoint: Checkpoint, module: str) -> tuple[int, int] | None:
    """Return what ``weight_shape`` says; None if there is none, or only headers are known."""
    info = checkpoint.tensors.get(f"{module}.weight_shape")
    if info is None or not checkpoint.readable:
        return None
    dtype = {"I32": np.int32, "I64": np.int64}.get(info.dtype)
    if dtype is None or math.prod(info.shape) != 2:
        raise ShapeError(info.name, f"expected two integers, N and K, found {info.dtype} {list(info.shape)}: {_AGAIN}")
    rows, cols = checkpoint.read(info.name).view(dtype)
    return int(rows), int(cols)
