"""A time budget with progress reports."""

from __future__ import annotations

import time

from minifloat.checkpoint.progress import Progress


class TimeBudget:
    """A time budget that starts when it is created."""

    def __init__(self, seconds: float, progress: Progress | None = None) -> None:
        self._seconds, self._progress = seconds, progress
        self._started = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def until(self, fraction: float = 1.0) -> float:
        """Return the seconds until this fraction of the budget is spent; 0 after that."""
        return max(fraction * self._seconds - self.spent, 0.0)

    def report(self, activity: str) -> None:
        """Report the activity that starts now."""
        if self._progress is not None:
            total = round(self._seconds * 1000)
            self._progress(min(round(self.spent * 1000), total), total, activity)

    def finish(self) -> None:
        """Report the whole budget as spent."""
        if self._progress is not None:
            total = round(self._seconds * 1000)
            self._progress(total, total, "")
