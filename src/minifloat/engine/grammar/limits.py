"""What grammars may take."""

from __future__ import annotations

from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(frozen=True)
class GrammarLimits:
    """What grammars may take.

    Attributes:
        seconds: Processor time that the texts of a grammar may have in store; they begin with it.
    """

    step_seconds: float = 2.0
    seconds: float = 10.0
    seconds_per_token: float = 0.02
    memory: int = 256 * _MIB
    processes: int = 16
    compiling: int = 2
    idle: int = 8
    idle_memory: int = 32 * _MIB
    nice: int = 19
    parser: dict[str, int] = field(default_factory=dict)
