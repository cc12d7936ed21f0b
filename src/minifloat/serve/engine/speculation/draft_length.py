"""`DraftLength`: how many drafts pay, by measured times and acceptance."""

from __future__ import annotations

#: Weight of a new measurement in the running means.
_NEW = 0.1
#: What is assumed of the acceptance at first, as trials and successes; the running sums of trials stay near 1 / _NEW.
_TRIALS, _SUCCESSES = 5.0, 4.0
#: Every so many steps a length beside the best is tried, so that a change is noticed.
_TRY_EVERY = 32


class DraftLength:
    """Chooses the number of drafts per sequence that gives the most tokens per second.

    With the acceptance `a` of one draft, `k` drafts give ``(1 - a^(k+1)) / (1 - a)`` tokens per step on average. A step
    takes the time of `k` drafts and that of one step of the model with ``k + 1`` tokens per sequence. Both times are
    running means by number of tokens; a number that was not measured yet has the time of the next smaller one that was,
    or of the smallest.

    Args:
        longest: The largest number of drafts.
        cost: Time of a draft over that of a step of the model, before any was measured.

    Attributes:
        acceptance: The estimate of `a`.
    """

    def __init__(self, longest: int, cost: float) -> None:
        self._longest, self._cost = longest, cost
        self._trials, self._successes = _TRIALS, _SUCCESSES
        self._model: dict[int, float] = {}
        self._draft: dict[int, float] = {}
        self._steps = 0

    @property
    def acceptance(self) -> float:
        """The share of drafts that are accepted, of those whose drafts before them were."""
        return self._successes / self._trials

    def choose(self, sequences: int) -> int:
        """Return the number of drafts for each of some sequences."""
        self._steps += 1
        best = max(range(self._longest + 1), key=lambda count: self._rate(sequences, count))
        if self._steps % _TRY_EVERY:
            return best
        # above the best length more often than below: a length that was slow once is not tried again otherwise
        return min(best + 1, self._longest) if self._steps // _TRY_EVERY % 2 else max(best - 1, 1)

    def drafted(self, sequences: int, seconds: float) -> None:
        """Note the time of one draft of each of some sequences."""
        _note(self._draft, sequences, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """Note the time of a step of the model with so many tokens."""
        _note(self._model, tokens, seconds)

    def verified(self, proposed: int, accepted: int) -> None:
        """Note how many drafts of a sequence were accepted; the first that is not ends its trials."""
        trials = min(accepted + 1, proposed)
        keep = (1 - _NEW) ** trials
        self._trials = self._trials * keep + trials
        self._successes = self._successes * keep + accepted

    def _rate(self, sequences: int, count: int) -> float:
        """Tokens per second."""
        a = min(self.acceptance, 0.999)
        model = _time(self._model, sequences * (1 + count))
        if model is None:
            model = 1.0
        draft = _time(self._draft, sequences)
        if draft is None:
            known = _time(self._model, sequences)
            draft = self._cost * (1.0 if known is None else known)
        return (1 - a ** (count + 1)) / (1 - a) / (count * draft + model)


def _note(times: dict[int, float], size: int, seconds: float) -> None:
    known = times.get(size)
    times[size] = seconds if known is None else known + _NEW * (seconds - known)


def _time(times: dict[int, float], size: int) -> float | None:
    """Return the time of the largest measured size that is not larger, else of the smallest; None without any."""
    known = times.get(size)
    if known is not None or not times:
        return known
    smaller = [other for other in times if other < size]
    return times[max(smaller) if smaller else min(times)]
