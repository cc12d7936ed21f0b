"""The Triton quantizer against the reference, bit for bit; `test_triton.py` runs it in the interpreter and on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from modes import each_value
from triton_cases import device

from minifloat.kernels.quantize import QuantizedRows, amax, quantize_rows, triton
from minifloat.numerics.formats import E2M1, E4M3, E5M2, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, GROUP_128, TENSOR, block_granularity
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec

DEVICE = device()
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SPECS = {name: scheme.weight for name, scheme in SCHEMES.items()} | {
    "e5m2-channel": WeightSpec(E5M2, CHANNEL),
    "e5m2-block-32x64": WeightSpec(E5M2, block_granularity(32, 64)),
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
#: Around the sizes of groups and blocks, and of what a program takes (4096).
SHAPES = ((1, 1), (2, 30), (7, 100), (2, 4100), (129, 127))
#: Columns that are read 16 bytes at a time, with blocks and rows that reach beyond the slab.
ALIGNED = ((64, 64), (32, 64), (128, 64), (96, 48), (64, 160))
#: Of one value from sums in another order, both in float64.
SUMS_RTOL = 1e-12

#: The interpreter is slow: what does not depend on blocks and rules is tried with one scheme of each kind.
KINDS = ("fp8-block", "fp8", "fp8-static", "mxfp8", "mxfp4", "nvfp4")

specs = pytest.mark.parametrize("name", SPECS)
kinds = pytest.mark.parametrize("name", KINDS)


def gaussian(shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def quantize(w: torch.Tensor, spec: WeightSpec, impl: str, tensor_amax: float | None = None) -> QuantizedRows:
    """Into outputs full of garbage, so that an element left out shows."""
    rows, cols = w.shape
    grid = spec.granularity.scale_shape((rows, cols))
    if tensor_amax is None:
        tensor_amax = float(w.float().abs().nan_to_num(0.0, 0.0, 0.0).max())
    return quantize_rows(
        w.contiguous().view(torch.uint8).numpy().reshape(-1),
        next(name for name, dtype in DTYPES.items() if dtype == w.dtype),
        (rows, cols),
        spec,
        tensor_amax=tensor_amax,
        impl=impl,
        device=DEVICE,
        out_codes=np.full((rows, cols // 2 if spec.element is E2M1 else cols), 0xAA, np.uint8),
        out_scales=np.full(grid, np.nan, np.float32) if spec.scale is FLOAT32 else np.full(grid, 0xAA, np.uint8),
    )


def assert_matches(w: torch.Tensor, spec: WeightSpec, tensor_amax: float | None = None) -> None:
    if spec.element is E2M1:
        w = torch.nn.functional.pad(w, (0, w.shape[1] % 2))
    expected, actual = (quantize(w, spec, impl, tensor_amax) for impl in ("reference", "triton"))
    np.testing.assert_array_equal(actual.scales, expected.scales)
    np.testing.assert_array_equal(actual.codes, expected.codes)
    assert actual.nonfinite == expected.nonfinite
    for counted in ("elements", "saturated", "flushed"):
        assert getattr(actual.stats, counted) == getattr(expected.stats, counted)
    assert actual.stats.signal == pytest.approx(expected.stats.signal, rel=SUMS_RTOL, abs=0)
    assert actual.stats.noise == pytest.approx(expected.stats.noise, rel=SUMS_RTOL, abs=0)


@specs
def test_ragged_shapes(name: str) -> None:
    for seed, shape in enumerate(SHAPES if name in KINDS else SHAPES[2:3] + SHAPES[4:]):
        assert_matches(gaussian(shape, torch.bfloat16, seed), SPECS[name])


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter compiles nothing: ragged shapes are the same to it")
@pytest.mark.parametrize(("name", "dtype"), each_value(KINDS, list(DTYPES)))
def test_aligned_shapes_smaller_than_a_tile(name: str, dtype: str) -> None:
    for seed, shape in enumerate(ALIGNED):
        assert_matches(gaussian(shape, DTYPES[dtype], seed), SPECS[name])


@kinds
def test_programs_of_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_MANY_TILES", 2)
    assert_matches(gaussian((150, 390), torch.bfloat16), SPECS[name])


@pytest.mark.parametrize(("name", "dtype"), each_value(KINDS, ["F16", "F32"]))
def test_other_source_dtypes(name: str, dtype: str) -> None:
    assert_matches(gaussian((40, 260), DTYPES[dtype]), SPECS[name])


@kinds
def test_every_value_of_bfloat16(name: str) -> None:
    """Side by side in blocks of similar size, and shuffled so that every block spans many binades."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.where(torch.isfinite(values), values, 0.0)
    shuffled = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(0))]
    for order in (values, shuffled) if name in ("fp8-block", "mxfp4") else (shuffled,):
        assert_matches(order.view(256, 256), SPECS[name])


