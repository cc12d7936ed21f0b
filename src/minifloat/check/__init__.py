"""Will an engine load a checkpoint: asked before anything is downloaded, quantized or started.

    rules.py      the table: what each engine does to which checkpoints, since which version, and the cure
    kernels.py    what multiplies which weights where
    finding.py    the predicates of the rules;  subject.py  what they look at;  hardware.py  where it runs
    judge.py      check_checkpoint, and what quantize --target asks

No torch is imported, and no engine.
"""

from __future__ import annotations

from minifloat.check.hardware import HARDWARE, Hardware
from minifloat.check.judge import CheckReport, check_checkpoint, require_loadable
from minifloat.check.verdict import ENGINES, Finding, Rule, Target, Verdict

__all__ = [
    "ENGINES",
    "HARDWARE",
    "CheckReport",
    "Finding",
    "Hardware",
    "Rule",
    "Target",
    "Verdict",
    "check_checkpoint",
    "require_loadable",
]
