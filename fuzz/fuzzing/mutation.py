"""Changes of JSON values: the fuzzer changes fields, not the bytes of their text."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable, Collection, Iterator
from random import Random
from typing import Any

#: Values that programs forget.
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 127, 128, 255, 256, 1 << 20, 2**31 - 1, 2**31,
    2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 0.0, -0.0, 0.5, 1.5, -1.5, 1e-40, 1e38, 1e300, 1e999,
    -1e999, float("nan"), "", "0", "1", "-1", "1e9", "x", " ", "\0", "\ud800", "é", "..", "../x", "/etc/passwd",
    "a" * 300, ".*", "(", "(a+)+$", "re:.*", [], {}, [[]], [{}], [None], {"": None}, {"x": []}, [0], [1, 1], [-1],
    ["x"], [0.5],
)  # fmt: skip

#: A container of a value, and the key or index of the value in it.
_Place = tuple[Any, Any]


def _places(value: Any) -> Iterator[_Place]:
    """Yield every value inside `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)


def change(value: Any, random: Random, words: Collection[str] = ()) -> Any:
    """Return a JSON value with a few random changes; `words` are texts that matter to its reader."""
    root = [copy.deepcopy(value)]
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        places = list(_places(root))
        holder, key = random.choice(places)
        _CHANGES[random.randrange(len(_CHANGES))](holder, key, random, places, list(words) or ["x"])
    return root[0]


def _odd(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    holder[key] = copy.deepcopy(random.choice(ODD))


def _word(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    holder[key] = random.choice(words)


def _remove(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    if len(places) > 1 and holder is not places[0][0]:
        del holder[key]


def _other(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    other, name = random.choice(places)
    holder[key] = copy.deepcopy(other[name])


def _add(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    inner = holder[key]
    if isinstance(inner, dict):
        inner[random.choice(words)] = copy.deepcopy(random.choice(ODD))
    elif isinstance(inner, list):
        inner.insert(random.randrange(len(inner) + 1), copy.deepcopy(random.choice(inner or ODD)))
    else:
        holder[key] = random.choice(([inner], {"x": inner}, [inner, inner]))


def _shift(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    inner = holder[key]
    if isinstance(inner, bool) or not isinstance(inner, int | float):
        _text(holder, key, random, places, words)
    else:
        holder[key] = random.choice((inner + 1, inner - 1, -inner, inner * 2, inner * 1000, float(inner)))


def _text(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    inner = holder[key]
    if not isinstance(inner, str):
        return _odd(holder, key, random, places, words)
    position = random.randrange(len(inner) + 1)
    piece = random.choice((*"0 9.-_/\\\"'\n\0{}[](*+|=:,é", *words))
    holder[key] = inner[:position] + piece + inner[position + random.randrange(3) :]
    return None


def _rename(holder: Any, key: Any, random: Random, places: list[_Place], words: list[str]) -> None:
    if isinstance(holder, dict):
        holder[random.choice(words)] = holder.pop(key)


_CHANGES: tuple[Callable[..., None], ...] = (_odd, _odd, _word, _remove, _other, _add, _shift, _shift, _text, _rename)


def words_of(value: Any) -> set[str]:
    """Return every key and text in a JSON value."""
    found: set[str] = set()
    for holder, key in _places([value]):
        found |= {text for text in (key, holder[key]) if isinstance(text, str)}
    return found


def encoded(value: Any) -> bytes:
    """Return a value as JSON; numbers that are not finite as Python writes them."""
    return json.dumps(value).encode()


def decoded(data: bytes) -> Any:
    """Return the value of JSON; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def json_mutator(words: Collection[str]) -> Callable[[bytes, int, Random], bytes]:
    """Return a function that changes an input that is JSON."""
    ordered = sorted(words)

    def mutate(data: bytes, largest: int, random: Random) -> bytes:
        changed = encoded(change(decoded(data), random, ordered))
        return changed if len(changed) <= largest else data[:largest]

    return mutate


def split_safetensors(data: bytes) -> tuple[Any, bytes] | None:
    """Return the header of a safetensors file as a JSON value, and its data; None if it has no such header."""
    if len(data) < 8:
        return None
    (length,) = struct.unpack("<Q", data[:8])
    header = decoded(data[8 : 8 + length]) if length <= len(data) - 8 else None
    return None if header is None else (header, data[8 + length :])


def join_safetensors(header: Any, tail: bytes) -> bytes:
    """Return a safetensors file of a header and data."""
    text = header if isinstance(header, bytes) else encoded(header)
    return struct.pack("<Q", len(text)) + text + tail


def change_bytes(data: bytes, random: Random) -> bytes:
    """Return bytes with a few of them changed, removed or repeated."""
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        position = random.randrange(len(changed) + 1)
        length = random.choice((1, 1, 2, 8))
        kind = random.randrange(4)
        if kind == 0:
            del changed[position : position + length]
        elif kind == 1:
            changed[position:position] = random.randbytes(length)
        elif kind == 2:
            changed[position : position + length] = random.randbytes(length)
        else:
            changed[position:position] = changed[position : position + 4 * length]
    return bytes(changed)
