"""Calibration of a model that fits in memory: all of it, one sequence at a time, without lm_head.

What a calibration of any kind asks of its checkpoint and its data is here too.
"""

from __future__ import annotations

import os

import torch

from minifloat.calibration.convergence import report
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.identity import ModelIdentity
from minifloat.calibration.observe import Observer
from minifloat.calibration.stats import ActivationStats
from minifloat.checkpoint import Checkpoint
from minifloat.errors import AlreadyQuantizedError, DataError
from minifloat.report.progress import Progress
from minifloat.runtime.load import load

#: Sequences from one look at the convergence to the next; looking takes longer than a hook.
_CHECK_EVERY = 16


def calibrate_whole(
    model: str | os.PathLike[str],
    data: CalibrationSet,
    *,
    histogram: bool = False,
    per_channel: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    until_stable: float | None = None,
    progress: Progress | None = None,
) -> ActivationStats:
    """Load a model and observe it on calibration text; arguments and errors as of `calibration.calibrate.calibrate`."""
    with Checkpoint.open(model) as checkpoint:
        check_source(checkpoint)
        identity = ModelIdentity.of(checkpoint)
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
