"""Whether an engine will load a checkpoint, answered before anything is downloaded, quantized or started.

    judge.py           check_checkpoint, and the check that quantize --target makes
    rules.py           the table: checkpoints that engines refuse, degrade or answer wrongly, and the cure
    conditions.py      its conditions, as functions over a checkpoint and a target
    engine_kernels.py  which kernel of an engine multiplies which weights on which machine
    deployment.py      the answers for every engine and machine, for reports of other commands
    subject.py         the checkpoint or plan that is judged, reduced to names, shapes and formats
    target.py          the engine, the machine and the number of GPUs

Neither torch nor an engine is imported.
"""

from __future__ import annotations

from minifloat.deploy.check.judge import CheckReport, check_checkpoint, require_loadable
from minifloat.deploy.check.rules import Finding, LoadingRule, LoadVerdict
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
