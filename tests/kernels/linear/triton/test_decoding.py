"""The PTX code that decodes weights, emulated with one line of Python per instruction."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernel_cases import values_of

from minifloat.kernels.linear.triton.layout import LOWEST, TOP, _join_bytes, _join_nibbles, code_scales
from minifloat.numerics.formats import E2M1, E4M3

pytest.importorskip("triton", reason="triton is not installed")
from minifloat.kernels.linear.triton import kernels

Words = npt.NDArray[np.uint32]
_OPERATIONS: dict[str, Callable[..., Words]] = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "shf.r.wrap.b32": lambda low, high, n: (low >> n) | (high << (np.uint32(32) - n)),
    "fma.rn.bf16x2": lambda a, b, c: _pairs(_product(_halves(a), _halves(b), _halves(c))),
}


def _halves(words: Words) -> npt.NDArray[np.float64]:
    """Both bfloat16 of each word, lower first, as float64 ``[..., 2]``."""
    bits = np.stack(np.broadcast_arrays(words << np.uint32(16), words & np.uint32(0xFFFF0000)), axis=-1)
    return bits.view(np.float32).astype(np.float64)


def _product(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], c: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    assert (c == 0).all()
    assert np.signbit(c).all()
    return a * b


def _pairs(values: npt.NDArray[np.float64]) -> Words:
    """The way back; every value has to be a bfloat16 exactly."""
    bits = values.astype(np.float32).view(np.uint32)
    assert (bits.view(np.float32).astype(np.float64) == values).all()
    assert (bits & 0xFFFF == 0).all()
    return (bits[..., 0] >> np.uint32(16)) | bits[..., 1]


def run(ptx: str, inputs: dict[str, Words]) -> list[npt.NDArray[np.float64]]:
    """What the outputs of a block of PTX hold, as pairs of numbers."""
    registers = dict(inputs)
    operand = lambda text: registers[text] if text in registers else np.uint32(int(text, 0))  # noqa: E731
    for line in ptx.splitlines():
        instruction = re.fullmatch(r"(\S+) (\S+), (.*);", line)
        if instruction and not line.startswith(".reg"):
            name, target, operands = instruction.groups()
            registers[target] = _OPERATIONS[name](*(operand(text) for text in operands.split(", ")))
    return [
        _halves(registers[f"${index}"]) for index in range(len(registers)) if f"${index}" in registers.keys() - inputs
    ]


def words(units: torch.Tensor) -> Words:
    """int16 ``[..., 2]`` as words."""
    halves = units.numpy().view(np.uint16).astype(np.uint32)
    return halves[..., 0] | halves[..., 1] << np.uint32(16)


def twice(field: int) -> Words:
    """A bfloat16 power of two by its exponent field, in both halves."""
    return np.uint32(field << 7 | field << 23)


ZERO = np.uint32(kernels.MINUS_ZERO.value & 0xFFFFFFFF)


@pytest.mark.parametrize("field", [(kernels.E4M3_MULTIPLIER.value & 0xFFFF) >> 7, TOP, TOP - 100, 130])
def test_every_e4m3_code_in_every_place(field: int) -> None:
    codes = torch.arange(256, dtype=torch.int16)
    places = torch.stack([codes, codes.roll(1), codes.roll(78), codes.roll(200)], dim=-1).view(-1, 2, 2)  # e j
    first, second = run(kernels.FP8_PTX.value, {"$2": words(_join_bytes(places)), "$3": twice(field), "$5": ZERO})
    expected = values_of(E4M3)[places.long()] * 2.0 ** (field - 127 - 120)
    finite = ~expected.isnan()
    for result, j in ((first, 0), (second, 1)):
        assert torch.equal(torch.from_numpy(result)[finite[..., j]], expected[..., j][finite[..., j]])


def test_the_multiplier_of_e4m3_restores_its_value() -> None:
    assert np.float64(_halves(np.uint32(kernels.E4M3_MULTIPLIER.value))[0]) == 2.0**120


def e2m1_places() -> torch.Tensor:
    """int16 ``[words, e, j, s]``: every code in every place."""
    codes = torch.arange(16, dtype=torch.int16)
    return torch.stack([codes.roll(shift) for shift in (0, 3, 5, 6, 9, 11, 14, 15)], dim=-1).view(-1, 2, 2, 2)


@pytest.mark.parametrize("early", [TOP, 200, 128])
@pytest.mark.parametrize("late", [TOP, 131, 0])
def test_every_e2m1_code_in_every_place(early: int, late: int) -> None:
    places = e2m1_places()
    inputs = {"$4": words(_join_nibbles(places)), "$5": twice(early), "$7": twice(late), "$9": ZERO}
    results = run(kernels.FP4_PTX.value, inputs)
    exact = values_of(E2M1)[places.long()]
    for index, (s, j) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        field = late if s else early
        factor = 2.0 ** (field - TOP) if field else 0.0
        assert torch.equal(torch.from_numpy(results[index]), exact[:, :, j, s] * factor)


def test_every_e2m1_code_with_every_positive_e4m3_scale() -> None:
    places = e2m1_places()
    scales = torch.arange(1, E4M3.max_code + 1, dtype=torch.uint8)
    exact = values_of(E2M1)[places.long()] * 2.0**-8
    for scale, code in zip(values_of(E4M3)[scales.long()].tolist(), code_scales(scales).tolist(), strict=True):
        factor = np.uint32(code * 0x00100010 + (LOWEST << 7 | LOWEST << 23))  # as the kernel has it
        inputs = {"$4": words(_join_nibbles(places)), "$5": factor, "$7": factor, "$9": ZERO}
        for index, result in enumerate(run(kernels.FP4_PTX.value, inputs)):
            assert torch.equal(torch.from_numpy(result), exact[:, :, index % 2, index // 2] * scale)
    assert LOWEST << 7 | LOWEST << 23 == 0x75807580
