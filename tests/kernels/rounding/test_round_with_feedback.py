"""`round_with_feedback`: every instruction set against plain torch, bit for bit, and the checks of its arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from kernel_cases import Guarded, Kernels, flushing_subnormals
from modes import each_value
from quantize_cases import ties_and_neighbours

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.native import STRUCTS, format_struct
from minifloat.kernels.rounding import ROW_BLOCK, round_with_feedback
from minifloat.numerics.cast import decode, encode
from minifloat.numerics.formats import E2M1, E4M3, E5M2, E8M0, ElementFormat

ELEMENTS = (E2M1, E4M3, E5M2)
#: Around the widths of vectors (4 to 16), tiles of rows (8 to 48), panels (4, 8), blocks (128), chunks (192 rows).
SHAPES = ((1, 1), (3, 2), (1, 300), (17, 9), (48, 128), (49, 127), (5, 129), (191, 40), (200, 257), (400, 13))

elements = pytest.mark.parametrize("element", ELEMENTS, ids=lambda element: element.name)


@dataclass(frozen=True)
class Case:
    """The arguments of `round_with_feedback`."""

    weight: torch.Tensor
    scales: torch.Tensor
    groups: torch.Tensor
    feedback: torch.Tensor
    element: ElementFormat
    row_feedback: torch.Tensor | None = None

    def codes(self, impl: str = "reference") -> torch.Tensor:
        arguments = self.weight, self.scales, self.groups, self.feedback, self.element, self.row_feedback
        return round_with_feedback(*arguments, impl=impl)

    def with_row_feedback(self, seed: int = 1) -> Case:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(len(self.weight), ROW_BLOCK, generator=generator) * ROW_BLOCK**-0.5
        behind = torch.arange(ROW_BLOCK) > (torch.arange(len(rows)) % ROW_BLOCK)[:, None]
        return replace(self, row_feedback=rows * behind)


def make(rows: int, cols: int, element: ElementFormat, seed: int = 0, group: int = 16) -> Case:
    """A weight with groups of columns in random order; some elements are clamped, some are zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=generator)
    num_groups = -(-cols // group)
    scales = (torch.rand(rows, num_groups, generator=generator) + 0.5) * 2 / element.max
    groups = (torch.arange(cols, dtype=torch.int32) // group)[torch.randperm(cols, generator=generator)]
    feedback = torch.randn(cols, cols, generator=generator) * max(cols, 1) ** -0.5
    feedback[torch.ones(cols, cols).tril().bool()] = torch.nan  # never read
    return Case(weight, scales, groups, feedback, element)


def run(kernels: Kernels, case: Case, threads: int = 1, fill: int = 0) -> torch.Tensor:
    """Codes by one instruction set, into memory filled with a byte; checks that nothing around it is written."""
    rows, cols = case.weight.shape
    buffer = torch.full((rows * cols + 128,), fill, dtype=torch.uint8)
    element = case.element
    args = STRUCTS["round_with_feedback_args"](
        weight=case.weight.data_ptr(),
        scales=case.scales.data_ptr(),
        group_of=case.groups.data_ptr(),
        feedback=case.feedback.data_ptr(),
        row_feedback=None if case.row_feedback is None else case.row_feedback.data_ptr(),
        codes=buffer[64:].data_ptr(),
        rows=rows,
        cols=cols,
        groups=case.scales.shape[1],
        element=format_struct(element),
        threads=threads,
    )
    kernels.library.call("round_with_feedback", args)
    assert (buffer[:64] == fill).all()
    assert (buffer[rows * cols + 64 :] == fill).all()
    return buffer[64 : rows * cols + 64].view(rows, cols)


@pytest.mark.parametrize(("shape", "element"), each_value(SHAPES, ELEMENTS))
def test_ragged_shapes(kernels: Kernels, shape: tuple[int, int], element: ElementFormat) -> None:
    case = make(*shape, element, seed=sum(shape))
    expected = case.codes()
    for fill in (0xA5, 0x5A):
        assert torch.equal(run(kernels, case, fill=fill), expected)


@pytest.mark.parametrize(("shape", "element"), each_value(SHAPES, ELEMENTS))
def test_ragged_shapes_with_feedback_between_rows(
    kernels: Kernels, shape: tuple[int, int], element: ElementFormat
) -> None:
    case = make(*shape, element, seed=sum(shape)).with_row_feedback()
    expected = case.codes()
    assert shape[0] < ROW_BLOCK // 4 or not torch.equal(expected, replace(case, row_feedback=None).codes())
    for fill in (0xA5, 0x5A):
        assert torch.equal(run(kernels, case, fill=fill), expected)


@pytest.mark.parametrize("threads", [0, 2, 3, 5, 1000])
def test_the_number_of_threads_changes_no_code(kernels: Kernels, threads: int) -> None:
    case = make(500, 150, E2M1)
    assert torch.equal(run(kernels, case, threads), case.codes())
    case = case.with_row_feedback()
    assert torch.equal(run(kernels, case, threads), case.codes())


def test_without_feedback_every_element_is_rounded_to_nearest(kernels: Kernels) -> None:
    case = make(70, 300, E4M3)
    case = replace(case, feedback=torch.zeros(300, 300))
    assert torch.equal(run(kernels, case), encode(case.weight / case.scales[:, case.groups.long()], E4M3))


@elements
def test_ties_and_every_code_are_rounded_as_the_cast_does(kernels: Kernels, element: ElementFormat) -> None:
    weight = ties_and_neighbours(element, 1.0)
    cols = weight.shape[1]
    groups = torch.zeros(cols, dtype=torch.int32)
    case = Case(weight, torch.ones(1, 1), groups, torch.zeros(cols, cols), element)
    # Adding an update of zero makes -0 zero.
    assert torch.equal(run(kernels, case), encode(weight + 0.0, element))


def test_the_product_is_rounded_before_it_is_added(kernels: Kernels) -> None:
    """The second column becomes 0.25, a tie that rounds to 0; with a fused multiply-add it would be above the tie."""
    error = torch.tensor(1 + 2.0**-12)  # its square needs 25 bits
    weight = torch.stack((E2M1.max + error, 0.25 - error * error)).view(1, 2)
    feedback = torch.tensor([[0.0, float(error)], [0.0, 0.0]])
    case = Case(weight, torch.ones(1, 1), torch.zeros(2, dtype=torch.int32), feedback, E2M1)
    assert float(weight[0, 1]) + float(error) ** 2 > 0.25
    assert run(kernels, case).tolist() == case.codes().tolist() == [[E2M1.max_code, 0]]


def test_large_and_subnormal_scales_and_the_floating_point_mode_of_the_caller(kernels: Kernels) -> None:
    case = make(60, 140, E4M3)
    for factor in (1e-38, 1e-30, 1e30):
        scaled = replace(case, weight=case.weight * factor, scales=case.scales * factor)
        expected = scaled.codes()
        assert torch.equal(run(kernels, scaled), expected)
        with flushing_subnormals():
            actual = run(kernels, scaled, threads=2)
        assert torch.equal(actual, expected)


def test_nothing_outside_of_the_tensors_is_read(kernels: Kernels) -> None:
    case = make(50, 133, E2M1)
    guards = [Guarded(tensor.nbytes) for tensor in (case.weight, case.scales, case.groups, case.feedback)]
    for place in ("at_the_end", "at_the_start"):
        moved = [
            getattr(guard, place)(tensor)
            for guard, tensor in zip(guards, (case.weight, case.scales, case.groups, case.feedback), strict=True)
        ]
        assert torch.equal(run(kernels, Case(*moved, E2M1)), case.codes())


def test_the_library_refuses_groups_outside_of_the_scales(kernels: Kernels) -> None:
    case = make(4, 40, E2M1)
    for group in (-1, 3):
        groups = case.groups.clone()
        groups[-1] = group
        with pytest.raises(ValueError, match="refused"):
            run(kernels, replace(case, groups=groups))


def test_the_error_of_the_output_falls_below_that_of_nearest() -> None:
    """With the feedback of an LDL decomposition, on inputs that are correlated."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(600, 32, generator=generator) @ torch.randn(32, 96, generator=generator)
    x += 0.3 * torch.randn(600, 96, generator=generator)
    hessian = (x.T @ x).double() / len(x)
    # H = L D L^T from the last column up: column j may correct what the columns before it did.
    upper = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    feedback = (upper / upper.diagonal()).float().contiguous()
    case = replace(make(24, 96, E2M1), feedback=feedback)
    nearest = replace(case, feedback=torch.zeros(96, 96)).codes("auto")

    def error(codes: torch.Tensor) -> float:
        off = case.weight - decode(codes, E2M1) * case.scales[:, case.groups.long()]
        return float(((x @ off.T) ** 2).sum())

    assert error(case.codes("auto")) < 0.6 * error(nearest)


def test_an_empty_weight_has_no_codes() -> None:
    for rows, cols in ((0, 5), (5, 0)):
        assert make(rows, cols, E2M1).codes("auto").shape == (rows, cols)


def test_arguments_that_do_not_match_are_refused_by_name() -> None:
    case = make(4, 32, E2M1)
    with pytest.raises(ShapeError, match=r"scales.*\[4, G\]"):
        replace(case, scales=case.scales[:3]).codes()
    with pytest.raises(ShapeError, match=r"groups.*\[32\]"):
        replace(case, groups=case.groups[:31]).codes()
    with pytest.raises(ShapeError, match="0 to 2 of the 2 columns"):
        replace(case, groups=(case.groups * 2)).codes()
    with pytest.raises(ShapeError, match=r"feedback.*\[32, 32\]"):
        replace(case, feedback=case.feedback[:, :31].contiguous()).codes()
    with pytest.raises(ShapeError, match=rf"row_feedback.*\[4, {ROW_BLOCK}\]"):
        replace(case, row_feedback=torch.zeros(4, 4)).codes()
    with pytest.raises(ShapeError, match=r"weight.*2 dimensions"):
        replace(case, weight=case.weight[0]).codes()
    with pytest.raises(UnsupportedTensorError, match=r"weight.*float32.*bfloat16"):
        replace(case, weight=case.weight.bfloat16()).codes()
    with pytest.raises(UnsupportedTensorError, match=r"groups.*int32.*int64"):
        replace(case, groups=case.groups.long()).codes()
    with pytest.raises(UnsupportedTensorError, match=r"feedback.*contiguous"):
        replace(case, feedback=case.feedback.T).codes()
    with pytest.raises(ValueError, match="signed format"):
        replace(case, element=E8M0).codes()
    with pytest.raises(UnknownNameError, match="valid: auto"):
        case.codes("fast")


def test_without_the_library_auto_is_the_reference_and_cpu_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(3, 20, E2M1)
    expected = case.codes("auto")
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setattr(native, "why_unavailable", lambda: "not built")
    assert torch.equal(case.codes("auto"), expected)
    with pytest.raises(KernelUnavailable, match="not built"):
        case.codes("cpu")


def test_the_reference_leaves_its_arguments_as_they_are() -> None:
    case = make(5, 20, E2M1)
    before = case.weight.clone()
    case.codes("reference")
    assert torch.equal(case.weight, before)
