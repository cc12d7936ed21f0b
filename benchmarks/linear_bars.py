"""The speeds that `benchmarks/linear.py` requires of our kernels, and the verdict on a measurement.

The bars were set before the kernels were written, from the memory bandwidth of the machine. Two rules apply at every M:
a format is never slower than torch in BF16, which users have without us, and hardly ever slower than our next larger
format, because otherwise there would be no reason to use the smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.errors import UsageError

BASELINE = "torch BF16"
FORMATS = ("fp8", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "bf16")

#: Format -> our next larger format.
NEXT_LARGER = {"fp8": "bf16", "fp8-block": "bf16", "mxfp8": "bf16", "mxfp4": "fp8", "nvfp4": "fp8"}
NEVER_BELOW_BASELINE = 1.0
NEVER_BELOW_NEXT = 0.95


@dataclass(frozen=True)
class Bar:
    """The required value of one quantity.

    Attributes:
        quantity: "x torch" (times the speed of torch BF16), "read" (share of the read bandwidth), or "x next" (times
            the speed of our next larger format).
        floor: Smallest value that passes.
        aim: Desired value; None if there is only a floor.
    """

    quantity: str
    floor: float
    aim: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a measurement with its bars.

    Attributes:
        word: "aim" (every aim is reached), "pass" (every floor is reached) or "short" (a floor is missed).
        short: Relative distance of the worst quantity below its floor; 0 if no floor is missed.
        quantity: Name of the worst quantity; empty if no floor is missed.
    """

    word: str
    short: float = 0.0
    quantity: str = ""

    def __str__(self) -> str:
        if self.word != "short":
            return self.word
        return f"short by {max(self.short * 100, 0.1):.{0 if self.short >= 0.1 else 1}f}% ({self.quantity})"


_FP8 = {
    1: (Bar("x torch", 2.6, 3.0), Bar("read", 0.85, 0.92)),
    16: (Bar("x torch", 2.2, 2.8),),
    64: (Bar("x torch", 1.5, 2.2),),
    256: (Bar("x torch", 1.2, 2.0),),
    1024: (Bar("x torch", 1.2, 2.0),),
}
_MXFP4 = {
    1: (Bar("x torch", 4.4, 5.3), Bar("read", 0.75, 0.88)),
    16: (Bar("x torch", 3.3, 4.5),),
    64: (Bar("x torch", 2.0, 2.5),),
    256: (Bar("x torch", 1.2, 2.0),),
    1024: (Bar("x torch", 1.2, 2.0),),
}
#: Bars by format and M, on processors with all instruction sets that the bars were set for.
BARS: dict[str, dict[int, tuple[Bar, ...]]] = {
    "fp8": _FP8,
    "fp8-block": _FP8,
    "mxfp4": _MXFP4,
    "bf16": {1: (Bar("read", 0.90, 0.95),)},
}
#: The same on AVX512_BF16 without AMX, in place of those above except at M = 1.
_AVX512_BF16 = {
    8: (Bar("x torch", 3.0, 3.5),),
    16: (Bar("x torch", 2.2, 3.0),),
    32: (Bar("x torch", 1.6, 2.0),),
    64: (Bar("x torch", 1.15, 1.4),),
    256: (Bar("x torch", 1.0, 1.1),),
    1024: (Bar("x torch", 1.0, 1.05),),
}
BARS_AVX512_BF16: dict[str, dict[int, tuple[Bar, ...]]] = {"fp8": _AVX512_BF16, "mxfp4": _AVX512_BF16}


def parse_formats(text: str) -> tuple[str, ...]:
    """Return the formats in `text`: names separated by commas, "all" or "none".

    Raises:
        UsageError: If a name is unknown.
    """
    return parse_names(text, FORMATS, "formats")


def parse_names(text: str, known: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Return the names in `text`: names separated by commas, "all" or "none".

    Args:
        text: The text of the option.
        known: All valid names.
        kind: Noun in the plural for the error message, as in "formats".

    Raises:
        UsageError: If a name is not in `known`.
    """
    if text in ("all", "none"):
        return known if text == "all" else ()
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"unknown {kind} {', '.join(unknown)}; there are: {', '.join(known)}, or all, none")
    return names


def bars(contender: str, m: int | None, isa: str) -> tuple[Bar, ...]:
    """Return the bars of our `contender` at `m` rows of the input on `isa`; none for peers.

    With AMX all bars apply; with AVX512_BF16 its own and those of M = 1; with AVX-512 alone those of M = 1; elsewhere,
    and if `m` is None, only the two rules, which apply everywhere.
    """
    if contender not in FORMATS:
        return ()
    applies = isa == "amx" or (isa.startswith("avx512") and m == 1)
    table = BARS_AVX512_BF16 if isa == "avx512_bf16" and not applies else BARS if applies else {}
    special = table.get(contender, {}).get(m, ()) if m is not None else ()
    rules = []
    if not any(bar.quantity == "x torch" for bar in special):
        rules.append(Bar("x torch", NEVER_BELOW_BASELINE))
    if contender in NEXT_LARGER:
        rules.append(Bar("x next", NEVER_BELOW_NEXT))
    return (*special, *rules)


def judge(held_to: tuple[Bar, ...], measured: dict[str, float]) -> Verdict | None:
    """Return the verdict on a measurement; None if no bar applies to a measured quantity.

    Args:
        held_to: The bars, from `bars`.
        measured: Quantity -> value; a missing quantity (its baseline was not measured) is not judged.
    """
    judged = [(bar, measured[bar.quantity]) for bar in held_to if bar.quantity in measured]
    if not judged:
        return None
    worst, value = min(judged, key=lambda pair: pair[1] / pair[0].floor)
    if value < worst.floor:
        return Verdict("short", 1 - value / worst.floor, worst.quantity)
    aims = [(bar.aim, value) for bar, value in judged if bar.aim is not None]
    return Verdict("aim" if aims and all(value >= aim for aim, value in aims) else "pass")


def describe(held_to: tuple[Bar, ...]) -> str:
    """Return floors and aims as in "2.6x/3x 85/92%", without the rule on the next larger format."""
    parts = []
    for bar in held_to:
        if bar.quantity == "x torch":
            parts.append(f"{bar.floor:g}x" + (f"/{bar.aim:g}x" if bar.aim else ""))
        elif bar.quantity == "read":
            parts.append(f"{bar.floor * 100:g}" + (f"/{bar.aim * 100:g}%" if bar.aim else "%"))
    return " ".join(parts)
