"""Weights made code by code (`kernel_cases`) as the checkpoint's tensors, for the kernels of a GPU."""

from __future__ import annotations

import torch
from kernel_cases import KINDS, Element, Grid, Stored, make

from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity, block_granularity
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

#: The kinds that there are kernels for.
GPU_KINDS = ("fp8-tensor", "fp8-channel", "fp8-block-128", "fp8-group-128", "mxfp8", "mxfp4", "nvfp4")
_SCALES = {Grid.ROW: FLOAT32, Grid.BLOCK: FLOAT32, Grid.E8M0: E8M0, Grid.E4M3: E4M3}


def quantized(stored: Stored) -> QuantizedTensor:
    """Return a weight as `minifloat.model.layouts` reads it."""
    kind = stored.kind
    assert stored.scales is not None
    spec = WeightSpec(E4M3 if kind.element is Element.E4M3 else E2M1, _granularity(*kind.block), _SCALES[kind.grid])
    factor = torch.tensor(stored.factor) if spec.has_global_scale else None
    return QuantizedTensor(
        spec, stored.shape, stored.bytes_of_codes(), stored.scales.contiguous(), factor, global_divides=False
    )


def case(kind: str, rows: int, cols: int, seed: int = 0) -> tuple[QuantizedTensor, torch.Tensor]:
    """Return a random weight of finite codes and its values in float64."""
    stored = make(kind, rows, cols, seed)
    return quantized(stored), stored.values()


def _granularity(rows: int | None, cols: int | None) -> Granularity:
    if cols is None:
        return TENSOR if rows is None else CHANNEL
    assert rows is not None
    return block_granularity(rows, cols)


assert set(GPU_KINDS) < set(KINDS)
