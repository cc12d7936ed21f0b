"""The kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

from triton_cases import needs_triton, run_cases


@needs_triton
def test_the_kernels_match_float64_in_the_interpreter() -> None:
    run_cases(Path(__file__).with_name("triton_cases_linear.py"), interpreted=True)
