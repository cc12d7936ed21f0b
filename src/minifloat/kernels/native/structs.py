"""The structures and constants of ``api.h``, read from the header itself: it alone declares the C interface."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

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
