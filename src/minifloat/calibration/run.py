"""Runs calibration text through a model and returns what its activations were like.

The model runs without lm_head, one sequence at a time, and unquantized: statistics of a model that is quantized
already would contain its rounding. Where the weights do not fit the memory that is granted, `calibration.blocks` runs
the layers one after the other instead. An interrupted run returns nothing: half of the statistics would look like all;
but one layer after the other can be continued.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from minifloat.calibration.convergence import report
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.identity import ModelIdentity
from minifloat.calibration.observe import Observer
from minifloat.calibration.stats import ActivationStats
from minifloat.checkpoint import Checkpoint
from minifloat.errors import AlreadyQuantizedError, DataError
from minifloat.serve.build import config_dtype
from minifloat.serve.load import load

_LOG = logging.getLogger(__name__)

#: Sequences from one look at the convergence to the next; looking takes longer than a hook.
_CHECK_EVERY = 16

#: Called with tokens done, tokens in all, and what is at work.
Progress = Callable[[int, int, str], None]


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
        model: Folder of an unquantized checkpoint.
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
    with Checkpoint.open(model) as checkpoint:
        check_source(checkpoint)
        weights = _weight_bytes(checkpoint, dtype)
        identity = ModelIdentity.of(checkpoint)
    if max_memory is not None and weights > max_memory:
        from minifloat.calibration.blocks import calibrate_blocks

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
    loaded = load(model, dtype=dtype, device=device)
    check_data(data, loaded.config.get_text_config().vocab_size)
    done = 0
    with Observer(loaded, histogram=histogram, per_channel=per_channel) as observer:
        for ids in data.sequences:
            observer.run(torch.tensor([ids]))
            done += len(ids)
            if progress is not None:
                progress(done, data.tokens, f"sequence {observer.sequences} of {len(data.sequences)}")
            if until_stable is not None and observer.sequences % _CHECK_EVERY == 0:
                stats = ActivationStats(
                    identity, observer.sequences, done, data.record, observer.inputs(), observer.kv()
                )
                if not report(stats, tolerance=until_stable).unsettled:
                    break
    stopped = {"sequences": observer.sequences, "tokens": done, "until_stable": until_stable}
    record = data.record if observer.sequences == len(data.sequences) else {**data.record, "stopped": stopped}
    return ActivationStats(identity, observer.sequences, done, record, observer.inputs(), observer.kv())


def check_data(data: CalibrationSet, vocab_size: int) -> None:
    """Raise unless a model with that vocabulary can run the sequences.

    Raises:
        DataError: No sequence, an empty one, or a token id beyond the vocabulary.
    """
    if not data.sequences:
        raise DataError("no calibration data: expected at least one sequence of tokens")
    for index, ids in enumerate(data.sequences):
        if not ids:
            raise DataError(f"sequence {index} of the calibration data has no tokens")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise DataError(
                f"sequence {index} of the calibration data has token ids from {min(ids)} to {max(ids)}, beyond the "
                f"model's vocabulary of {vocab_size}: it was made with another model's tokenizer"
            )


def check_source(checkpoint: Checkpoint) -> None:
    """Raise unless the checkpoint is one to calibrate.

    Raises:
        AlreadyQuantizedError: It is quantized.
    """
    if checkpoint.quantization_config is not None:
        method = checkpoint.quantization_config.get("quant_method", "unknown")
        raise AlreadyQuantizedError(
            f"{checkpoint.path} is quantized already (quant_method {method!r}); calibrate the original checkpoint"
        )


def _weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype | None) -> int:
    """Bytes of all weights in the dtype that they are loaded in."""
    wanted = dtype or config_dtype(checkpoint)
    if wanted is None:
        return sum(info.nbytes for info in checkpoint.tensors.values())
    return sum(math.prod(info.shape) * wanted.itemsize for info in checkpoint.tensors.values())
