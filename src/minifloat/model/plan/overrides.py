"""`Override`: a pattern of module names and their scheme; `override_patterns`: short patterns of chosen names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from minifloat.errors import PatternError, lookup
from minifloat.numerics.scheme import SCHEMES, Scheme

#: The word for "keep the model's precision" in place of a scheme's name.
KEEP = "bf16"


@dataclass(frozen=True)
class Override:
    """A pattern, and the scheme of the modules that it matches."""

    pattern: str
    scheme: Scheme | None

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read ``REGEX=SCHEME`` or ``REGEX=bf16``, as the command line writes it."""
        pattern, separator, name = text.rpartition("=")
        if not separator or not pattern:
            raise PatternError(f"an override is REGEX=SCHEME or REGEX={KEEP}, got {text!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise PatternError(f"{pattern!r} is not a regular expression: {error}") from error
        return cls(pattern, lookup("scheme", name, {KEEP: None, **SCHEMES}))

    def __str__(self) -> str:
        return f"{self.pattern}={KEEP if self.scheme is None else self.scheme.name}"


_NUMBERED = re.compile(r"^(?P<stem>.*?\w+)\.(?P<index>\d+)\.(?P<tail>.*)$")


def override_patterns(chosen: Collection[str], names: Collection[str]) -> tuple[str, ...]:
    """Return patterns that together match every chosen name and no other name."""
    unmatched, others = dict.fromkeys(chosen), [name for name in names if name not in chosen]
    patterns = []
    for pattern in [*_layer_patterns(chosen, names), *(f"^{re.escape(name)}$" for name in chosen)]:
        matched = [name for name in unmatched if re.search(pattern, name)]
        if matched and not any(re.search(pattern, name) for name in others):
            patterns.append(pattern)
            for name in matched:
                del unmatched[name]
    return tuple(patterns)


@dataclass
class _Layers:
    """The numbered layers under one name."""

    tails: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    chosen: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def whole(self, tail: str) -> frozenset[int]:
        """Return the layers in which every name that is `tail` or under it is chosen, and at least one exists."""
        return frozenset(
            index
            for index, chosen in self.chosen.items()
            if _under(tail, chosen) and _under(tail, chosen) == _under(tail, self.tails[index])
        )

    def having(self, tail: str) -> frozenset[int]:
        return frozenset(index for index, tails in self.tails.items() if _under(tail, tails))


def _layer_patterns(chosen: Collection[str], names: Collection[str]) -> Iterator[str]:
    """Yield patterns for whole layers first, then for blocks in them, then for single modules."""
    stems: dict[str, _Layers] = defaultdict(_Layers)
    for name in names:
        match = _NUMBERED.match(name)
        if match:
            layers, index = stems[match["stem"]], int(match["index"])
            layers.tails[index].add(match["tail"])
            if name in chosen:
                layers.chosen[index].add(match["tail"])
    for stem, layers in stems.items():
        prefix = re.escape(stem.rpartition(".")[2])
        for indices, all_of_them, tails in _merged(layers):
            numbers = sorted(indices)
            number = str(numbers[0]) if len(numbers) == 1 else f"({'|'.join(map(str, numbers))})"
            if tails == [""]:
                yield rf"{prefix}\." if all_of_them else rf"{prefix}\.{number}\."
            else:
                yield (r"\." if all_of_them else rf"{prefix}\.{number}\.") + _alternatives(tails)


def _merged(layers: _Layers) -> Iterator[tuple[frozenset[int], bool, list[str]]]:
    """Group the chosen tails by layers."""
    covered: dict[int, set[str]] = defaultdict(set)
    grouped: dict[tuple[frozenset[int], bool, str], list[str]] = defaultdict(list)
    for tail in _prefixes(layers):
        whole = frozenset(index for index in layers.whole(tail) if _under(tail, layers.chosen[index]) - covered[index])
        if not whole:
            continue
        for index in whole:
            covered[index] |= _under(tail, layers.chosen[index])
        is_block = any(name != tail for index in whole for name in _under(tail, layers.tails[index]))
        parent = tail if is_block else tail.rpartition(".")[0]  # a block is a pattern of its own
        grouped[whole, layers.whole(tail) == layers.having(tail), parent].append(
            f"{tail}." if is_block and tail else tail
        )
    for (indices, all_of_them, _), tails in grouped.items():
        yield indices, all_of_them, tails


def _prefixes(layers: _Layers) -> list[str]:
    """Return all prefixes of chosen tails, the shortest first; the empty prefix stands for the whole layer."""
    tails = dict.fromkeys(tail for chosen in layers.chosen.values() for tail in sorted(chosen))
    prefixes = {".".join(tail.split(".")[:count]): count for tail in tails for count in range(tail.count(".") + 2)}
    return sorted(prefixes, key=lambda prefix: prefixes[prefix])


def _under(tail: str, names: set[str]) -> set[str]:
    return {name for name in names if not tail or name == tail or name.startswith(f"{tail}.")}


def _alternatives(tails: list[str]) -> str:
    """Return a pattern for several tails, or for a single block such as ``"mlp."``."""
    if tails[0].endswith("."):
        return re.escape(tails[0])
    start = _common_start(tails)
    end = _common_start([tail[len(start) :][::-1] for tail in tails])[::-1]
    middles = [tail[len(start) : len(tail) - len(end)] for tail in tails]
    middle = "" if len(tails) == 1 else f"({'|'.join(map(re.escape, middles))})"
    return f"{re.escape(start)}{middle}{re.escape(end)}$"


def _common_start(texts: list[str]) -> str:
    shortest = min(texts, key=len)
    length = next((i for i, c in enumerate(shortest) if any(text[i] != c for text in texts)), len(shortest))
    return shortest[:length]
