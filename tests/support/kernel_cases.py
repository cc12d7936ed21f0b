"""Weights made code by code, their values in float64, and the kernels called below the public API."""

from __future__ import annotations

import ctypes
import enum
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from minifloat.kernels import native
from minifloat.kernels.native import STRUCTS, format_struct
from minifloat.numerics.formats import E2M1, E4M3, E8M0, FLOAT32, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import ActivationSpec

# Values come from the tables of `minifloat.numerics.formats` in float64, and `Kernels` fills the structs of
# ``native/api.h`` itself: they share nothing with what they test.

LIBRARY = native.load()
ISAS = () if LIBRARY is None else LIBRARY.isas


class InputScaling(enum.IntEnum):
    """``enum minifloat_input_scaling``."""

    GIVEN = 0
    TENSOR = 1
    BLOCK = 2


class Element(enum.IntEnum):
    """``enum minifloat_element``."""

    E4M3 = 0
    E2M1 = 1
    BF16 = 2
    F16 = 3
    F32 = 4


class Grid(enum.IntEnum):
    """``enum minifloat_grid``."""

    ROW = 0
    BLOCK = 1
    E8M0 = 2
    E4M3 = 3


@dataclass(frozen=True)
class Kind:
    """A format of weights, with the rows and columns that share a scale; None for the whole extent."""

    element: Element
    grid: Grid
    block: tuple[int | None, int | None]


KINDS = {
    "fp8-tensor": Kind(Element.E4M3, Grid.ROW, (None, None)),
    "fp8-channel": Kind(Element.E4M3, Grid.ROW, (1, None)),
    "fp8-block-128": Kind(Element.E4M3, Grid.BLOCK, (128, 128)),
    "fp8-block-64": Kind(Element.E4M3, Grid.BLOCK, (64, 64)),
    "fp8-block-48x96": Kind(Element.E4M3, Grid.BLOCK, (48, 96)),
    "fp8-group-128": Kind(Element.E4M3, Grid.BLOCK, (1, 128)),
    "fp8-group-32": Kind(Element.E4M3, Grid.BLOCK, (1, 32)),
    "mxfp8": Kind(Element.E4M3, Grid.E8M0, (1, 32)),
    "mxfp4": Kind(Element.E2M1, Grid.E8M0, (1, 32)),
    "nvfp4": Kind(Element.E2M1, Grid.E4M3, (1, 16)),
    "bf16": Kind(Element.BF16, Grid.ROW, (None, None)),
    "f16": Kind(Element.F16, Grid.ROW, (None, None)),
    "f32": Kind(Element.F32, Grid.ROW, (None, None)),
}

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Elements that are not quantized.
FLOATS = dict(zip((Element.BF16, Element.F16, Element.F32), DTYPES, strict=True))
_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

#: Largest relative L2 error of a result of that dtype: what rounding it costs and little more.
BARS = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}
#: Half a step of that dtype, relative to the smallest value that has such steps.
HALF_STEPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
#: Outputs that a relative L2 error is averaged over at least.
ENOUGH = 1000


