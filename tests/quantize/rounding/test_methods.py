"""The codes of GPTQ against the formulas of the paper; the target of output matching against least squares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rounding_cases import correlated_inputs, hessian_of
from torch import Tensor

from minifloat.errors import UnknownNameError
from minifloat.numerics.cast import decode, encode, unpack_nibbles
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import BLOCK_128, CHANNEL
from minifloat.numerics.scheme import SCHEMES, WeightSpec
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.quantize.rounding.feedback import DAMPING, factorize
from minifloat.quantize.rounding.methods import (
    METHODS,
    RIDGE,
    TOKENS_PER_COLUMN,
    Grid,
    SharedInput,
    compensate,
    get_method,
    matched,
)
from minifloat.quantize.rounding.statistics import RESIDUAL_SHARE, Rows, Statistics

#: Specs with shapes (N, K); K of 128x128 blocks is also no multiple of 128, N neither.
CASES: list[tuple[str, WeightSpec, tuple[int, int]]] = [
    ("mxfp4", SCHEMES["mxfp4"].weight, (48, 96)),
    ("nvfp4", SCHEMES["nvfp4"].weight, (33, 80)),
    ("mxfp8", SCHEMES["mxfp8"].weight, (17, 64)),
    ("fp8", SCHEMES["fp8"].weight, (40, 75)),
    ("fp8-static", SCHEMES["fp8-static"].weight, (40, 75)),
    ("fp8-block", SCHEMES["fp8-block"].weight, (150, 170)),
    ("fp8-block-small", SCHEMES["fp8-block"].weight, (5, 130)),
]
cases = pytest.mark.parametrize(("spec", "shape"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])


def make_weight(shape: tuple[int, int], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def grid_of(weight: Tensor, spec: WeightSpec, amax: float | None = None) -> Grid:
    largest = float(weight.abs().amax()) if amax is None else amax
    return Grid.of(weight, spec, largest if spec.needs_tensor_amax else None)


def codes_of(quantized: QuantizedTensor) -> Tensor:
    """The codes uint8 ``[N, K]``, one per byte."""
    return unpack_nibbles(quantized.codes) if quantized.packed else quantized.codes


def scale_of_elements(quantized: QuantizedTensor) -> Tensor:
    """The scale of each element, float64 ``[N, K]``: dequantized ones."""
    element = quantized.spec.element
    one = int((decode(torch.arange(1 << element.bits, dtype=torch.uint8), element) == 1).nonzero()[0])
    codes = torch.full(quantized.shape, one, dtype=torch.uint8)
    grid = Grid(quantized).with_codes(codes)
    return grid.dequantize().double()


def assert_gptq(found: QuantizedTensor, weight: Tensor, grid: Grid, hessian: Tensor) -> None:
    """Assert that each code is the nearest one to what GPTQ rounds at its place, in the form of the paper.

    Source: Frantar et al., GPTQ (arXiv 2210.17323), algorithm 1, with static groups and columns by falling diagonal:
    the rows of the upper Cholesky factor of the inverse Hessian, in float64.
    """
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    damped = hessian.double()[order][:, order]
    damped.diagonal().add_(DAMPING * damped.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    rest, scales = weight.double()[:, order], scale_of_elements(grid.nearest)[:, order]
    assert torch.equal(found.scale, grid.nearest.scale)
    chosen = found.dequantize().double()[:, order]
    element = grid.spec.element
    values = decode(torch.arange(1 << element.bits, dtype=torch.uint8), element)
    values = values[values.isfinite()].double().unique()
    for j in range(len(order)):
        wanted = rest[:, j] / scales[:, j]
        best = (wanted[:, None] - values).abs().amin(1)
        distance = (wanted - chosen[:, j] / scales[:, j]).abs()
        assert (distance <= best + 1e-4 * (1 + wanted.abs())).all(), f"column {j}"  # of the midpoint between two codes
        error = (rest[:, j] - chosen[:, j]) / upper[j, j]
        rest[:, j:] -= error[:, None] * upper[j, j:]


@cases
def test_compensate_gives_the_codes_of_gptq_in_the_form_with_the_inverse(
    spec: WeightSpec, shape: tuple[int, int]
) -> None:
    weight, hessian = make_weight(shape), hessian_of(correlated_inputs(3 * shape[1], shape[1]))
    grid = grid_of(weight, spec)
    [found] = compensate(weight.float(), [grid], factorize(hessian, "q_proj"))
    assert_gptq(found, weight.float(), grid, hessian)
    changed = (codes_of(found) != codes_of(grid.nearest)).double().mean()
    assert 0.05 < changed < 0.9


@cases
def test_the_error_of_outputs_is_lower_than_that_of_rounding_to_nearest(
    spec: WeightSpec, shape: tuple[int, int]
) -> None:
    weight, inputs = make_weight(shape), correlated_inputs(6 * shape[1], shape[1])
    grid = grid_of(weight, spec)
    [found] = compensate(weight.float(), [grid], factorize(hessian_of(inputs), "q_proj"))

    def error(quantized: QuantizedTensor) -> float:
        return float((inputs @ (weight.float() - quantized.dequantize()).T).square().sum())

    assert error(found) < 0.7 * error(grid.nearest)


@cases
def test_weights_that_share_an_input_get_the_codes_that_each_gets_alone(
    spec: WeightSpec, shape: tuple[int, int]
) -> None:
    weights = [make_weight((rows, shape[1]), seed) for seed, rows in enumerate((shape[0], 16, 37))]
    feedback = factorize(hessian_of(correlated_inputs(3 * shape[1], shape[1])), "q_proj")
    amax = max(float(weight.abs().amax()) for weight in weights)
    grids = [grid_of(weight, spec, amax) for weight in weights]
    together = compensate(torch.cat(weights).float(), grids, feedback)
    for weight, grid, found in zip(weights, grids, together, strict=True):
        assert torch.equal(found.codes, compensate(weight.float(), [grid], feedback)[0].codes)


@cases
def test_columns_whose_input_is_always_zero_are_rounded_to_nearest(spec: WeightSpec, shape: tuple[int, int]) -> None:
    weight, inputs = make_weight(shape), correlated_inputs(3 * shape[1], shape[1])
    dead = torch.tensor([0, 3, shape[1] - 1])
    inputs[:, dead] = 0.0
    grid = grid_of(weight, spec)
    [found] = compensate(weight.float(), [grid], factorize(hessian_of(inputs), "q_proj"))
    assert torch.equal(codes_of(found)[:, dead], codes_of(grid.nearest)[:, dead])


@cases
def test_uncorrelated_inputs_are_rounded_to_nearest(spec: WeightSpec, shape: tuple[int, int]) -> None:
    grid = grid_of(make_weight(shape), spec)
    feedback = factorize(torch.diag(torch.rand(shape[1]) + 0.1), "q_proj")
    [found] = compensate(make_weight(shape).float(), [grid], feedback)
    assert torch.equal(found.codes, grid.nearest.codes)


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_grid_has_the_scales_and_the_nearest_codes_of_the_quantizer(
    spec: WeightSpec, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    amax = 2.0 * float(weight.abs().amax()) if spec.needs_tensor_amax else None
    grid = Grid.of(weight, spec, amax)
    expected = quantize_tensor(weight, spec, None if amax is None else torch.tensor(amax))
    assert torch.equal(grid.nearest.codes, expected.codes)
    assert torch.equal(grid.nearest.scale, expected.scale)
    assert torch.equal(grid.nearest.dequantize(), expected.dequantize())
    assert torch.equal(grid.with_codes(codes_of(grid.nearest)).codes, expected.codes)
    groups, scales = grid.column_groups(), grid.row_scales()
    assert torch.equal(scales[:, groups.long()].double(), scale_of_elements(expected))


def test_methods_are_found_by_name_and_a_wrong_name_lists_them() -> None:
    assert all(get_method(name).name == name for name in METHODS)
    with pytest.raises(UnknownNameError, match=r"nearest.*gptq.*match"):
        get_method("awq")


# ------------------------------------------------------------------------------------------------- output matching


def statistics_of(rows: Rows, weight: Tensor | None = None) -> Statistics:
    """The statistics of rows, computed in float64; `weight` adds to a residual stream."""
    inputs, tokens = rows.inputs.double(), len(rows.inputs)
    drift = rows.reference.double() - inputs
    if rows.residual is None:
        return Statistics(hessian_of(rows.inputs), (drift.T @ inputs / tokens).float(), None, tokens)
    assert weight is not None
    lacking = drift @ weight.double().T + RESIDUAL_SHARE * rows.residual.double()
    return Statistics(hessian_of(rows.inputs), None, (lacking.T @ inputs / tokens).float(), tokens)


def inputs_of(rows: Rows, held_out: Rows | None, weight: Tensor | None = None) -> SharedInput:
    statistics = statistics_of(rows, weight)
    return SharedInput(statistics, held_out)


def ridge_solution(inputs: Tensor, outputs: Tensor) -> Tensor:
    """The change of a weight ``[N, K]`` that is closest to giving `outputs`, under the ridge of the regression."""
    tokens, width = inputs.shape
    ridge = (max(RIDGE * width / tokens, DAMPING) * inputs.double().square().mean()).sqrt()
    rows = torch.cat([inputs.double() / tokens**0.5, ridge * torch.eye(width)])
    targets = torch.cat([outputs.double() / tokens**0.5, torch.zeros(width, outputs.shape[1])])
    return torch.linalg.lstsq(rows, targets).solution.T.float()


def drifting(tokens: int, width: int, seed: int, *, noise: bool = False, residual: bool = False) -> Rows:
    """Rows whose reference is a fixed linear map of the inputs; with `noise` it is the inputs plus noise."""
    generator = torch.Generator().manual_seed(99)
    change = 0.1 * torch.randn(width, width, generator=generator) * width**-0.5
    stream = torch.randn(width, 24, generator=generator) * width**-0.5
    inputs = correlated_inputs(tokens, width, seed)
    generator.manual_seed(seed + 100)
    drift = 0.1 * torch.randn(tokens, width, generator=generator) if noise else inputs @ change
    error = (0.1 * torch.randn(tokens, 24, generator=generator) if noise else inputs @ stream) if residual else None
    return Rows(inputs, inputs + drift, error)


def test_the_target_is_the_least_squares_solution_in_float64() -> None:
    weight = make_weight((24, 48)).float()
    rows, held_out = drifting(4000, 48, 0), drifting(400, 48, 1)
    target, details = matched(weight, inputs_of(rows, held_out))
    step = ridge_solution(rows.inputs, (rows.reference - rows.inputs) @ weight.T)
    assert 0.95 < details["drift_factor"] <= 1.0
    torch.testing.assert_close(target, weight + details["drift_factor"] * step, rtol=1e-4, atol=1e-4)
    error = ((held_out.reference @ weight.T - held_out.inputs @ target.T).square().sum()) ** 0.5
    before = ((held_out.reference @ weight.T - held_out.inputs @ weight.T).square().sum()) ** 0.5
    assert error < 0.3 * before  # the ridge keeps a part of it


def test_a_linear_that_adds_to_the_residual_stream_makes_up_for_half_of_its_error() -> None:
    weight = make_weight((24, 48)).float()
    rows, held_out = drifting(4000, 48, 0, residual=True), drifting(400, 48, 1, residual=True)
    target, details = matched(weight, inputs_of(rows, held_out, weight))
    assert rows.residual is not None
    drift_step = ridge_solution(rows.inputs, (rows.reference - rows.inputs) @ weight.T)
    stream_step = ridge_solution(rows.inputs, rows.residual)
    assert 0.95 < details["drift_factor"] <= 1.0
    expected = weight + details["drift_factor"] * (drift_step + RESIDUAL_SHARE * stream_step)
    torch.testing.assert_close(target, expected, rtol=1e-4, atol=1e-4)


def test_noise_that_the_inputs_do_not_explain_hardly_changes_the_target() -> None:
    weight = make_weight((24, 48)).float()
    rows, held_out = (drifting(tokens, 48, seed, noise=True, residual=True) for seed, tokens in ((0, 96), (1, 400)))
    target, details = matched(weight, inputs_of(rows, held_out, weight))
    assert 0.0 <= details["drift_factor"] < 0.15
    noise = ridge_solution(rows.inputs, (rows.reference - rows.inputs) @ weight.T).norm()
    assert (target - weight).norm() < 0.3 * noise


@pytest.mark.parametrize(("tokens", "factor"), [(TOKENS_PER_COLUMN * 48, 0.5), (100 * TOKENS_PER_COLUMN * 48, 0.99)])
def test_without_held_out_rows_the_drift_counts_by_the_tokens_per_column(tokens: int, factor: float) -> None:
    given = inputs_of(drifting(500, 48, 0), None)
    given = replace(given, statistics=replace(given.statistics, tokens=tokens))
    _, details = matched(make_weight((24, 48)).float(), given)
    assert details["drift_factor"] == pytest.approx(factor, abs=1e-3)


def test_without_drift_the_target_is_the_weight_and_the_codes_are_those_of_gptq() -> None:
    weight = make_weight((24, 64))
    inputs = correlated_inputs(300, 64)
    rows = Rows(inputs, inputs)
    grid = grid_of(weight, SCHEMES["mxfp4"].weight)
    statistics = statistics_of(rows)
    expected = get_method("gptq").round([weight.float()], [grid], SharedInput(statistics)).weights[0]
    for given in (statistics, replace(statistics, drift=None)):
        assert torch.equal(matched(weight.float(), SharedInput(given, rows))[0], weight.float())
        found = get_method("match").round([weight.float()], [grid], SharedInput(given, rows))
        assert torch.equal(found.weights[0].codes, expected.codes)


def test_match_takes_the_scales_with_the_least_error_where_columns_count_as_in_the_feedback() -> None:
    weight, spec = make_weight((24, 64)), SCHEMES["nvfp4"].weight
    inputs = correlated_inputs(300, 64) * torch.logspace(-1, 1, 64)[torch.randperm(64)]
    grid, given = grid_of(weight, spec), SharedInput(Statistics(hessian_of(inputs)))
    importance = torch.empty(64, dtype=torch.float64)
    importance[given.feedback.order] = given.feedback.scale
    columns = spec.granularity.cols
    assert columns is not None

    def errors(scales: Tensor) -> Tensor:
        """The error of each block, rounded to nearest with these scales, float64 ``[N, groups]``."""
        elements = replace(grid.nearest, scale=scales).block_scale().repeat_interleave(columns, 1)
        rounded = decode(encode(weight.float() / elements, spec.element), spec.element) * elements
        return ((rounded - weight).double().square() * importance).view(len(weight), -1, columns).sum(-1)

    [found] = get_method("match").round([weight.float()], [grid], given).weights
    assert not torch.equal(found.scale, grid.nearest.scale)
    assert torch.equal(found.scale, grid.fitted(weight.float(), given.feedback).nearest.scale)
    best = torch.stack([errors(torch.full_like(found.scale, code)) for code in range(1, 127)]).amin(0)
    torch.testing.assert_close(errors(found.scale), best, rtol=1e-5, atol=0.0)


def test_match_gives_lower_errors_than_gptq_where_the_inputs_drift() -> None:
    weight = make_weight((24, 64))
    rows, held_out = drifting(4000, 64, 0), drifting(400, 64, 1)
    grid, given = grid_of(weight, WeightSpec(E4M3, CHANNEL)), inputs_of(rows, held_out)

    def error(method: str) -> float:
        [quantized] = get_method(method).round([weight.float()], [grid], given).weights
        wanted = held_out.reference @ weight.float().T
        return float((wanted - held_out.inputs @ quantized.dequantize().T).square().sum())

    assert error("match") < 0.5 * error("gptq")
    assert error("nearest") > error("match")


def test_the_scales_of_blocks_cover_ragged_edges() -> None:
    grid = grid_of(make_weight((150, 170)), WeightSpec(E4M3, BLOCK_128))
    assert grid.row_scales().shape == (150, 2)
    assert grid.column_groups().tolist() == [0] * 128 + [1] * 42
    assert torch.equal(grid.row_scales()[127] == grid.row_scales()[128], torch.tensor([False, False]))
