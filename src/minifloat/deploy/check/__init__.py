"""Whether an engine will load a checkpoint, answered before anything is downloaded, quantized or started."""

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
