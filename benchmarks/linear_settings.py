"""The settings of `benchmarks/linear.py`; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The parsed options of the command line: what to measure, and for how long."""

    shapes: dict[str, tuple[int, int]]
    ms: tuple[int, ...]
    formats: tuple[str, ...]
    peers: tuple[str, ...]
    nbytes: int
    rounds: int
    seconds: float
    threads: int
    check: bool
