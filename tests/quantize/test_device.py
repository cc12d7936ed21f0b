"""Quantizing on a GPU writes the same files as on a CPU; devices and schemes without a kernel are refused first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from triton_cases import needs_cuda, needs_triton, run_cases

from minifloat.commands.main import main
from minifloat.errors import KernelUnavailable, UsageError
from minifloat.numerics.granularity import block_granularity
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

Make = Callable[..., Path]
CASES = Path(__file__).with_name("triton_cases_model.py")


@needs_triton
def test_the_device_path_writes_the_files_of_the_cpu_by_the_interpreter() -> None:
    run_cases(CASES, interpreted=True)


@needs_triton
@needs_cuda
def test_the_device_path_writes_the_files_of_the_cpu_on_the_gpu() -> None:
    run_cases(CASES, interpreted=False)


@pytest.mark.parametrize("device", ["gpu", "cpu:0", "cuda:", "cuda:x", "mps"])
def test_an_invalid_device_is_refused(make_checkpoint: Make, tmp_path: Path, device: str) -> None:
    with pytest.raises(UsageError, match="cpu, cuda or cuda:N"):
        quantize_checkpoint(make_checkpoint(), tmp_path / "out", options=QuantizeOptions(device=device))


def test_an_implementation_of_the_cpu_does_not_run_on_a_gpu(make_checkpoint: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'cpu' casts on the CPU, not on cuda"):
        quantize_checkpoint(make_checkpoint(), tmp_path / "out", options=QuantizeOptions(device="cuda", impl="cpu"))


def test_without_a_gpu_the_command_says_so_in_one_line_and_writes_nothing(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    source = make_checkpoint()
    result = CliRunner().invoke(main, ["quantize", str(source), str(tmp_path / "out"), "--device", "cuda"])
    assert result.exit_code == 2
    assert "fp8-dynamic cannot be cast on cuda: " in result.output
    assert len(result.output.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


@needs_triton
def test_a_scheme_that_the_gpu_does_not_cover_is_refused_before_anything_is_written(
    make_checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    weight = replace(SCHEMES["fp8-block"].weight, granularity=block_granularity(48, 48))
    odd = replace(SCHEMES["fp8-block"], name="odd", weight=weight, activation=None)
    source = make_checkpoint()
    with pytest.raises(KernelUnavailable, match="odd cannot be cast on cpu: blocks must be a power of two wide"):
        quantize_checkpoint(source, tmp_path / "out", odd, QuantizeOptions(impl="triton"))
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
