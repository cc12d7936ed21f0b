"""Whether an engine will load a checkpoint, answered before anything is downloaded, quantized or started.

    judge.py           check_checkpoint, and the check that quantize --target makes
    rules/             a table per engine: checkpoints that it refuses, degrades or answers wrongly, and the cure
    engine_kernels.py  which kernel of an engine multiplies which weights on which machine
    loading_rule.py    a row of the rules and how it is applied;  conditions.py, parallel_conditions.py  the conditions
    subject.py         the checkpoint or plan that is judged, reduced to names, shapes and formats
    target.py          the engine, the machine and the number of GPUs

Neither torch nor an engine is imported.
"""

from __future__ import annotations

from minifloat.deploy.check.judge import CheckReport, check_checkpoint, require_loadable
from minifloat.deploy.check.loading_rule import Finding, LoadingRule, LoadVerdict
from minifloat.deploy.check.target import ENGINES, Target
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE

__all__ = [
    "ENGINES",
    "ENGINE_HARDWARE",
    "CheckReport",
    "Finding",
    "LoadVerdict",
    "LoadingRule",
    "Target",
    "check_checkpoint",
    "require_loadable",
]
