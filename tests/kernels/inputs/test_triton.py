"""`quantize_inputs`: its kernel in the interpreter, compiled ahead of time and on a GPU; and refused arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_cases import TARGETS, compile_ahead, needs_cuda, needs_triton, run_cases

from minifloat.errors import KernelUnavailable, ShapeError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels.inputs import quantize_inputs
from minifloat.numerics.activation import quantize_activation
from minifloat.numerics.formats import E2M1, FLOAT32
from minifloat.numerics.granularity import GROUP_128
from minifloat.numerics.scheme import SCHEMES, ActivationSpec

CASES = Path(__file__).with_name("triton_cases_inputs.py")
SPECS = {
    name: scheme.activation
    for name, scheme in SCHEMES.items()
    if scheme.activation and scheme.activation.scale is FLOAT32
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def scale_for(spec: ActivationSpec) -> torch.Tensor | None:
    return None if spec.dynamic else torch.tensor(0.01)


@needs_triton
def test_the_kernel_in_the_interpreter_is_the_oracle_bit_for_bit() -> None:
    run_cases(CASES, interpreted=True)


@needs_triton
@needs_cuda
def test_the_kernel_on_the_gpu_is_the_oracle_bit_for_bit() -> None:
    run_cases(CASES, interpreted=False)


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("cols", [4096, 14336])
@specs
def test_it_compiles_to_operations_that_round_as_ieee_754_has_it(
    spec: ActivationSpec, cols: int, capability: int
) -> None:
    from minifloat.kernels.inputs import triton

    integers = ("rows", "cols", "groups", "total", "x_stride", "scale_row_stride", "scale_col_stride")
    pointers = {"x_ptr": "*i16", "codes_ptr": "*u8", "scales_ptr": "*fp32", "given_ptr": "*fp32"}
    has_cast = capability >= 89
    arguments = triton.kernel_arguments(spec, torch.bfloat16, cols, given=not spec.dynamic, rounds_e4m3=has_cast)
    signature = pointers | dict.fromkeys(integers, "i32")
    aligned = ("x_ptr", "codes_ptr", "scales_ptr", "cols", "x_stride")
    options = triton.options(arguments)
    compiled = compile_ahead(triton.quantize_groups, signature, arguments, capability, options, aligned)
    assert compiled.opcodes(r"div\.rn\.f32$")
    assert not compiled.opcodes(r"div\.(full|approx)")
    assert compiled.fused == compiled.fused_on_request
    assert ".ftz" not in compiled.ptx
    assert set(compiled.opcodes(r"cvt\..*e4m3")) == ({"cvt.rn.satfinite.e4m3x2.f32"} if has_cast else set())
    assert compiled.stack == 0
    assert compiled.opcodes(r"ld\.global\..*v4")  # 16 bytes at a time


@specs
@pytest.mark.parametrize("shape", [(3, 300), (0, 4), (17, 128)])
def test_in_plain_torch_codes_and_scales_are_the_oracles(spec: ActivationSpec, shape: tuple[int, int]) -> None:
    x, scale = torch.randn(shape, generator=torch.Generator().manual_seed(0)), scale_for(spec)
    codes, scales = quantize_inputs(x, spec, scale, row_multiple=16)
    expected, grid = quantize_activation(x, spec, scale)
    assert codes.shape == (-(-shape[0] // 16) * 16, shape[1])
    assert torch.equal(codes[: shape[0]].view(torch.uint8), expected)
    assert not codes[shape[0] :].view(torch.uint8).any()
    assert torch.equal(scales[: grid.shape[0]], grid[: scales.shape[0]])
    assert scales.t().is_contiguous()


def test_invalid_arguments_of_quantize_inputs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    x, spec = torch.ones(2, 128), SPECS["fp8-dynamic"]
    with pytest.raises(KernelUnavailable, match=r"impl='triton'\) cannot run: (Triton kernels run on CUDA|triton is)"):
        quantize_inputs(x, spec, impl="triton")
    with pytest.raises(UnknownNameError, match="valid: auto, reference, triton"):
        quantize_inputs(x, spec, impl="cutlass")
    with pytest.raises(ShapeError, match=r"\[M, K\]"):
        quantize_inputs(x[0], spec)
    with pytest.raises(UnsupportedTensorError, match="not simulated"):
        quantize_inputs(x, ActivationSpec(E2M1, GROUP_128, dynamic=True))
    with pytest.raises(ValueError, match="needs a scale"):
        quantize_inputs(x, SPECS["fp8-static"])
