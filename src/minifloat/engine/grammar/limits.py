"""What grammars may take."""

from __future__ import annotations

from dataclasses import dataclass, field

_MIB = 1 << 20


@dataclass(frozen=True)
class GrammarLimits:
    """What grammars may take.

    Attributes:
        step_seconds: Processor time of one token, or of compiling a grammar.
        seconds: Processor time that the texts of a grammar may have in store; they begin with it.
        seconds_per_token: Processor time that each of their tokens adds to it.
        memory: Bytes of a grammar's process.
        processes: Different grammars at a time; more are refused.
        compiling: Grammars that are compiled at a time; more wait.
        idle: Compiled grammars that are kept when no text needs them.
        idle_memory: Bytes up to which a compiled grammar is kept.
        nice: Added to the priority value of the processes.
        parser: Limits of llguidance itself (`LLParserLimits`).
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
