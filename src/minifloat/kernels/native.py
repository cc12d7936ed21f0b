"""Finds and loads the C++ kernels, once per process.

They are one shared library beside this file, built with the package when there was a C++ compiler; it holds the same
code for several instruction sets, and the processor decides which runs. The environment variable ``MINIFLOAT_ISA``
forces one, for tests and for finding out what an instruction set is worth. Calls go through ctypes, which releases
the GIL. What the functions mean is declared in ``csrc/api.h``; the ops wrap them and validate for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minifloat.kernels
from minifloat.errors import KernelUnavailable

#: ``MINIFLOAT_ABI_VERSION`` of ``csrc/api.h``.
ABI_VERSION = 6
FILE_NAMES = ("libminifloat_native.so", "libminifloat_native.dylib")
_REBUILD = (
    "install a C++ compiler (g++ or clang++) and reinstall minifloat, or in a checkout run what CMakeLists.txt says"
)


class Format(ctypes.Structure):
    """``struct minifloat_format``."""

    _fields_ = [
        ("bits", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("emin", ctypes.c_int32),
        ("max", ctypes.c_float),
    ]


class QuantizeRowsArgs(ctypes.Structure):
    """``struct minifloat_quantize_rows_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("element", Format),
        ("scale", Format),
        ("divisor", ctypes.c_float),
        ("zero_scale", ctypes.c_float),
        ("one_scale", ctypes.c_int32),
        ("tensor_amax", ctypes.c_float),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("signal", ctypes.c_double),
        ("noise", ctypes.c_double),
        ("saturated", ctypes.c_int64),
        ("flushed", ctypes.c_int64),
        ("nonfinite", ctypes.c_int64),
    ]


class RoundInputsArgs(ctypes.Structure):
    """``struct minifloat_round_inputs_args``."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("element", Format),
        ("dtype", ctypes.c_int32),
        ("scaling", ctypes.c_int32),
        ("zero_scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    ]


class AmaxArgs(ctypes.Structure):
    """``struct minifloat_amax_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("amax", ctypes.c_float),
        ("nonfinite", ctypes.c_int64),
    ]