def inputs(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


@contextmanager
def flushing_subnormals() -> Iterator[None]:
    """The calling thread flushes subnormal numbers; skips the test where the processor cannot."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def values_of(element: ElementFormat) -> torch.Tensor:
    """Return the values of all codes of a format, float64 ``[codes]``."""
    return torch.tensor(element.values, dtype=torch.float64)


@dataclass(frozen=True)
class Stored:
    """A weight ``[N, K]`` as a checkpoint stores it."""

    kind: Kind  #: its format
    codes: torch.Tensor  #: uint8 ``[N, K]``, one code each; values of floats
    scales: torch.Tensor | None  #: the grid of the kind: float32, or uint8 codes; None for floats
    factor: float = 1.0  #: multiplies every scale

    @property
    def shape(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    @property
    def block(self) -> tuple[int, int]:
        rows, cols = self.kind.block
        return (rows or self.shape[0], cols or self.shape[1])

    def bytes_of_codes(self) -> torch.Tensor:
        """The codes as stored: two of four bits to a byte, the even column low."""
        if self.kind.element is Element.E2M1:
            return self.codes[:, 0::2] | self.codes[:, 1::2] << 4
        return self.codes.contiguous()

    def scale_values(self) -> torch.Tensor:
        """The scale of each element: float64 ``[N, K]``."""
        if self.scales is None:
            return torch.ones(self.shape, dtype=torch.float64)
        if self.kind.grid is Grid.E8M0:
            grid = values_of(E8M0)[self.scales.long()]
        elif self.kind.grid is Grid.E4M3:
            grid = values_of(E4M3)[self.scales.long()]
        else:
            grid = self.scales.double()
        rows, cols = self.block
        return grid.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: self.shape[0], : self.shape[1]]

    def values(self) -> torch.Tensor:
        """The dequantized weight: float64 ``[N, K]``."""
        if self.kind.element in FLOATS:
            return self.codes.double()
        elements = values_of(E4M3 if self.kind.element is Element.E4M3 else E2M1)[self.codes.long()]
        return elements * self.scale_values() * float(torch.tensor(self.factor, dtype=torch.float32))


def finite_codes(element: ElementFormat) -> torch.Tensor:
    """Return every code that is not NaN, uint8."""
    return torch.tensor([code for code, value in enumerate(element.values) if value == value], dtype=torch.uint8)


def grid_shape(kind: Kind, rows: int, cols: int) -> tuple[int, int]:
    block_rows, block_cols = kind.block
    return (-(-rows // (block_rows or rows)), -(-cols // (block_cols or cols)))


def make(name: str, rows: int, cols: int, seed: int = 0) -> Stored:
    """Return a weight of random finite codes, uniformly distributed, and scales of about a hundredth."""
    kind = KINDS[name]
    random = torch.Generator().manual_seed(seed)
    if kind.element in FLOATS:
        return Stored(kind, (torch.randn(rows, cols, generator=random) * 0.02).to(FLOATS[kind.element]), None)
    pool = finite_codes(E4M3 if kind.element is Element.E4M3 else E2M1)
    codes = pool[torch.randint(len(pool), (rows, cols), generator=random)]
    shape = grid_shape(kind, rows, cols)
    if kind.grid is Grid.E8M0:
        return Stored(kind, codes, torch.randint(115, 123, shape, generator=random, dtype=torch.uint8))
    if kind.grid is Grid.E4M3:
        return Stored(kind, codes, torch.randint(1, 127, shape, generator=random, dtype=torch.uint8), factor=0.0123)
    return Stored(kind, codes, torch.rand(shape, generator=random) * 0.02 + 1e-3)


def fits(name: str, cols: int) -> bool:
    """Return whether a weight of the format may have `cols` columns."""
    return KINDS[name].element is not Element.E2M1 or cols % 2 == 0


@dataclass(frozen=True)
class Packed:
    """A packed weight and the stored weight that it was packed from."""

    blob: torch.Tensor
    stored: Stored


#: Bits of a NaN that no arithmetic makes: what is left of it was not written.
_GARBAGE = {torch.bfloat16: 0x7FD5, torch.float16: 0x7ED5, torch.float32: 0x7FD5D5D5}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_PADDING = 5
#: Elements of the widest vector: a kernel that stores a whole one at the end writes into a padding of these.
_VECTOR = 16


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as integers, so that NaNs compare equal too."""
    return tensor.contiguous().view(_BITS[tensor.dtype])


def garbage(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[rows, cols]`` of NaNs that `written` recognises."""
    return torch.full((rows, cols), _GARBAGE[dtype], dtype=_BITS[dtype]).view(dtype)


def written(tensor: torch.Tensor) -> torch.Tensor:
    """Return which elements of a tensor of `garbage` have been written."""
    return bits(tensor) != _GARBAGE[tensor.dtype]


class Kernels:
    """The native kernels on one instruction set."""

    def __init__(self, isa: str) -> None:
        assert LIBRARY is not None
        self.library = LIBRARY.with_isa(isa)

    def pack_args(self, stored: Stored, codes: torch.Tensor, scales: torch.Tensor | None) -> ctypes.Structure:
        """The struct for a weight, without its destination; it points into `codes` and `scales`."""
        (rows, cols), (block_rows, block_cols) = stored.shape, stored.block
        return STRUCTS["pack_args"](
            codes=codes.data_ptr(),
            scales=None if scales is None else scales.data_ptr(),
            rows=rows,
            cols=cols,
            block_rows=block_rows,
            block_cols=block_cols,
            element=stored.kind.element,
            grid=stored.kind.grid,
            factor=stored.factor,
            threads=1,
        )

    def pack(self, stored: Stored, threads: int = 1) -> Packed:
        codes, scales = stored.bytes_of_codes(), None if stored.scales is None else stored.scales.contiguous()
        args = self.pack_args(stored, codes, scales)
        size = self.library.packed_bytes(args)
        assert size > 0, "no layout for this weight"
        blob = torch.full((size,), 0xA5, dtype=torch.uint8)
        args.packed, args.threads = blob.data_ptr(), threads
        self.library.call("pack", args)
        return Packed(blob, stored)

    def unpack(self, packed: Packed, threads: int = 1) -> Stored:
        """Unpack the codes and scales of the blob."""
        stored = packed.stored
        codes = torch.full_like(stored.bytes_of_codes(), 0x33)
        scales = None if stored.scales is None else torch.full_like(stored.scales, 0x55)
        args = self.pack_args(stored, codes, scales)
        args.packed, args.threads = packed.blob.data_ptr(), threads
        self.library.call("unpack", args)
        if stored.kind.element is Element.E2M1:
            codes = torch.stack([codes & 0xF, codes >> 4], dim=-1).flatten(1)
        return replace(stored, codes=codes, scales=scales)

    def linear_args(
        self,
        x: torch.Tensor,
        weights: Sequence[Packed],
        biases: Sequence[torch.Tensor | None] | None,
        y: torch.Tensor,
        threads: int,
        int8_inputs: int = 0,
        batch_invariant: bool = False,
    ) -> ctypes.Structure:
        """The struct for a call; it points into the tensors, and keeps alive only the lists of pointers."""
        pointers = _pointers([weight.blob for weight in weights])
        bias_pointers = None if biases is None else _pointers(biases)
        bias_dtypes = {bias.dtype for bias in biases or () if bias is not None}
        return STRUCTS["linear_args"](
            weights=ctypes.cast(pointers, ctypes.c_void_p),
            biases=None if bias_pointers is None else ctypes.cast(bias_pointers, ctypes.c_void_p),
            x=x.data_ptr(),
            y=y.data_ptr(),
            x_stride=x.stride(0),
            y_stride=y.stride(0),
            m=x.shape[0],
            count=len(weights),
            x_dtype=_CODES[x.dtype],
            bias_dtype=_CODES[bias_dtypes.pop()] if bias_dtypes else 0,
            threads=threads,
            int8_inputs=int8_inputs,
            batch_invariant=batch_invariant,
        )

    def linear(
        self,
        x: torch.Tensor,
        weights: Packed | Sequence[Packed],
        biases: Sequence[torch.Tensor | None] | torch.Tensor | None = None,
        threads: int = 1,
        y: torch.Tensor | None = None,
        int8_inputs: int = 0,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """The result for `x`, whose rows may be any distance apart; into `y` where it is given."""
        weights = [weights] if isinstance(weights, Packed) else list(weights)
        biases = [biases] if isinstance(biases, torch.Tensor) else biases
        width = sum(weight.stored.shape[0] for weight in weights)
        buffer = garbage(x.shape[0], width + _PADDING, x.dtype) if y is None else y
        args = self.linear_args(x, weights, biases, buffer, threads, int8_inputs, batch_invariant)
        self.library.call("linear", args)
        return _checked(buffer, width) if y is None else y

    def rounds_inputs(self, weight: Packed, x: torch.Tensor) -> bool:
        """Whether `linear` with `int8_inputs` rounds `x`."""
        return self.library.rounds_inputs(weight.blob.data_ptr(), x.shape[0], _CODES[x.dtype])

    def moe(
        self,
        x: torch.Tensor,
        weights: Sequence[Packed],
        counts: Sequence[int],
        x_rows: torch.Tensor | None = None,
        biases: Sequence[torch.Tensor] | None = None,
        threads: int = 1,
        int8_inputs: bool = False,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """`counts` rows of the result for each expert."""
        offsets = torch.tensor([0, *counts]).cumsum(0)
        width = weights[0].stored.shape[0]
        buffer = garbage(int(offsets[-1]), width + _PADDING, x.dtype)
        pointers = _pointers([weight.blob for weight in weights])
        bias_pointers = None if biases is None else _pointers(biases)
        args = STRUCTS["moe_args"](
            weights=ctypes.cast(pointers, ctypes.c_void_p),
            biases=ctypes.cast(bias_pointers, ctypes.c_void_p) if bias_pointers is not None else None,
            offsets=offsets.data_ptr(),
            x_rows=None if x_rows is None else x_rows.data_ptr(),
            x=x.data_ptr(),
            y=buffer.data_ptr(),
            x_stride=x.stride(0),
            y_stride=buffer.stride(0),
            experts=len(weights),
            x_dtype=_CODES[x.dtype],
            bias_dtype=_CODES[biases[0].dtype] if biases else 0,
            threads=threads,
            int8_inputs=int8_inputs,
            batch_invariant=batch_invariant,
        )
        self.library.call("moe", args)
        return _checked(buffer, width)

    def round_inputs(
        self, x: torch.Tensor, spec: ActivationSpec, scale: torch.Tensor | None = None, threads: int = 1
    ) -> torch.Tensor:
        """The result for `x`, whose rows may be any distance apart, into memory at an odd address; checks the same."""
        (rows, cols), element = x.shape, spec.element
        dynamic = InputScaling.TENSOR if spec.granularity == TENSOR else InputScaling.BLOCK
        before, after = _PADDING, _VECTOR
        buffer = garbage(1, before + rows * cols + after, torch.float32)[0]
        args = STRUCTS["round_inputs_args"](
            x=x.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            y=buffer[before:].data_ptr(),
            rows=rows,
            cols=cols,
            x_stride=x.stride(0),
            block_cols=spec.granularity.block((rows, cols))[1],
            element=format_struct(element),
            dtype=_CODES[x.dtype],
            scaling=dynamic if scale is None else InputScaling.GIVEN,
            zero_scale=2.0**-FLOAT32.mantissa_bits,
            threads=threads,
        )
        self.library.call("round_inputs", args)
        assert not written(buffer[:before]).any(), "written before y"
        return _checked(buffer[before:][None], rows * cols).view(rows, cols)


def _pointers(tensors: Sequence[torch.Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))


def _checked(buffer: torch.Tensor, width: int) -> torch.Tensor:
    """Return the result without its padding."""
    assert not written(buffer[:, width:]).any(), "written between the rows of y"
    assert written(buffer[:, :width]).all(), "elements of y that were not written"
    return buffer[:, :width]


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` in float64."""
    exact = x.double() @ weight.T
    return exact if bias is None else exact + bias.double()


def assert_close(
    result: torch.Tensor,
    exact: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    sums: float = 1e-6,
) -> None:
    """Compare a result with its exact value, element by element and on average."""
    error = (result.double() - exact).abs()
    lengths = x.double().norm(dim=1)[:, None] * weight.norm(dim=1)[None, :]
    numbers = torch.finfo(result.dtype)
    smallest_step = numbers.smallest_normal * numbers.eps
    excess = error - HALF_STEPS[result.dtype] * 1.01 * exact.abs() - sums * lengths - smallest_step
    off = ~(excess <= 0)
    assert not off.any(), (
        f"{int(off.sum())} of {error.numel()} elements of {result.dtype} are off, the first at "
        f"{tuple(off.nonzero()[0].tolist())}: {result[off][0]} for {exact[off][0]}"
    )
    rounding = exact.to(result.dtype).double() - exact
    assert error.norm() <= 1.01 * rounding.norm() + sums * lengths.norm()


def assert_within_bar(result: torch.Tensor, exact: torch.Tensor, bar: float | None = None) -> None:
    """Assert that the relative L2 error of enough elements is below a tolerance, by default that of their dtype."""
    if result.numel() >= ENOUGH:
        relative = float((result.double() - exact).norm() / exact.norm())
        assert relative < (bar or BARS[result.dtype]), f"relative L2 {relative:.2e}"


class Guarded:
    """Memory between two protected pages: a read or a write outside of it ends the process."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self._inner = -(-size // page) * page
        self._map = mmap.mmap(-1, self._inner + 2 * page)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)[page : page + self._inner]
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for address in (self._bytes.data_ptr() - page, self._bytes.data_ptr() + self._inner):
            if protect(address, page, 0) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def at_the_end(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous tensor whose last byte is the last of the memory."""
        return self._place(tensor, self._inner - tensor.numel() * tensor.element_size())

    def at_the_start(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a contiguous tensor whose first byte is the first of the memory."""
        return self._place(tensor, 0)

    def _place(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        place = self._bytes[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        return place.copy_(tensor)
