"""The Triton quantizer: results in the interpreter and on a GPU, its compiled code, and unsupported devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from quantize_cases import distinct
from triton_cases import TARGETS, compile_ahead, needs_cuda, needs_triton, run_cases

from minifloat.errors import KernelUnavailable
from minifloat.kernels.quantize import amax, quantize_rows, why_not
from minifloat.numerics.formats import E2M1, E4M3, E8M0
from minifloat.numerics.granularity import CHANNEL, block_granularity
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec

CASES = Path(__file__).with_name("triton_cases_quantize.py")
DATA = np.zeros(2 * 4 * 64, np.uint8)


@needs_triton
def test_the_kernel_in_the_interpreter_is_the_oracle_bit_for_bit() -> None:
    run_cases(CASES, interpreted=True)


@needs_triton
@needs_cuda
def test_the_kernel_on_the_gpu_is_the_oracle_bit_for_bit() -> None:
    run_cases(CASES, interpreted=False)


@needs_triton
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", distinct({name: scheme.weight for name, scheme in SCHEMES.items()}))
def test_it_compiles_to_operations_that_round_as_ieee_754_has_it(name: str, capability: int) -> None:
    """True divisions, nothing contracted or flushed to zero, the cast to E4M3 only where asked for, nothing spilled."""
    from minifloat.kernels.quantize import triton
    from minifloat.kernels.quantize.triton import blocks

    spec = SCHEMES[name].weight
    signature = {
        "w_ptr": "*i16",
        "codes_ptr": "*u8",
        "scales_ptr": "*u8" if spec.scale in (E4M3, E8M0) else "*fp32",
        "statistics_ptr": "*fp64",
        **dict.fromkeys(("rows", "cols", "grid_cols", "blocks", "tiles"), "i32"),
        "given_amax": "fp32",
        "divisor": "fp32",
    }
    has_cast = capability >= 89
    arguments = triton.kernel_arguments(spec, torch.int16, 4096, rounds_e4m3=has_cast)
    aligned = ("w_ptr", "codes_ptr", "scales_ptr", "cols")
    compiled = compile_ahead(
        blocks.quantize_blocks, signature, arguments, capability, triton.options(arguments), aligned
    )
    searches_powers = spec.scale is E8M0 and spec.rule is ScaleRule.SEARCH  # divides nothing
    assert bool(compiled.opcodes(r"div\.rn\.f32$")) == (not searches_powers)
    assert not compiled.opcodes(r"div\.(full|approx)")
    assert compiled.fused == compiled.fused_on_request
    assert all(".rn" in opcode for opcode in compiled.opcodes(r"(add|sub|mul)\..*f(32|64)"))
    assert ".ftz" not in compiled.ptx
    assert not compiled.opcodes(r"cvt\..*(e2m1|e5m2)")
    to_e4m3 = set(compiled.opcodes(r"cvt\..*e4m3x2\.f32"))
    assert to_e4m3 == ({"cvt.rn.satfinite.e4m3x2.f32"} if has_cast and spec.element is E4M3 else set())
    assert "f16x2.e4m3x2" not in compiled.ptx  # codes of the hardware are not decoded
    assert compiled.opcodes(r"ld\.global\.v4\.b32")
    assert compiled.opcodes(r"st\.global\.(v[24]\.b32|v2\.b64|b64)")
    assert compiled.stack == 0


def test_without_a_gpu_the_named_implementation_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        KernelUnavailable, match=r"impl='triton'\) cannot run: (no CUDA device|triton is not installed)"
    ):
        quantize_rows(DATA, "BF16", (4, 64), SCHEMES["fp8"].weight, impl="triton")
    with pytest.raises(KernelUnavailable, match=r"CUDA device|triton is not installed"):
        amax(DATA, "BF16", (4, 64), impl="triton", device="cpu")


@needs_triton
@pytest.mark.parametrize(
    "spec",
    [
        WeightSpec(E4M3, block_granularity(20, 20)),
        WeightSpec(E4M3, block_granularity(3, 128)),
        WeightSpec(E2M1, CHANNEL, E8M0, ScaleRule.SEARCH),
        WeightSpec(E4M3, CHANNEL, E8M0, ScaleRule.AMAX),
    ],
    ids=["20x20", "3x128", "search over rows", "no such rule"],
)
def test_why_not_names_specs_that_the_kernel_does_not_cover(spec: WeightSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not("triton", spec, "cpu")
    with pytest.raises(KernelUnavailable, match=r"impl='triton'\) cannot run"):
        quantize_rows(DATA, "BF16", (4, 64), spec, impl="triton", device="cpu")
