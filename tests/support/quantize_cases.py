"""Weights, specs and inputs for the tests of every implementation of the quantizer, on the CPU and by Triton."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.kernels.quantize import QuantizedRows, quantize_rows
from minifloat.numerics.formats import E2M1, E4M3, E5M2, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, GROUP_128, TENSOR
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
#: Of all schemes, and beside them what no scheme has.
SPECS = {name: scheme.weight for name, scheme in SCHEMES.items()} | {
    "e5m2-channel": WeightSpec(E5M2, CHANNEL),
    "e4m3-group-128": WeightSpec(E4M3, GROUP_128),
    "e2m1-tensor": WeightSpec(E2M1, TENSOR),
    "e2m1-block": WeightSpec(E2M1, BLOCK_128),
    "nvfp4-amax": WeightSpec(E2M1, GROUP_16, E4M3),
    "nvfp4-channel": WeightSpec(E2M1, CHANNEL, E4M3),
    "nvfp4-one-block": WeightSpec(E2M1, TENSOR, E4M3),
    "search-16": WeightSpec(E2M1, GROUP_16, E8M0, ScaleRule.SEARCH),
} | {
    f"{element.name}-{rule.value}": WeightSpec(element, GROUP_32, E8M0, rule)
    for element in (E4M3, E2M1)
    for rule in (ScaleRule.FLOOR, ScaleRule.EVEN, ScaleRule.RCEIL, ScaleRule.SEARCH)
}  # fmt: skip
#: Specs whose searches choose between scales.
SEARCHES = ("mxfp4", "search-16", "E4M3-search", "nvfp4")


def distinct(specs: dict[str, WeightSpec]) -> list[str]:
    """The names of specs, of equal ones the first: several schemes have the same weights."""
    first: dict[WeightSpec, str] = {}
    for name, spec in specs.items():
        first.setdefault(spec, name)
    return list(first.values())


def raw(w: Tensor) -> npt.NDArray[np.uint8]:
    return w.contiguous().view(torch.uint8).numpy().reshape(-1)


def gaussian(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def even_columns(w: Tensor, spec: WeightSpec) -> Tensor:
    """`w` with one column more where the codes are packed in pairs and it has an odd number."""
    return torch.nn.functional.pad(w, (0, w.shape[1] % 2)) if spec.element is E2M1 else w


def quantize(
    w: Tensor, spec: WeightSpec, impl: str, tensor_amax: float | None = None, device: str = "cpu"
) -> QuantizedRows:
    """Into outputs full of garbage, so that an element left out shows."""
    rows, cols = w.shape
    grid = spec.granularity.scale_shape((rows, cols))
    if tensor_amax is None:
        tensor_amax = float(w.float().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return quantize_rows(
        raw(w),
        next(name for name, dtype in DTYPES.items() if dtype == w.dtype),
        (rows, cols),
        spec,
        tensor_amax=tensor_amax,
        impl=impl,
        device=device,
        out=(
            np.full((rows, cols // 2 if spec.element is E2M1 else cols), 0xAA, np.uint8),
            np.full(grid, np.nan, np.float32) if spec.scale is FLOAT32 else np.full(grid, 0xAA, np.uint8),
        ),
    )


def sixteen_bit_values(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All of them ``[256, 256]``: side by side in blocks of similar size, and shuffled: blocks span many binades."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = torch.where(torch.isfinite(values), values, 0.0)
    shuffled = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))]
    return values.view(256, 256), shuffled.view(256, 256)


def every_binade(rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Random bits: subnormals, the largest numbers, and everything between them, in any order and sorted."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (rows * cols,), generator=generator, dtype=torch.int64).to(torch.int32)
    w = torch.where(torch.isfinite(bits.view(torch.float32)), bits.view(torch.float32), 0.0)
    return w.view(rows, cols), w.sort().values.view(rows, cols)


def ties_and_neighbours(element: ElementFormat, scale: float) -> Tensor:
    """The values of the format, the midpoints between them and beyond the last, one ulp to either side, and more."""
    values = torch.tensor([element.decode(code) for code in range(element.max_code + 1)])
    midpoints = (values[1:] + values[:-1]) / 2
    last_step = values[-1] - values[-2]
    beyond = element.max + torch.tensor([last_step / 2, last_step, element.max, 1e30])
    points = torch.cat((values, midpoints, beyond))
    infinity = torch.tensor(torch.inf)
    near = torch.cat((points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity))) * scale
    return torch.cat((near, -near)).view(1, -1)


def between_equally_good_scales(spec: WeightSpec, blocks: int) -> tuple[Tensor, Tensor]:
    """Blocks on either side of where the choice of a scale changes, between two blocks with different choices.

    There the sums differ by their rounding, so by their order.
    """
    cols = spec.granularity.cols or 0
    left, right = gaussian((blocks, cols), seed=1), gaussian((blocks, cols), seed=2)
    right *= (left.abs().amax(1) / right.abs().amax(1))[:, None]
    low, high = torch.zeros(blocks, 1), torch.ones(blocks, 1)
    choice = torch.from_numpy(quantize(left, spec, "reference").scales).view(-1, 1)
    for _ in range(26):
        middle = (low + high) / 2
        same = torch.from_numpy(quantize(torch.lerp(left, right, middle), spec, "reference").scales) == choice
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.lerp(left, right, low), torch.lerp(left, right, high)


def assert_amax_is_that_of_finite_elements(
    shape: tuple[int, int], dtype: str, amax: Callable[[npt.NDArray[np.uint8]], tuple[float, int]]
) -> None:
    clean = gaussian(shape, DTYPES[dtype])
    dirty = clean.clone()
    dirty[0, 0], dirty[-1, -1] = torch.nan, -torch.inf
    for w in (clean, dirty):
        finite = torch.isfinite(w)
        largest = float(w[finite].abs().max()) if finite.any() else 0.0
        assert amax(raw(w)) == (largest, int((~finite).sum()))
