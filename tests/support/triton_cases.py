"""Triton kernels without a GPU: run by the interpreter in a process of its own, and compiled ahead of time."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

#: Compute capabilities that kernels are compiled for: A100, H100 and H200, B200.
TARGETS = (80, 90, 100)


def run_cases(file: Path, *, interpreted: bool) -> None:
    """Run a file of tests, by the interpreter on the CPU or on the GPU; fail with its output if a test fails."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
    paths = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parent)]
    environment["PYTHONPATH"] = os.pathsep.join([*paths, environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-2000:]}"


def device() -> str:
    """Return the device of the tensors in a file of cases."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@dataclass(frozen=True)
class Compiled:
    """A kernel, compiled."""

    ttgir: str  #: the program with the layouts of its tensors
    llir: str  #: what LLVM compiled
    ptx: str  #: its assembly
    cubin: bytes  #: its machine code
    stack: int  #: bytes of stack and local memory that a thread needs
    registers: int  #: registers of a thread
    shared: int  #: bytes of shared memory

    @cached_property
    def sass(self) -> str:
        """The disassembled machine code, which takes a third of a second; empty if there is no disassembler."""
        return _tool("nvdisasm", self.cubin, "-c", "-ndf")  # without its analysis of data flow

    @property
    def fused(self) -> int:
        """Fused multiply-adds of floating-point numbers in the PTX, one of two numbers counted twice."""
        return sum(1 + opcode.endswith("x2") for opcode in self.opcodes(r"(fma|mad)\..*f(32|64)"))

    @property
    def fused_on_request(self) -> int:
        """Fused multiply-adds that the kernel itself asks for; a difference to `fused` was made by the compiler."""
        return sum(int(width or 1) for width in re.findall(r"call .*@llvm\.fma\.(?:v(\d+))?f(?:32|64)\(", self.llir))

    def opcodes(self, pattern: str) -> list[str]:
        """The PTX instructions that match, without their operands."""
        return [
            found for found in re.findall(r"^\s+(?:@\S+ )?([a-z][\w.]+)", self.ptx, re.M) if re.match(pattern, found)
        ]


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    options: Mapping[str, Any] | None = None,
    aligned: tuple[str, ...] = (),
) -> Compiled:
    """Compile a kernel for an architecture that this machine need not have."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    positions = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    attrs = {positions[name]: [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, types, {positions[name]: value for name, value in constants.items()}, attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options or {}))
    usage = _resources(compiled.asm["cubin"])
    return Compiled(
        ttgir=compiled.asm["ttgir"],
        llir=compiled.asm["llir"],
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        stack=usage.get("STACK", 0) + usage.get("LOCAL", 0),
        registers=usage.get("REG", 0),
        shared=compiled.metadata.shared,
    )


def _resources(cubin: bytes) -> dict[str, int]:
    """Return the resources that a kernel uses according to cuobjdump."""
    text = _tool("cuobjdump", cubin, "--dump-resource-usage")
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}


def _tool(name: str, cubin: bytes, *options: str) -> str:
    """Run a binary tool that comes with triton on a cubin."""
    import tempfile

    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([str(path), *options, file.name], capture_output=True, text=True, check=True)
    return result.stdout
