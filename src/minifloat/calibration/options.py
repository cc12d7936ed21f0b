"""The options of a calibration run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class RunOptions:
    """How calibration runs a model, and which statistics it records.

    Attributes:
        histogram: Count magnitudes too; the rules ``percentile`` and ``mse`` need the counts.
        per_channel: Record the amax of each input channel too.
        dtype: Of weights and activations; None: that of config.json.
        device: Where the model runs.
        max_memory: Bytes of weights that may be in memory at a time. A larger model runs layer by layer. None: load the
            whole model.
        work_dir: Where a layer-by-layer run keeps its finished layers, so that the same call continues after an
            interruption. The parent folder must exist; the folder is deleted at the end. None: a temporary folder, from
            which no run continues. A run of the whole model does not use it.
        until_stable: Stop before the end of the data when every scale by the rule ``max`` moved by no more than this
            fraction over the last `convergence.DEFAULT_WINDOW` sequences. A layer-by-layer run cannot stop early,
            because each layer sees all of the data before the next layer starts.
    """

    histogram: bool = False
    per_channel: bool = False
    dtype: torch.dtype | None = None
    device: str | torch.device = "cpu"
    max_memory: int | None = None
    work_dir: Path | None = None
    until_stable: float | None = None


DEFAULT_RUN = RunOptions()
