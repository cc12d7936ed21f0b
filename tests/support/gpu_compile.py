"""Triton kernels compiled for a GPU that is not there, and the instructions of their main loop counted."""

# PYTHONPATH=src:tests/support python -m gpu_compile      prints the table of docs/gpu.md

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton_cases

from minifloat.kernels.linear.triton.config import Config, Device, by_arithmetic
from minifloat.kernels.linear.triton.kernels import dequantize_kernel, product_kernel
from minifloat.kernels.linear.triton.layout import TILE_COLS, GpuForm, Order
from minifloat.kernels.linear.triton.product import AHEAD, PARTS, constants

#: Data sheets: multiprocessors, and the shared memory that one CTA may have.
A100 = Device((8, 0), 108, 163 << 10, "A100")
L40S = Device((8, 9), 142, 99 << 10, "L40S")
H200 = Device((9, 0), 132, 227 << 10, "H200")
B200 = Device((10, 0), 148, 227 << 10, "B200")
#: Of Llama-8B, and of a 70B model.
SHAPES = ((4096, 4096), (28672, 8192))

_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
_BRANCH = re.compile(r"BRA.*?`\((\.L_x_\d+)\)")


@dataclass(frozen=True)
class Compiled:
    """The machine code of a kernel."""

    registers: int  #: of a thread
    stack: int  #: bytes of a thread that live in memory
    shared_bytes: int  #: of a CTA
    sass: Callable[[], str]  #: returns the machine code, disassembled
    weights: float  #: that a thread decodes in one pass through it
    ttgir: str  #: the program with the layouts of its tensors

    @functools.cached_property
    def loop(self) -> collections.Counter[str]:
        """How often each instruction occurs in the main loop; empty if there is no loop."""
        return collections.Counter(_main_loop(self.sass()))

    @property
    def first_axis_in_a_lane(self) -> int | None:
        """The axis, from the end, along which the first two units differ that a lane gives to the decoding PTX."""
        operands = [line for line in self.ttgir.splitlines() if "elementwise_inline_asm" in line and "bf16x2" in line]
        if not operands:
            return None
        layout = re.findall(r"xi16, (#\w+)>", operands[0])[0]
        registers = re.search(rf"^{layout} = #ttg.linear<{{register = \[\[([\d, ]+)\]", self.ttgir, re.MULTILINE)
        assert registers is not None, layout
        basis = [int(value) for value in registers[1].split(",")]
        return len(basis) - basis.index(1)

    @property
    def per_weight(self) -> float:
        """Instructions of the main loop per weight."""
        return self.loop.total() / self.weights

    @property
    def slow(self) -> list[str]:
        """Unwanted instructions of the main loop: single conversions and spilled registers."""
        return [name for name in self.loop if name.split(".")[0] in ("F2F", "LDL", "STL")]

    @property
    def tensor_core(self) -> int:
        """Tensor core instructions of the main loop."""
        return sum(count for name, count in self.loop.items() if _is_tensor_core(name))


def compile_product(
    form: GpuForm, config: Config, dtype: torch.dtype, device: Device, *, bias: bool = False
) -> Compiled:
    """Compile `product_kernel` as `multiply` launches it on aligned tensors."""
    names = ["x", "codes", "factors", "blocks", "rows", "bias", "y", "sums", "counts"]
    kinds = (_TYPES[dtype], "*i16", "*i32", "*fp32", "*fp32", "*fp32", _TYPES[dtype], "*fp32", "*i32")
    sizes = ["M", "N", "K", "x_stride", "y_stride", "tiles", "block_stride", "block_rows"]
    constexprs = {
        "BM": config.rows_m,
        "BN": config.rows_n,
        "T": config.tiles,
        "SPLIT": config.split,
        "PARTS": PARTS[dtype],
        "RAGGED": False,
        "BIAS": bias,
        "INTERP": False,
        "AHEAD": AHEAD if device.capability >= (9, 0) else 0,
        **constants(form, Order.of(device.capability)),
    }
    signature = {f"{name}_ptr": kind for name, kind in zip(names, kinds, strict=True)} | dict.fromkeys(sizes, "i32")
    aligned = [*(f"{name}_ptr" for name in names), "N", "K", "x_stride", "y_stride"]
    options = {"num_warps": config.warps, "num_stages": config.stages}
    weights = config.rows_n * config.tiles * TILE_COLS / (32 * config.warps)
    compiled = triton_cases.compile_ahead(
        product_kernel, signature, constexprs, _target(device), options, tuple(aligned)
    )
    return _counted(compiled, weights)


def compile_dequantize(form: GpuForm, dtype: torch.dtype, device: Device) -> Compiled:
    """Compile `dequantize_kernel`."""
    names = ["codes", "factors", "blocks", "rows", "y"]
    kinds = ("*i16", "*i32", "*fp32", "*fp32", _TYPES[dtype])
    sizes = ["first_row", "N", "K", "tiles", "block_stride", "block_rows"]
    signature = {f"{name}_ptr": kind for name, kind in zip(names, kinds, strict=True)} | dict.fromkeys(sizes, "i32")
    aligned = [*(f"{name}_ptr" for name in names), "N", "K", "first_row"]
    constexprs = constants(form, Order.of(device.capability))
    compiled = triton_cases.compile_ahead(
        dequantize_kernel, signature, constexprs, _target(device), {"num_warps": 4}, tuple(aligned)
    )
    return _counted(compiled, 1.0)


def _target(device: Device) -> int:
    return 10 * device.capability[0] + device.capability[1]


def _counted(compiled: triton_cases.Compiled, weights: float) -> Compiled:
    return Compiled(compiled.registers, compiled.stack, compiled.shared, lambda: compiled.sass, weights, compiled.ttgir)


def _main_loop(sass: str) -> list[str]:
    """Return the instructions of the shortest loop with tensor core instructions, or none."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.match(line):
            instructions.append(instruction[1])
            target = _BRANCH.match(instruction[1])
            if target and target[1] in labels:
                loops.append([text.split()[0] for text in instructions[labels[target[1]] :]])
    return min((loop for loop in loops if any(map(_is_tensor_core, loop))), key=len, default=[])


def _is_tensor_core(name: str) -> bool:
    return "MMA" in name


def main() -> None:
    """Print what the kernels cost per weight, for the documentation."""
    devices, shape = (A100, H200), SHAPES[1]
    print(f"triton {triton.__version__}, N x K = {shape[0]}x{shape[1]}, bfloat16 x\n")
    print("| form | M | " + " | ".join(device.name for device in devices) + " |")
    print("|---" * (2 + len(devices)) + "|")
    for form in GpuForm:
        for rows in (16, 64, 128):
            cells = []
            for device in devices:
                config = by_arithmetic(form, shape, rows, 1, device)
                compiled = compile_product(form, config, torch.bfloat16, device)
                shared = compiled.shared_bytes >> 10
                cells.append(f"{compiled.per_weight:.2f}, {compiled.registers}, {shared} KB")
            print(f"| {form.name} | {rows} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
