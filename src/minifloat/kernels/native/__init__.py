"""Finds and loads the C++ kernels, once per process; `api.h` alone declares their interface, which is read from it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import minifloat.kernels
from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.numerics.formats import ElementFormat

_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
_TEXT = re.sub(r"//.*", "", Path(__file__).with_name("api.h").read_text(encoding="utf-8"))
_FIELDS = re.compile(r"(?:const )?(?:struct )?(\w+)\s*(\*(?:\s|\*|const\b)*)?\s*([\w\s,]+)")

#: ``MINIFLOAT_<name>`` -> its value, of all enumerators and macros with a number.
CONSTANTS = {
    name: int(value) for name, value in re.findall(r"\bMINIFLOAT_(\w+)(?: = | )(\d+)\b", re.sub(r"\s+", " ", _TEXT))
}
#: ``struct minifloat_<name>`` -> its ctypes structure, which has no other attributes than the fields.
STRUCTS: dict[str, type[ctypes.Structure]] = {}
#: Structure and field -> the structure that the field points to.
POINTEES: dict[tuple[type[ctypes.Structure], str], str] = {}


def _read(name: str, body: str) -> None:
    fields: list[tuple[str, Any]] = []
    pointees: dict[str, str] = {}
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        match = _FIELDS.fullmatch(declaration)
        assert match is not None, f"api.h: {declaration!r} is no declaration of fields"
        kind, pointer, names = match[1].removeprefix("minifloat_"), match[2], re.findall(r"\w+", match[3])
        fields += [(field, ctypes.c_void_p if pointer else _TYPES.get(kind) or STRUCTS[kind]) for field in names]
        pointees |= {field: kind for field in names if pointer and kind in STRUCTS}
    made = STRUCTS[name] = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields})
    POINTEES.update({(made, field): kind for field, kind in pointees.items()})


for _name, _body in re.findall(r"struct minifloat_(\w+) \{(.*?)\};", _TEXT, re.DOTALL):
    _read(_name, _body)


def format_struct(element: ElementFormat) -> ctypes.Structure:
    """Return a format as the library takes it; the C++ code holds no number about one."""
    return STRUCTS["format"](element.bits, element.mantissa_bits, element.emin, element.max)


def struct_of(structure: type[ctypes.Structure]) -> struct.Struct:
    """Return the packer of a structure's bytes: packing is faster than creating the ctypes object."""
    kinds: list[Any] = [field[1] for field in structure._fields_]
    packer = struct.Struct("@" + "".join(kind._type_ for kind in kinds) + "0q")  # with the padding at the end
    assert packer.size == ctypes.sizeof(structure), "the fields have the sizes and the alignment of ctypes"
    return packer


ABI_VERSION = CONSTANTS["ABI_VERSION"]
FILE_NAMES = ("libminifloat_native.so", "libminifloat_native.dylib")
_REBUILD = (
    "install a C++ compiler (g++ or clang++) and reinstall minifloat, or in a checkout run what CMakeLists.txt says"
)
#: OpenMP's runtime of GNU, which the library is linked with and wheels of torch bring.
_OPENMP = "libgomp.so.1"
_INSTALL_OPENMP = f"install {_OPENMP} (Debian and Ubuntu: libgomp1; Fedora: libgomp)"


