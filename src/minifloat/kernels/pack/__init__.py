"""`pack` rearranges a weight of a checkpoint into the order in which the kernels read it, once, at load."""

from __future__ import annotations

import ctypes
import mmap
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor

from minifloat.errors import NonFiniteError, ShapeError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.memory import take_touched
from minifloat.kernels.native import STRUCTS
from minifloat.kernels.pack import reference
from minifloat.kernels.pack.layout import (
    BLOCK,
    CODED_E4M3,
    ROW,
    STEPS_ALIGNMENT,
    VECTOR_BYTES,
    Form,
    Header,
    form_of,
    plan,
)
from minifloat.kernels.threads import count
from minifloat.numerics.cast import decode
from minifloat.numerics.formats import BFLOAT16, E2M1, E8M0, FLOAT16, FLOAT32
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

# A product reads every byte of a weight once, so page table walks per 4 KB would cost more than a tenth of the
# bandwidth. Each mapping is new memory: used pages would stay small, and on the NUMA node of the thread that touched
# them.
HUGE_PAGE = 2 << 20
#: Bytes of the first mapping of an arena; pages of it that no weight reaches take no memory.
_FIRST_MAPPING = 16 * HUGE_PAGE
_LARGEST_MAPPING = 512 * HUGE_PAGE


def _mapping(nbytes: int) -> tuple[mmap.mmap, int]:
    """Return new memory, and the offset of `nbytes` in it that begin with a huge page."""
    region = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return region, -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % HUGE_PAGE


def _ask_for_huge_pages(region: mmap.mmap, begin: int, nbytes: int) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE, begin, nbytes)


#: Dtypes of weights that are not quantized.
_PLAIN = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}