@kinds
def test_float32_of_every_binade(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (66 * 258,), generator=generator, dtype=torch.int64).to(torch.int32)
    w = torch.where(torch.isfinite(bits.view(torch.float32)), bits.view(torch.float32), 0.0)
    for order in (w, w.sort().values):
        assert_matches(order.view(66, 258), SPECS[name])


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
@pytest.mark.parametrize("scale", [1.0, 0.75, 1.0 / 3.0])
def test_ties_and_their_neighbours(element: ElementFormat, scale: float) -> None:
    """The values of the format, the midpoints between them and beyond the last, and one ulp to either side."""
    values = torch.tensor([element.decode(code) for code in range(element.max_code + 1)])
    midpoints = (values[1:] + values[:-1]) / 2
    last_step = values[-1] - values[-2]
    beyond = element.max + torch.tensor([last_step / 2, last_step, element.max, 1e30])
    points = torch.cat((values, midpoints, beyond))
    infinity = torch.tensor(torch.inf)
    near = torch.cat((points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity))) * scale
    w = torch.cat((near, -near)).view(1, -1)
    assert_matches(w, WeightSpec(element, TENSOR), tensor_amax=element.max * scale)


@pytest.mark.parametrize(("name", "factor"), each_value(KINDS, [1e-42, 1e-36, 1e37]))
def test_the_ends_of_float32(name: str, factor: float) -> None:
    assert_matches(gaussian((17, 200)) * factor, SPECS[name])


@pytest.mark.parametrize("name", ["mxfp4", "search-16", "E4M3-search", "nvfp4"])
def test_the_search_between_equally_good_scales(name: str) -> None:
    """Between two blocks with different choices lies one where the sums differ by their rounding, so by their order."""
    spec = SPECS[name]
    cols = spec.granularity.cols or 0
    left, right = gaussian((512, cols), seed=1), gaussian((512, cols), seed=2)
    right *= (left.abs().amax(1) / right.abs().amax(1))[:, None]
    low, high = torch.zeros(512, 1), torch.ones(512, 1)
    choice = torch.from_numpy(quantize(left, spec, "reference").scales).view(-1, 1)
    for _ in range(26):
        middle = (low + high) / 2
        same = torch.from_numpy(quantize(torch.lerp(left, right, middle), spec, "reference").scales) == choice
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    for t in (low, high):
        assert_matches(torch.lerp(left, right, t), spec)


@kinds
def test_zeros_and_outliers(name: str) -> None:
    mixed = gaussian((34, 260), torch.bfloat16)
    mixed[:, 128:] = 0
    mixed[33, 5] = 3e4
    for w in (mixed, -torch.zeros(3, 260, dtype=torch.bfloat16)):
        assert_matches(w, SPECS[name])


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.needs_tensor_amax])
@pytest.mark.parametrize("tensor_amax", [0.0, 1e-38, 1e-30, 1.0, 1e30])
def test_the_given_tensor_amax_is_used(name: str, tensor_amax: float) -> None:
    assert_matches(gaussian((5, 300), torch.bfloat16), SPECS[name], tensor_amax)


@pytest.mark.parametrize(("name", "dtype"), each_value(KINDS, list(DTYPES)))
def test_nan_and_inf_are_counted(name: str, dtype: str) -> None:
    w = gaussian((131, 140), DTYPES[dtype])
    w[0, 0], w[3, 139], w[130, 77], w[130, 78] = torch.nan, torch.inf, -torch.inf, -torch.nan
    assert quantize(w, SPECS[name], "triton").nonfinite == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_is_that_of_the_finite_elements(dtype: str) -> None:
    for shape in (*SHAPES, (30, 700)):
        clean = gaussian(shape, DTYPES[dtype])
        dirty = clean.clone()
        dirty[0, 0], dirty[-1, -1] = torch.nan, -torch.inf
        for w in (clean, dirty):
            data = w.view(torch.uint8).numpy().reshape(-1)
            expected = amax(data, dtype, shape, impl="reference")
            assert amax(data, dtype, shape, impl="triton", device=DEVICE) == expected


def test_read_only_memory_is_accepted() -> None:
    w = gaussian((3, 64), torch.bfloat16)
    data = np.frombuffer(w.view(torch.uint8).numpy().tobytes(), np.uint8)
    result = quantize_rows(data, "BF16", (3, 64), SPECS["mxfp8"], impl="triton", device=DEVICE)
    np.testing.assert_array_equal(result.codes, quantize(w, SPECS["mxfp8"], "reference").codes)
    assert amax(data, "BF16", (3, 64), impl="triton", device=DEVICE) == (float(w.abs().max()), 0)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has one state for all threads")
def test_many_threads_at_once_give_the_same() -> None:
    slabs = [gaussian(shape, torch.bfloat16, seed) for seed, shape in enumerate(((256, 1024), *ALIGNED))]
    jobs = [(w, SPECS[name]) for name in ("fp8-block", "mxfp4", "nvfp4", "fp8") for w in slabs] * 8
    alone = [quantize(w, spec, "triton") for w, spec in jobs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda job: quantize(*job, "triton"), jobs))
    for actual, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(actual.codes, expected.codes)
        np.testing.assert_array_equal(actual.scales, expected.scales)
        assert actual.stats == expected.stats
