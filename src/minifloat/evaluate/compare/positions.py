"""KL divergence by position in the window, for windows so long that a model may fail late in them.

Errors of keys and values, of rotary embeddings and of long sums grow with the number of tokens before a token. The mean
over a window hides this: half of a window's tokens are early ones. So tokens are grouped by their position, in ranges
that double, and the later half of the windows is compared with their first quarter, window by window.

Left out: windows of at most `SHORT_WINDOW` tokens, whose ranges would be few and small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from minifloat.evaluate.compare.intervals import Estimate, mean_interval, sums_by_unit
from minifloat.evaluate.compare.metrics import TokenScores

#: Largest number of tokens of a window for which positions are not reported.
SHORT_WINDOW = 512
#: Ends of the first two ranges; from there on the ends double.
_FIRST_ENDS = (128, 512)

_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PositionRange:
    """The tokens at a range of positions.

    Attributes:
        kl_mean: Mean KL divergence in nats per token.
    """

    low: int
    high: int
    units: int
    tokens: int
    kl_mean: Estimate


@dataclass(frozen=True)
class LateChange:
    """How much more the models differ late in the windows than early in them.

    Attributes:
        early_kl: Mean KL divergence of early tokens, in nats per token, of the units that have late tokens.
        late_kl: Mean KL divergence of late tokens, in nats per token.
        change: Late less early KL divergence in nats per token, each unit compared with itself. Units count by their
            late tokens.
    """

    early_end: int
    late_start: int
    early_kl: float
    late_kl: float
    change: Estimate

    @property
    def worse(self) -> bool:
        """Whether the whole interval of the change is above 0."""
        return self.change.known and self.change.low > 0


@dataclass(frozen=True)
class Positions:
    """The KL divergence of one text by position.

    Attributes:
        late: Comparison of late tokens with early tokens; None if no unit has both.
    """

    ranges: tuple[PositionRange, ...]
    late: LateChange | None


def by_position(scores: TokenScores) -> Positions | None:
    """Group scores by position; None if all windows are short (`SHORT_WINDOW`)."""
    longest = int(scores.position.max()) + 1
    if longest <= SHORT_WINDOW:
        return None
    numbers, index = np.unique(scores.unit, return_inverse=True)
    units = index.astype(np.int64)
    ranges = []
    for low, high in _ranges(longest):
        inside = (scores.position >= low) & (scores.position <= high)
        if inside.any():
            sums, sizes = _of(inside, scores, units, len(numbers))
            used = sizes > 0
            kl = mean_interval(sums[used], sizes[used]).clipped(0, math.inf)
            ranges.append(PositionRange(low, high, int(used.sum()), int(inside.sum()), kl))
    return Positions(tuple(ranges), _late_change(scores, units, len(numbers), longest))


def _ranges(longest: int) -> list[tuple[int, int]]:
    """Return the first and last positions of ranges: 0 to 127, 128 to 511, 512 to 1023, 1024 to 2047, ..."""
    ends = list(_FIRST_ENDS)
    while ends[-1] < longest:
        ends.append(2 * ends[-1])
    ends[-1] = longest
    return [(low, end - 1) for low, end in zip((0, *ends), ends, strict=False)]


def _of(
    mask: _Mask, scores: TokenScores, units: npt.NDArray[np.int64], count: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return for each unit the sum of the KL divergences of its tokens in `mask`, and their number."""
    sizes = np.bincount(units[mask], minlength=count).astype(np.float64)
    return sums_by_unit(scores.kl[mask], units[mask], count), sizes


def _late_change(scores: TokenScores, units: npt.NDArray[np.int64], count: int, longest: int) -> LateChange | None:
    early_end, late_start = longest // 4, longest // 2
    early, early_sizes = _of(scores.position < early_end, scores, units, count)
    late, late_sizes = _of(scores.position >= late_start, scores, units, count)
    both = (early_sizes > 0) & (late_sizes > 0)
    if not both.any():
        return None
    early, early_sizes, late, late_sizes = (values[both] for values in (early, early_sizes, late, late_sizes))
    change = mean_interval(late - early / early_sizes * late_sizes, late_sizes)
    return LateChange(
        early_end, late_start, float(early.sum() / early_sizes.sum()), float(late.sum() / late_sizes.sum()), change
    )
