"""`Library`: the functions of the loaded shared library, bound to one instruction set."""

from __future__ import annotations

import ctypes

from minifloat.errors import KernelUnavailable
from minifloat.kernels.native import structs

#: ``MINIFLOAT_NO_MEMORY`` of ``enum minifloat_status``.
_NO_MEMORY = 4


class Library:
    """The loaded library, bound to one instruction set.

    Each method runs the C function ``minifloat_<name>``, which ``csrc/api.h`` describes, and leaves the results in its
    argument. A method raises ValueError if the C function rejects the arguments (a bug of the caller, which validates
    them), and MemoryError if there is no memory for the scratch buffers.
    """

    def __init__(self, cdll: ctypes.CDLL, isa: str | None = None) -> None:
        """Bind the library to an instruction set."""
        self._cdll = cdll
        names = self.built = tuple(cdll.minifloat_isa_name(i).decode() for i in range(cdll.minifloat_isa_count()))
        self.isas = tuple(name for i, name in enumerate(names) if cdll.minifloat_isa_supported(i))
        self.isa = self.isas[0] if isa is None else isa
        if self.isa not in names:
            raise KernelUnavailable(f"unknown instruction set {self.isa!r}; this build has: {', '.join(names)}")
        if self.isa not in self.isas:
            raise KernelUnavailable(f"this processor has no {self.isa}; it can run: {', '.join(self.isas)}")
        self._index = names.index(self.isa)

    def with_isa(self, isa: str) -> Library:
        """Return the same library bound to another instruction set."""
        return Library(self._cdll, isa)

    @property
    def invariant_isa(self) -> str:
        """The instruction set that batch-invariant calls run with: `isa`, or a slower one beside AMX."""
        index: int = self._cdll.minifloat_invariant_isa(self._index)
        name: bytes = self._cdll.minifloat_isa_name(index)
        return name.decode()

    def quantize_rows(self, args: structs.QuantizeRowsArgs) -> None:
        """Quantize a slab of rows."""
        _check(self._cdll.minifloat_quantize_rows(self._index, ctypes.byref(args)))

    def round_inputs(self, args: structs.RoundInputsArgs) -> None:
        """Round the inputs of a linear to their quantized values."""
        _check(self._cdll.minifloat_round_inputs(self._index, ctypes.byref(args)))

    def amax(self, args: structs.AmaxArgs) -> None:
        """Compute the amax."""
        _check(self._cdll.minifloat_amax(self._index, ctypes.byref(args)))

    def histogram(self, args: structs.HistogramArgs) -> None:
        """Add magnitudes to the bins of a histogram."""
        _check(self._cdll.minifloat_histogram(self._index, ctypes.byref(args)))

    def round_with_feedback(self, args: structs.RoundWithFeedbackArgs) -> None:
        """Round the columns of a weight, each with the errors of the columns before it."""
        _check(self._cdll.minifloat_round_with_feedback(self._index, ctypes.byref(args)))

    def gram(self, args: structs.GramArgs) -> None:
        """Add the product of a transposed matrix and a matrix."""
        _check(self._cdll.minifloat_gram(self._index, ctypes.byref(args)))

    def packed_bytes(self, args: structs.PackArgs) -> int:
        """Return the size of a packed weight, or 0 if the kernels have no layout for the weight."""
        return int(self._cdll.minifloat_packed_bytes(ctypes.byref(args)))

    def pack(self, args: structs.PackArgs) -> None:
        """Pack a weight."""
        _check(self._cdll.minifloat_pack(self._index, ctypes.byref(args)))

    def unpack(self, args: structs.PackArgs) -> None:
        """Unpack a weight; raises ValueError if the memory holds no such packed weight."""
        _check(self._cdll.minifloat_unpack(self._index, ctypes.byref(args)))

    def linear(self, args: structs.LinearArgs | bytes) -> None:
        """Multiply with packed weights; packed bytes are created faster than a `LinearArgs`."""
        status = self._cdll.minifloat_linear(self._index, args if isinstance(args, bytes) else ctypes.byref(args))
        if status:
            _check(status)

    def moe(self, args: structs.MoeArgs | bytes) -> None:
        """Multiply with the packed weights of experts; packed bytes are created faster than a `MoeArgs`."""
        status = self._cdll.minifloat_moe(self._index, args if isinstance(args, bytes) else ctypes.byref(args))
        if status:
            _check(status)

    def rounds_inputs(self, weight: int, m: int, x_dtype: int) -> bool:
        """Return whether a product with `int8_inputs` rounds `m` rows of ``enum minifloat_dtype`` `x_dtype`."""
        return bool(
            self._cdll.minifloat_rounds_inputs(
                self._index, ctypes.c_void_p(weight), ctypes.c_int64(m), ctypes.c_int32(x_dtype)
            )
        )

    def step(self, args: structs.StepArgs) -> None:
        """Run one step of a decoder."""
        _check(self._cdll.minifloat_step(self._index, ctypes.byref(args)))

    def read(self, args: structs.ReadArgs) -> None:
        """Read memory and add it up, to measure the bandwidth."""
        _check(self._cdll.minifloat_read(self._index, ctypes.byref(args)))

    def release_threads(self) -> None:
        """End the threads that compute for the calling thread."""
        self._cdll.minifloat_release_threads()


def _check(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("minifloat_native found no memory for its scratch buffers")
    if status:
        raise ValueError(f"minifloat_native refused its arguments (status {status}; see enum minifloat_status)")