class Library:
    def __init__(self, cdll: ctypes.CDLL, isa: str | None = None) -> None:
        self._cdll = cdll
        self._functions: dict[str, Callable[[int, object], int]] = {}
        names = self.built = tuple(cdll.minifloat_isa_name(i).decode() for i in range(cdll.minifloat_isa_count()))
        self.isas = tuple(name for i, name in enumerate(names) if cdll.minifloat_isa_supported(i))
        self.isa = self.isas[0] if isa is None else isa
        if self.isa not in names:
            raise KernelUnavailable(f"unknown instruction set {self.isa!r}; this build has: {', '.join(names)}")
        if self.isa not in self.isas:
            raise KernelUnavailable(f"this processor has no {self.isa}; it can run: {', '.join(self.isas)}")
        self._index = names.index(self.isa)

    def with_isa(self, isa: str) -> Library:
        return Library(self._cdll, isa)

    @property
    def invariant_isa(self) -> str:
        """The instruction set that batch-invariant calls run with: `isa`, or a slower one beside AMX."""
        index: int = self._cdll.minifloat_invariant_isa(self._index)
        name: bytes = self._cdll.minifloat_isa_name(index)
        return name.decode()

    def call(self, name: str, args: ctypes.Structure | bytes) -> None:
        """Run the C function ``minifloat_<name>``, which leaves its results in `args`."""
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = getattr(self._cdll, f"minifloat_{name}")
        status = function(self._index, args if isinstance(args, bytes) else ctypes.byref(args))
        if status == CONSTANTS["NO_MEMORY"]:
            raise MemoryError("minifloat_native found no memory for its scratch buffers")
        if status:
            raise ValueError(f"minifloat_native refused its arguments (status {status}; see enum minifloat_status)")

    def packed_bytes(self, args: ctypes.Structure) -> int:
        """Return the size of a packed weight, or 0 if the kernels have no layout for the weight."""
        return int(self._cdll.minifloat_packed_bytes(ctypes.byref(args)))

    def rounds_inputs(self, weight: int, m: int, x_dtype: int) -> bool:
        """Return whether a product with `int8_inputs` rounds `m` rows of ``enum minifloat_dtype`` `x_dtype`."""
        address, rows, dtype = ctypes.c_void_p(weight), ctypes.c_int64(m), ctypes.c_int32(x_dtype)
        return bool(self._cdll.minifloat_rounds_inputs(self._index, address, rows, dtype))

    def release_threads(self) -> None:
        self._cdll.minifloat_release_threads()

    def bind_threads(self, nodes: Sequence[Collection[int]], threads: int) -> None:
        """Bind thread t of `threads` to the processors of node ``t * len(nodes) // threads``; none of a single node."""
        words = max((max(node) for node in nodes if node), default=0) // 64 + 1
        masks = [sum(1 << cpu % 64 for cpu in node if cpu // 64 == word) for node in nodes for word in range(words)]
        array = (ctypes.c_uint64 * len(masks))(*masks)
        self._cdll.minifloat_bind_threads(array, words, len(nodes), threads)


@dataclass(frozen=True)
class LoadResult:
    """The loaded library, or the reason why there is none."""

    library: Library | None
    reason: str = ""


_lock = threading.Lock()
_result: LoadResult | None = None


def load() -> Library | None:
    """Return the library, or None if it was not built or cannot be loaded (`why_unavailable` gives the reason)."""
    return _load().library


def require() -> Library:
    library = load()
    if library is None:
        raise KernelUnavailable(why_unavailable())
    return library


def why_unavailable() -> str:
    """Return why `load` gave None and how to cure it; empty if the library is loaded."""
    return _load().reason


def runs(op: str, impl: str, reason: str | None = None, named: str = "cpu") -> bool:
    """Return whether `named` computes `op`, not its reference; `reason`: why it cannot, by default the library's."""
    known = ("auto", "reference", named)
    if impl not in known:
        raise UnknownNameError("impl", impl, known)
    reason = why_unavailable() if reason is None else reason
    if impl == named and reason:
        raise KernelUnavailable(f"{op}(impl={impl!r}) cannot run: {reason}")
    return impl != "reference" and not reason


def isa() -> str:
    """Return the instruction set that the kernels run with, or ``"none"`` without the library."""
    library = load()
    return "none" if library is None else library.isa


def _load() -> LoadResult:
    global _result
    if _result is None:
        with _lock:
            _result = _result or open_library(folders())
    return _result


@contextlib.contextmanager
def using(isa: str) -> Iterator[Library]:
    """Use another instruction set for all calls of this process inside a ``with``; for tests and measurements."""
    global _result
    before = _load()
    if before.library is None:
        raise KernelUnavailable(before.reason)
    library = before.library.with_isa(isa)
    _result = LoadResult(library)
    try:
        yield library
    finally:
        _result = before


def folders() -> list[Path]:
    """Return the folders that may hold the library: ``kernels``, and where an editable install builds it."""
    return [Path(folder) for folder in minifloat.kernels.__path__]


def open_library(candidates: list[Path]) -> LoadResult:
    """Load the library from the first folder that has it."""
    files = [folder / name for folder in candidates for name in FILE_NAMES]
    path = next((file for file in files if file.exists()), None)
    if path is None:
        return LoadResult(None, f"the native library was not built; {_REBUILD}")
    try:
        cdll = _open(path)
        cdll.minifloat_isa_name.restype = ctypes.c_char_p
        cdll.minifloat_packed_bytes.restype = ctypes.c_int64
        cdll.minifloat_release_threads.restype = None
        version = cdll.minifloat_abi_version()
    except (OSError, AttributeError) as error:
        cure = _INSTALL_OPENMP if _OPENMP in str(error) else _REBUILD
        return LoadResult(None, f"the native library does not load ({error}); {cure}")
    if version != ABI_VERSION:
        return LoadResult(None, f"{path} is of another version of minifloat ({version}, not {ABI_VERSION}); {_REBUILD}")
    return LoadResult(Library(cdll, os.environ.get("MINIFLOAT_ISA") or None))


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        torch = importlib.util.find_spec("torch") if _OPENMP in str(error) else None
        if torch is None or torch.origin is None:
            raise
        runtime = Path(torch.origin).parent / "lib" / _OPENMP
        if not runtime.exists():
            raise
    ctypes.CDLL(str(runtime), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(path))
