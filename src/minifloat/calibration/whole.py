"""Calibration of a model that fits in memory: the whole model runs one sequence at a time, without lm_head.

This module also holds the check of the data that every calibration makes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from minifloat.calibration.convergence import convergence_report
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.stats import ActivationStats
from minifloat.checkpoint.progress import Progress
from minifloat.errors import DataError

#: Sequences between two checks of the convergence: a check takes longer than observing one sequence.
_CHECK_EVERY = 16


def calibrate_whole(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Load a whole model, unless an earlier run did, and observe it on calibration text.

    `CalibrateOptions.max_memory` and `CalibrateOptions.work_dir` are not used. Other arguments, result and errors are
    those of `calibration.calibrate.calibrate`.
    """
    check_data(data, model.whole.config.get_text_config().vocab_size)
    tokens = 0

    def statistics() -> ActivationStats:
        return ActivationStats(
            model.identity, observer.sequences, tokens, data.record, observer.inputs(), observer.kv()
        )

    with Observer(
        model.whole, sites=model.sites, histogram=options.histogram, per_channel=options.per_channel
    ) as observer:
        for ids in data.sequences:
            observer.run(torch.tensor([ids]))
            tokens += len(ids)
            if progress is not None:
                progress(tokens, data.tokens, f"sequence {observer.sequences} of {len(data.sequences)}")
            if options.until_stable is None or observer.sequences % _CHECK_EVERY:
                continue
            if not convergence_report(statistics(), tolerance=options.until_stable).unsettled:
                break
    stats = statistics()
    if observer.sequences == len(data.sequences):
        return stats
    stopped = {"sequences": observer.sequences, "tokens": tokens, "until_stable": options.until_stable}
    return replace(stats, data={**data.record, "stopped": stopped})


def check_data(data: CalibrationSet, vocab_size: int) -> None:
    """Raise an error unless a model with that vocabulary can run the sequences."""
    if not data.sequences:
        raise DataError("no calibration data: expected at least one sequence of tokens")
    for index, ids in enumerate(data.sequences):
        if not ids:
            raise DataError(f"sequence {index} of the calibration data has no tokens")
        if min(ids) < 0 or max(ids) >= vocab_size:
            raise DataError(
                f"sequence {index} of the calibration data has token ids from {min(ids)} to {max(ids)}, beyond the "
                f"model's vocabulary of {vocab_size}: they come from another model's tokenizer"
            )