class HistogramArgs(ctypes.Structure):
    """``struct minifloat_histogram_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("bins", ctypes.c_void_p),
    ]


class PackArgs(ctypes.Structure):
    """``struct minifloat_pack_args``."""

    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_cols", ctypes.c_int64),
        ("element", ctypes.c_int32),
        ("grid", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("packed", ctypes.c_void_p),
    ]


class LinearArgs(ctypes.Structure):
    """``struct minifloat_linear_args``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("m", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class MoeArgs(ctypes.Structure):
    """``struct minifloat_moe_args``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("x_rows", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("y_stride", ctypes.c_int64),
        ("experts", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class Product(ctypes.Structure):
    """``struct minifloat_product``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("biases", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("bias_dtype", ctypes.c_int32),
    ]


class ExpertsArgs(ctypes.Structure):
    """``struct minifloat_experts``."""

    _fields_ = [
        ("router", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("shared_gate", ctypes.c_void_p),
        ("intermediate", ctypes.c_int64),
        ("router_dtype", ctypes.c_int32),
        ("experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("normalize", ctypes.c_int32),
    ]


class LayerArgs(ctypes.Structure):
    """``struct minifloat_layer``."""

    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("qkv", Product),
        ("out", Product),
        ("gate_up", Product),
        ("down", Product),
        ("intermediate", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("k_scale", ctypes.c_float),
        ("v_scale", ctypes.c_float),
    ]


class DecoderArgs(ctypes.Structure):
    """``struct minifloat_decoder``."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("inv_freq", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("embedding", ctypes.c_void_p),
        ("lm_head", Product),
        ("hidden", ctypes.c_int64),
        ("lm_head_rows", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("embedding_dtype", ctypes.c_int32),
        ("layer_count", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("attention_scaling", ctypes.c_float),
        ("scale", ctypes.c_float),
    ]


class StepArgs(ctypes.Structure):
    """``struct minifloat_step_args``."""

    _fields_ = [
        ("decoder", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("contexts", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("nanoseconds", ctypes.c_void_p),
        ("cache_blocks", ctypes.c_int64),
        ("cache_element", ctypes.c_int32),
        ("token_count", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("block_columns", ctypes.c_int32),
        ("logit_count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


class ReadArgs(ctypes.Structure):
    """``struct minifloat_read_args``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("threads", ctypes.c_int32),
        ("sum", ctypes.c_uint64),
    ]


def struct_of(structure: type[ctypes.Structure]) -> struct.Struct:
    """What packs the bytes of one of the structures above: a hot path makes those faster than the object."""
    kinds: list[Any] = [field[1] for field in structure._fields_]
    packer = struct.Struct("@" + "".join(kind._type_ for kind in kinds))
    assert packer.size == ctypes.sizeof(structure), "the fields have no padding at the end"
    return packer


class Library:
    """The loaded library, bound to one instruction set.

    Attributes:
        isas: The instruction sets that this processor can run, fastest first.
        isa: The one that calls go to.
    """

    def __init__(self, cdll: ctypes.CDLL, isa: str | None = None) -> None:
        """Bind.

        Args:
            cdll: The library, its version checked.
            isa: Instruction set; by default the fastest.

        Raises:
            KernelUnavailable: `isa` is unknown, or the processor does not have it.
        """
        self._cdll = cdll
        names = [cdll.minifloat_isa_name(i).decode() for i in range(cdll.minifloat_isa_count())]
        self.isas = tuple(name for i, name in enumerate(names) if cdll.minifloat_isa_supported(i))
        self.isa = self.isas[0] if isa is None else isa
        if self.isa not in names:
            raise KernelUnavailable(f"unknown instruction set {self.isa!r}; this build has: {', '.join(names)}")
        if self.isa not in self.isas:
            raise KernelUnavailable(f"this processor has no {self.isa}; it can run: {', '.join(self.isas)}")
        self._index = names.index(self.isa)

    def with_isa(self, isa: str) -> Library:
        """The same library bound to another instruction set.

        Raises:
            KernelUnavailable: `isa` is unknown, or the processor does not have it.
        """
        return Library(self._cdll, isa)

    def quantize_rows(self, args: QuantizeRowsArgs) -> None:
        """Run ``minifloat_quantize_rows``; the results are in `args`.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
        """
        _check(self._cdll.minifloat_quantize_rows(self._index, ctypes.byref(args)))

    def round_inputs(self, args: RoundInputsArgs) -> None:
        """Run ``minifloat_round_inputs``.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
        """
        _check(self._cdll.minifloat_round_inputs(self._index, ctypes.byref(args)))

    def amax(self, args: AmaxArgs) -> None:
        """Run ``minifloat_amax``; the results are in `args`.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
        """
        _check(self._cdll.minifloat_amax(self._index, ctypes.byref(args)))

    def histogram(self, args: HistogramArgs) -> None:
        """Run ``minifloat_histogram``, which adds to the bins of `args`.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
        """
        _check(self._cdll.minifloat_histogram(self._index, ctypes.byref(args)))

    def packed_bytes(self, args: PackArgs) -> int:
        """Run ``minifloat_packed_bytes``: 0 where the kernels have no layout for such a weight."""
        return int(self._cdll.minifloat_packed_bytes(ctypes.byref(args)))

    def pack(self, args: PackArgs) -> None:
        """Run ``minifloat_pack``.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
        """
        _check(self._cdll.minifloat_pack(self._index, ctypes.byref(args)))

    def unpack(self, args: PackArgs) -> None:
        """Run ``minifloat_unpack``.

        Raises:
            ValueError: The memory holds no such packed weight.
        """
        _check(self._cdll.minifloat_unpack(self._index, ctypes.byref(args)))

    def linear(self, args: LinearArgs | bytes) -> None:
        """Run ``minifloat_linear``; the bytes of a `LinearArgs` are made faster than one.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
            MemoryError: There is no room for a scratch buffer.
        """
        status = self._cdll.minifloat_linear(self._index, args if isinstance(args, bytes) else ctypes.byref(args))
        if status:
            _check(status)

    def moe(self, args: MoeArgs | bytes) -> None:
        """Run ``minifloat_moe``; the bytes of a `MoeArgs` are made faster than one.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
            MemoryError: There is no room for a scratch buffer.
        """
        status = self._cdll.minifloat_moe(self._index, args if isinstance(args, bytes) else ctypes.byref(args))
        if status:
            _check(status)

    def step(self, args: StepArgs) -> None:
        """Run ``minifloat_step``.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
            MemoryError: There is no room for a scratch buffer.
        """
        _check(self._cdll.minifloat_step(self._index, ctypes.byref(args)))

    def read(self, args: ReadArgs) -> None:
        """Run ``minifloat_read``; the sum is in `args`.

        Raises:
            ValueError: The library refused the arguments (a bug of the caller, which validates them).
        """
        _check(self._cdll.minifloat_read(self._index, ctypes.byref(args)))

    def release_threads(self) -> None:
        """Run ``minifloat_release_threads``."""
        self._cdll.minifloat_release_threads()


@dataclass(frozen=True)
class Outcome:
    """What became of loading: a library, or the reason why there is none."""

    library: Library | None
    reason: str = ""


_lock = threading.Lock()
_outcome: Outcome | None = None


def load() -> Library | None:
    """The library, or None where it was not built or cannot be loaded (`why_unavailable` tells).

    Raises:
        KernelUnavailable: ``MINIFLOAT_ISA`` names an instruction set that does not exist here.
    """
    outcome = _outcome
    return _load().library if outcome is None else outcome.library


def why_unavailable() -> str:
    """Why `load` gave None and what to do about it; empty where the library is loaded."""
    return _load().reason


def isa() -> str:
    """The instruction set that the kernels run with, or ``"none"`` without the library."""
    library = load()
    return "none" if library is None else library.isa


def _load() -> Outcome:
    global _outcome
    with _lock:
        if _outcome is None:
            _outcome = open_library(folders())
        return _outcome


@contextlib.contextmanager
def using(isa: str) -> Iterator[Library]:
    """Send the calls of this process to another instruction set meanwhile, for tests and measurements.

    Raises:
        KernelUnavailable: There is no library, or not this instruction set here.
    """
    global _outcome
    before = _load()
    if before.library is None:
        raise KernelUnavailable(before.reason)
    library = before.library.with_isa(isa)
    _outcome = Outcome(library)
    try:
        yield library
    finally:
        _outcome = before


def folders() -> list[Path]:
    """Where the library may lie: beside this file, or where an editable install put what it built."""
    return [Path(folder) for folder in minifloat.kernels.__path__]


def open_library(candidates: list[Path]) -> Outcome:
    """Load the library from the first folder that has it.

    Args:
        candidates: Folders to look into.

    Returns:
        The library, or what is wrong and the cure.

    Raises:
        KernelUnavailable: ``MINIFLOAT_ISA`` names an instruction set that does not exist here.
    """
    files = [folder / name for folder in candidates for name in FILE_NAMES]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        return Outcome(None, f"the native library was not built; {_REBUILD}")
    try:
        cdll = ctypes.CDLL(str(path))
        cdll.minifloat_isa_name.restype = ctypes.c_char_p
        cdll.minifloat_packed_bytes.restype = ctypes.c_int64
        cdll.minifloat_release_threads.restype = None
        version = cdll.minifloat_abi_version()
    except (OSError, AttributeError) as error:
        return Outcome(None, f"the native library does not load ({error}); {_REBUILD}")
    if version != ABI_VERSION:
        return Outcome(None, f"{path} is of another version of minifloat ({version}, not {ABI_VERSION}); {_REBUILD}")
    return Outcome(Library(cdll, os.environ.get("MINIFLOAT_ISA") or None))


#: ``MINIFLOAT_NO_MEMORY`` of ``enum minifloat_status``.
_NO_MEMORY = 4


def _check(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("minifloat_native found no memory for its scratch buffers")
    if status:
        raise ValueError(f"minifloat_native refused its arguments (status {status}; see enum minifloat_status)")
