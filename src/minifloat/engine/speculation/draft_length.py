"""`DraftLength`: how many drafts pay, by measured times and acceptance."""

from __future__ import annotations

import statistics
from collections import deque

#: Weight of a new trial in the acceptance.
_NEW = 0.1
#: What is assumed of the acceptance at first, as trials and successes; the running sums of trials stay near 1 / _NEW.
_TRIALS, _SUCCESSES = 5.0, 4.0
#: A time is the median of the last `_KEPT` measurements, and counts from `_ENOUGH` on: one slow step says little.
_KEPT, _ENOUGH = 9, 3
#: Every so many steps a length beside the best is tried for `_ENOUGH` steps, so that a change is noticed.
_TRY_EVERY = 96


class DraftLength:
    """Chooses the number of drafts per sequence that gives the most tokens per second.

    With the acceptance `a` of one draft, `k` drafts give ``(1 - a^(k+1)) / (1 - a)`` tokens per step on average. A step
    takes the time of `k` drafts and that of one step of the model with ``k + 1`` tokens per sequence. Both times are
    medians by number of tokens. A number that was not measured often enough has the time of the next smaller one that
    was, or of the smallest: longer drafts are tried until their times are known.
    """

    def __init__(self, longest: int, cost: float) -> None:
        self._longest, self._cost = longest, cost
        self._trials, self._successes = _TRIALS, _SUCCESSES
        self._model, self._draft = _Times(), _Times()
        self._steps = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that are accepted, of those whose drafts before them were."""
        return self._successes / self._trials

    def choose(self, sequences: int) -> int:
        """Return the number of drafts for each of some sequences."""
        self._steps += 1
        best = max(range(self._longest + 1), key=lambda count: self._rate(sequences, count))
        period, step = divmod(self._steps, _TRY_EVERY)
        if not period or step >= _ENOUGH:
            return best
        # above and below in turn: a length that was slow for a while is not tried again otherwise
        return min(best + 1, self._longest) if period % 2 else max(best - 1, 0)

    def drafted(self, sequences: int, seconds: float) -> None:
        """Note the time of one draft of each of some sequences."""
        self._draft.note(sequences, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Note the time of a step of the model with so many tokens."""
        self._model.note(tokens, seconds)

    def verified(self, proposed: int, accepted: int) -> None:
        """Note how many drafts of a sequence were accepted; the first that is not ends its trials."""
        trials = min(accepted + 1, proposed)
        keep = (1 - _NEW) ** trials
        self._trials = self._trials * keep + trials
        self._successes = self._successes * keep + accepted

    def _rate(self, sequences: int, count: int) -> float:
        """Tokens per second."""
        a = min(self.acceptance, 0.999)
        model = self._model.of(sequences * (1 + count))
        if model is None:
            model = 1.0
        draft = self._draft.of(sequences)
        if draft is None:
            known = self._model.of(sequences)
            draft = self._cost * (1.0 if known is None else known)
        return (1 - a ** (count + 1)) / (1 - a) / (count * draft + model)


class _Times:
    """Times by number of tokens."""

    def __init__(self) -> None:
        self._last: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def note(self, size: int, seconds: float) -> None:
        last = self._last.setdefault(size, deque(maxlen=_KEPT))
        last.append(seconds)
        if len(last) >= _ENOUGH:
            self._medians[size] = statistics.median(last)

    def of(self, size: int) -> float | None:
        """Return the time of the largest known size that is not larger, else of the smallest; None without any."""
        known = self._medians.get(size)
        if known is not None or not self._medians:
            return known
        smaller = [other for other in self._medians if other < size]
        return self._medians[max(smaller) if smaller else min(self._medians)]
