"""What `benchmarks/linear.py` was asked for; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What to measure and how long; the options of the command line, parsed."""

    shapes: dict[str, tuple[int, int]]
    ms: tuple[int, ...]
    formats: tuple[str, ...]
    peers: tuple[str, ...]
    nbytes: int
    rounds: int
    seconds: float
    threads: int
    check: bool
