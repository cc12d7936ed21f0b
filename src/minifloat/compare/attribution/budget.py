"""A time to keep to, and what is told of it."""

from __future__ import annotations

import time

from minifloat.report.progress import Progress


class TimeBudget:
    """Counts from when it is made.

    Args:
        seconds: The time.
        progress: Told about it.
    """

    def __init__(self, seconds: float, progress: Progress | None = None) -> None:
        self._seconds, self._progress = seconds, progress
        self._started = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds."""
        return time.perf_counter() - self._started

    def until(self, fraction: float = 1.0) -> float:
        """Seconds until so much of the time is spent; 0 after that."""
        return max(fraction * self._seconds - self.spent, 0.0)

    def tell(self, what: str) -> None:
        """What is done from now on."""
        if self._progress is not None:
            total = round(self._seconds * 1000)
            self._progress(min(round(self.spent * 1000), total), total, what)

    def end(self) -> None:
        """All is done, however early."""
        if self._progress is not None:
            total = round(self._seconds * 1000)
            self._progress(total, total, "")
