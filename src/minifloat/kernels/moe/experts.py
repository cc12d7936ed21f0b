"""`PackedExperts`: the validated experts of a layer."""

from __future__ import annotations

from collections.abc import Sequence

from minifloat.errors import ShapeError
from minifloat.kernels.pack import PackedWeight
from minifloat.kernels.pack.weight import PackedWeights


class PackedExperts(PackedWeights):
    """The packed weights ``[N, K]`` of a projection of all experts of a layer."""

    name = "experts"

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        super().__init__(weights)
        self.shape = self[0].shape
        _ = self.pointers  # a weight that the kernels may not read is an error here

    def _check_shapes(self, shapes: list[tuple[int, int]]) -> None:
        if len(set(shapes)) != 1:
            raise ShapeError(self.name, f"expected one shape for all, got {sorted(set(shapes))}")
