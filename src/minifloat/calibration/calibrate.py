"""Runs calibration text through a model and returns what its activations were like.

The model runs without lm_head, one sequence at a time, and unquantized: statistics of a model that is quantized
already would contain its rounding. All of it is loaded (`calibration.whole`), or, where the weights do not fit the
memory that is granted, one layer after the other (`calibration.blocks`). An interrupted run returns nothing: half of
the statistics would look like all; but one layer after the other can be continued.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

import torch

from minifloat.calibration.blocks import calibrate_blocks
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.whole import calibrate_whole, check_source
from minifloat.checkpoint import Checkpoint
from minifloat.hub import model_folder
from minifloat.report.progress import Progress
from minifloat.runtime.build import config_dtype

_LOG = logging.getLogger(__name__)


def calibrate(
    model: str | os.PathLike[str],
    data: CalibrationSet,
    *,
    histogram: bool = False,
    per_channel: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    max_memory: int | None = None,
    work_dir: Path | None = None,
    until_stable: float | None = None,
    progress: Progress | None = None,
) -> ActivationStats:
    """Observe a model on calibration text.

    Args:
        model: An unquantized checkpoint: a folder or a model of the hub.
        data: The sequences, and their record, which is kept in the result.
        histogram: Also count magnitudes, for the rules that need them.
        per_channel: Also record the amax of each input channel.
        dtype: Of weights and activations; by default that of config.json.
        device: Where the model runs.
        max_memory: Bytes of weights that may be in memory at a time; where the model has more, its layers run one
            after the other. By default everything is loaded.
        work_dir: Where such a run keeps what an interrupted one continues from, see `blocks.calibrate_blocks`; unused
            where everything is loaded.
        until_stable: Stop before the end of the data when every scale by the rule ``max`` moved by no more than this,
            relative to it, over the last `convergence.DEFAULT_WINDOW` sequences. Not with layers one after the other,
            where each has seen all of the data before the next one starts.
        progress: Called after each sequence.

    Returns:
        The statistics; with `until_stable`, of the sequences that ran, and the record says so under ``stopped``.

    Raises:
        AlreadyQuantizedError: The checkpoint is quantized.
        DataError: No sequence, an empty one, or a token id beyond the vocabulary.
        CheckpointError: The model cannot be loaded.
        NonFiniteError: NaN or Inf in an activation; names the module and the sequence.
    """
    model = model_folder(model)
    with Checkpoint.open(model) as checkpoint:
        check_source(checkpoint)
        weights = _weight_bytes(checkpoint, dtype)
    if max_memory is not None and weights > max_memory:
        if until_stable is not None:
            _LOG.warning("layers run one after the other, each over all of the data: it cannot stop when scales settle")
        return calibrate_blocks(
            model,
            data,
            histogram=histogram,
            per_channel=per_channel,
            dtype=dtype,
            device=device,
            max_memory=max_memory,
            work_dir=work_dir,
            progress=progress,
        )
    return calibrate_whole(
        model,
        data,
        histogram=histogram,
        per_channel=per_channel,
        dtype=dtype,
        device=device,
        until_stable=until_stable,
        progress=progress,
    )


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> int:
    """Bytes of all weights in the dtype that they are loaded in."""
    wanted = dtype or config_dtype(checkpoint)
    if wanted is None:
        return sum(info.nbytes for info in checkpoint.tensors.values())
    return sum(math.prod(info.shape) * wanted.itemsize for info in checkpoint.tensors.values())
