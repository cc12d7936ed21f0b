"""`PackedExperts`: what a call needs to know of the experts of a layer, found out once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import overload

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.pack import PackedWeight


class PackedExperts(Sequence[PackedWeight]):
    """The packed weights ``[N, K]`` of a projection of all experts of a layer.

    Args:
        weights: At least one; all of one shape and kind.

    Attributes:
        shape: ``(N, K)`` of each.
        pointers: Where they lie, as the kernels take it.

    Raises:
        ShapeError: None at all, or of several shapes.
        UnsupportedTensorError: Several kinds: formats or kinds of scales.
    """

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = tuple(weights)
        if not self._weights:
            raise ShapeError("experts", "expected at least one")
        shapes = {weight.shape for weight in self._weights}
        if len(shapes) != 1:
            raise ShapeError("experts", f"expected one shape for all, got {sorted(shapes)}")
        forms = [weight.form for weight in self._weights]
        if len({(form.element, form.grid) for form in forms}) != 1:
            raise UnsupportedTensorError("experts", "several formats or kinds of scales among the experts of a layer")
        self.shape = self._weights[0].shape
        self.pointers = (ctypes.c_void_p * len(self._weights))(*[weight.address for weight in self._weights])

    def __len__(self) -> int:
        return len(self._weights)

    @overload
    def __getitem__(self, index: int) -> PackedWeight: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedWeight]: ...
    def __getitem__(self, index: int | slice) -> PackedWeight | Sequence[PackedWeight]:
        """One expert's weight, or several."""
        return self._weights[index]