def allocate(nbytes: int) -> Tensor:
    """Allocate uint8 ``[nbytes]``, undefined, 64-byte aligned; 2 MB or more are in 2 MB pages."""
    if nbytes < HUGE_PAGE:
        return torch.empty(nbytes, dtype=torch.uint8)
    region, offset = _mapping(nbytes)
    _ask_for_huge_pages(region, offset, nbytes // HUGE_PAGE * HUGE_PAGE)
    return torch.frombuffer(region, dtype=torch.uint8, offset=offset, count=nbytes)


class Arena:
    """Memory for the weights of a layer in a few mappings, each of which is unmapped with the last weight in it.

    Linux allows a process 65,530 mappings, and one with huge pages in a part of it counts as several: a mixture has
    more experts.
    """

    def __init__(self) -> None:
        self._region: mmap.mmap | None = None
        self._free = self._end = 0  # offsets in the region
        self._taken = 0

    def allocate(self, nbytes: int) -> Tensor:
        """Allocate uint8 ``[nbytes]``, undefined, in 2 MB pages; it begins with a page of 4 KB."""
        touched = take_touched(nbytes)
        if touched is not None:
            return torch.frombuffer(touched[0], dtype=torch.uint8, offset=touched[1], count=nbytes)
        if self._region is None or self._free + nbytes > self._end:
            size = max(nbytes, _FIRST_MAPPING, min(self._taken, _LARGEST_MAPPING))
            self._region, self._free = _mapping(size)
            _ask_for_huge_pages(self._region, 0, len(self._region))  # in all of it: a part would count as another one
            self._end = self._free + size
        data = torch.frombuffer(self._region, dtype=torch.uint8, offset=self._free, count=nbytes)
        self._free += -(-nbytes // STEPS_ALIGNMENT) * STEPS_ALIGNMENT
        self._taken += nbytes
        return data

    def next_layer(self) -> Arena:
        """Return the arena of the next layer: this one while its layers are small, so that they share huge pages."""
        return self if self._taken < _FIRST_MAPPING else Arena()


def is_aligned(data: Tensor) -> bool:
    """Return whether a tensor has the alignment that kernels require."""
    return data.data_ptr() % VECTOR_BYTES == 0


class Pointers:
    """The addresses of the weights of one call, as the kernels take them. The holder must keep the weights alive."""

    __slots__ = ("_array", "address", "cols", "count", "rows", "total")

    def __init__(self, addresses: Sequence[int], rows: Sequence[int], cols: int) -> None:
        self._array = (ctypes.c_void_p * len(addresses))(*addresses)
        self.address = ctypes.addressof(self._array)
        self.count = len(addresses)
        self.rows = list(rows)
        self.total = sum(rows)
        self.cols = cols


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight ``[N, K]`` in the order in which the kernels read it."""

    data: Tensor  #: uint8 ``[bytes]``, on the CPU, contiguous, 64-byte aligned
    spec: WeightSpec | None  #: how the weight is quantized; None for floats
    shape: tuple[int, int]
    dtype: torch.dtype = torch.bfloat16  #: of a weight that is not quantized

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def form(self) -> Form:
        form = form_of(self.spec, self.shape, _PLAIN[self.dtype])
        if isinstance(form, str):
            raise UnsupportedTensorError("weight", f"has no packed form: {form}")
        return form

    @cached_property
    def address(self) -> int:
        """The address of `data`, read once, after `check`."""
        self.check()
        return self.data.data_ptr()

    @cached_property
    def pointers(self) -> Pointers:
        return Pointers((self.address,), (self.shape[0],), self.shape[1])

    def check(self) -> None:
        data = self.data
        if data.device.type != "cpu" or data.dtype != torch.uint8 or not data.is_contiguous():
            raise UnsupportedTensorError(
                "data", f"expected contiguous uint8 on the CPU, got {data.dtype} on {data.device}"
            )
        if not is_aligned(data):
            raise UnsupportedTensorError("data", "a packed weight is 64-byte aligned; clone() gives one that is")
        header = Header.read(bytes(data[: Header.FORMAT.size].numpy()))
        if isinstance(header, str):
            raise UnsupportedTensorError("data", header)
        if (header.rows, header.cols) != self.shape or header.total > data.numel():
            raise ShapeError(
                "data",
                f"expected a packed weight {self.shape[0]}x{self.shape[1]}, got one of {header.rows}x{header.cols} "
                f"and {header.total} bytes in {data.numel()}",
            )
        if header != plan(self.form):
            raise UnsupportedTensorError("data", f"the packed weight is not of {self.spec or _PLAIN[self.dtype].name}")

    def unpack(self) -> QuantizedTensor | Tensor:
        """Return the weight as checkpoints store it: a `QuantizedTensor`, or a tensor ``[N, K]`` of `dtype`."""
        self.check()
        form, use_cpu = self.form, not native.why_unavailable()
        if self.spec is None:
            weight = torch.empty(self.shape, dtype=self.dtype)
            _unpack(weight, None, form, self.data, use_cpu)
            return weight
        rows, cols = self.shape
        codes = torch.empty(rows, cols // 2 if self.spec.element is E2M1 else cols, dtype=torch.uint8)
        coded = form.grid not in (ROW, BLOCK)
        grid = self.spec.granularity.scale_shape(self.shape)
        scale = torch.empty(grid, dtype=torch.uint8 if coded else torch.float32)
        _unpack(codes, scale, form, self.data, use_cpu)
        if self.spec.scale is E8M0 and not coded:
            scale = reference.e8m0_codes(scale)
        tensor_scale = self._tensor_scale() if form.grid == CODED_E4M3 else None
        return QuantizedTensor(self.spec, self.shape, codes, scale, tensor_scale, global_divides=False)

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice | None = None) -> Tensor:
        """Return the weight ``[N, K]`` in `dtype`: decoded element times scale in float32, rounded once."""
        weight = self.unpack()
        if isinstance(weight, Tensor):
            return weight[rows if rows is not None else slice(None)].to(dtype)
        return weight.dequantize(dtype, rows)

    def _tensor_scale(self) -> Tensor:
        header = plan(self.form)
        scales = self.data[header.row_scales : header.block_scales].view(torch.float32)[: self.shape[0]]
        finite = scales[scales.isfinite()]
        return finite[0].clone() if finite.numel() else torch.ones((), dtype=torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "spec": self.spec, "shape": self.shape, "dtype": self.dtype}


class PackedWeights(Sequence[PackedWeight]):
    """The packed weights of one call, validated once."""

    #: The name of the weights in errors.
    name = "weights"

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = tuple(weights)
        if not self._weights:
            raise ShapeError(self.name, "expected at least one, got none")
        self._check_shapes([weight.shape for weight in self._weights])
        forms = [weight.form for weight in self._weights]
        if len({(form.element, form.grid) for form in forms}) != 1:
            raise UnsupportedTensorError(self.name, "several formats or kinds of scales in one call")

    @abstractmethod
    def _check_shapes(self, shapes: list[tuple[int, int]]) -> None:
        """Raise ShapeError if the kernels do not take weights of these shapes in one call."""

    @cached_property
    def pointers(self) -> Pointers:
        addresses = [weight.address for weight in self._weights]
        return Pointers(addresses, [weight.shape[0] for weight in self._weights], self._weights[0].shape[1])

    def __len__(self) -> int:
        return len(self._weights)

    @overload
    def __getitem__(self, index: int) -> PackedWeight: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PackedWeight]: ...
    def __getitem__(self, index: int | slice) -> PackedWeight | Sequence[PackedWeight]:
        return self._weights[index]


class FusedWeights(PackedWeights):
    """Packed weights that are multiplied with the same input in one call: of q, k and v, or of gate and up."""

    def _check_shapes(self, shapes: list[tuple[int, int]]) -> None:
        self.rows = [rows for rows, _ in shapes]
        if len({cols for _, cols in shapes}) != 1:
            raise ShapeError(self.name, f"expected one K for all, got {shapes}")


class PackedExperts(PackedWeights):
    """The packed weights ``[N, K]`` of a projection of all experts of a layer."""

    name = "experts"

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        super().__init__(weights)
        self.shape = self[0].shape
        _ = self.pointers  # a weight that the kernels may not read is an error here

    def _check_shapes(self, shapes: list[tuple[int, int]]) -> None:
        if len(set(shapes)) != 1:
            raise ShapeError(self.name, f"expected one shape for all, got {sorted(set(shapes))}")


def _unpack(codes: Tensor, scales: Tensor | None, form: Form, data: Tensor, use_cpu: bool) -> None:
    if use_cpu:
        native.require().call("unpack", _args(codes, scales, 1.0, form, data, None))
    else:
        reference.unpack(codes, scales, form, data)


def why_not(
    spec: WeightSpec | None, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Return why a weight has no packed form; empty if it has one."""
    if torch.device(device).type != "cpu":
        return f"it is on {device}; the kernels compute on the CPU"
    if len(shape) != 2:
        return f"it is no matrix [N, K] but {list(shape)}"
    if spec is None and dtype not in _PLAIN:
        return f"it is {dtype}; there are kernels for quantized weights, {', '.join(map(str, _PLAIN))}"
    form = form_of(spec, (shape[0], shape[1]))
    return f"there is no kernel for {form}" if isinstance(form, str) else ""


def pack(
    weight: QuantizedTensor | Tensor, *, impl: str = "auto", threads: int | None = None, arena: Arena | None = None
) -> PackedWeight:
    """Pack a weight into memory of its own, or of an arena."""
    runs_native = native.runs("pack", impl)
    codes, scale, factor, spec = _parts(weight)
    if len(weight.shape) != 2:
        raise ShapeError("weight", f"expected a matrix [N, K], got shape {list(weight.shape)}")
    shape = (weight.shape[0], weight.shape[1])
    plain = codes.dtype if spec is None else torch.bfloat16
    form = form_of(spec, shape, _PLAIN.get(plain, BFLOAT16))
    problem = why_not(spec, shape, codes.device, codes.dtype)
    if problem or isinstance(form, str):
        raise UnsupportedTensorError("weight", f"has no packed form: {problem}")
    if form.grid in (ROW, BLOCK) and scale is not None and spec is not None and spec.scale is E8M0:
        scale = decode(scale, E8M0)
    if scale is not None and scale.dtype == torch.float32 and not bool(scale.isfinite().all()):
        raise NonFiniteError("scale", "NaN or Inf among the scales of the weight; the checkpoint is damaged")
    data = (allocate if arena is None else arena.allocate)(plan(form).total)
    if runs_native:
        native.require().call("pack", _args(codes, scale, factor, form, data, threads))
    else:
        reference.pack(codes, scale, factor, form, data)
    return PackedWeight(data, spec, shape, plain)


def _parts(weight: QuantizedTensor | Tensor) -> tuple[Tensor, Tensor | None, float, WeightSpec | None]:
    """Return codes, scales, the factor of the scales, and the spec."""
    if isinstance(weight, Tensor):
        return weight.detach().contiguous(), None, 1.0, None
    factor = 1.0
    if weight.global_scale is not None:
        tensor_scale = weight.global_scale.float().reshape(())
        factor = float(tensor_scale.reciprocal() if weight.global_divides else tensor_scale)
        if not torch.isfinite(torch.tensor(factor)):
            raise NonFiniteError("global_scale", f"the scale of the weight is {float(tensor_scale)}")
    scale = weight.scale.contiguous()
    if weight.spec.scale is FLOAT32:
        scale = scale.float()
    return weight.codes.contiguous().view(torch.uint8), scale, factor, weight.spec


def _args(
    codes: Tensor, scales: Tensor | None, factor: float, form: Form, packed: Tensor, thread_count: int | None
) -> ctypes.Structure:
    rows, cols = form.shape
    block_rows, block_cols = form.block
    return STRUCTS["pack_args"](
        codes=codes.data_ptr(),
        scales=None if scales is None else scales.data_ptr(),
        rows=rows,
        cols=cols,
        block_rows=block_rows,
        block_cols=block_cols,
        element=form.element,
        grid=form.grid,
        factor=factor,
        threads=count() if thread_count is None else thread_count,
        packed=packed.data_ptr(),
    )
