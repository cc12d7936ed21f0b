"""What rounding with data gains on each source of its text, where there are several.

The held-out text is a random part of the calibration text, so it cannot show that the calibration text is of another
kind than what the model will see; only `compare` on other text can. What it can show is a source that gains nothing,
because its share of the text is too small or too different from the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minifloat.calibration.data import CalibrationSet, interleave

#: Standard errors that the method must be worse by before a source is named.
_SURE = 2.0


@dataclass(frozen=True)
class SourceGain:
    """The divergence from the original model on the held-out sequences of one source.

    Attributes:
        nearest: KL of rounding to nearest, in nats per token.
        method: KL of the method, in nats per token.
        loss_error: Standard error of `loss`; None: there is one sequence.
    """

    name: str
    sequences: int
    tokens: int
    nearest: float
    method: float
    loss: float
    loss_error: float | None


def source_gains(
    record: Mapping[str, Any], held_out: CalibrationSet, fraction: float, found: Mapping[str, Any]
) -> tuple[SourceGain, ...]:
    """Return the divergence on each source; nothing if there is one source."""
    sources = record.get("sources", ())
    if len(sources) < 2 or not found.get("method_by_sequence"):
        return ()
    mixed = interleave([[number] * source["sequences"] for number, source in enumerate(sources)])
    numbers = CalibrationSet(tuple((number,) for number in mixed)).held_out(fraction)[1].sequences
    figures = zip(map(len, held_out.sequences), found["nearest_by_sequence"], found["method_by_sequence"], strict=True)
    rows = [(number, *figure) for (number,), figure in zip(numbers, figures, strict=True)]
    return tuple(
        _gain(source["name"], own)
        for number, source in enumerate(sources)
        if (own := [row[1:] for row in rows if row[0] == number])
    )


def _gain(name: str, rows: Sequence[tuple[int, float, float]]) -> SourceGain:
    """Return the divergence on the sequences of one source, given as (tokens, nearest, method)."""
    tokens = sum(count for count, _, _ in rows)
    losses = [method - nearest for _, nearest, method in rows]
    loss, error = sum(losses) / len(losses), None
    if len(losses) > 1:
        error = math.sqrt(sum((value - loss) ** 2 for value in losses) / (len(losses) - 1) / len(losses))
    nearest = sum(count * value for count, value, _ in rows) / tokens
    method = sum(count * value for count, _, value in rows) / tokens
    return SourceGain(name, len(rows), tokens, nearest, method, loss, error)


def source_warnings(gains: Sequence[SourceGain], method: str) -> tuple[str, ...]:
    """Return a warning for each source on which a method is surely worse than rounding to nearest."""
    return tuple(
        f"WARNING: on held-out text of {gain.name}, {method} is worse than rounding to nearest "
        f"({gain.method:.4f} against {gain.nearest:.4f} nats): give this source a larger weight, or more text."
        for gain in gains
        if gain.loss_error is not None and gain.loss > _SURE * gain.loss_error
    )
