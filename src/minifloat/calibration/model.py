"""The model that a calibration runs, and the run of a whole one: a sequence at a time, without lm_head.

The calibration text and the held-out text are two runs of the same model, which is opened and loaded once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.scales import convergence_report
from minifloat.calibration.sites import Sites, find_sites
from minifloat.calibration.stats import ActivationStats, ModelIdentity
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.errors import AlreadyQuantizedError, DataError
from minifloat.model.layouts import describe
from minifloat.model.runtime.config import config_dtype
from minifloat.model.runtime.load import Loader, LoadOptions, load_opened


class CalibrationModel:
    """An unquantized model, open for calibration."""

    def __init__(self, checkpoint: Checkpoint, options: CalibrateOptions) -> None:
        if checkpoint.quantization_config is not None:
            method = checkpoint.quantization_config.get("quant_method", "unknown")
            raise AlreadyQuantizedError(
                f"{checkpoint.path} is quantized already (quant_method {method!r}); calibrate the original checkpoint, "
                "its plain weights (minifloat convert --dequantize), or with --from-quantized"
            )
        self.checkpoint = checkpoint
        self.description = describe(checkpoint)
        self._dtype, self._device = options.dtype, options.device

    @cached_property
    def identity(self) -> ModelIdentity:
        """The identity that statistics of this model record."""
        return ModelIdentity.of(self.checkpoint)

    @cached_property
    def whole(self) -> PreTrainedModel:
        """The model with all of its weights, loaded at the first use."""
        return load_opened(self.checkpoint, self.description, LoadOptions(dtype=self._dtype, device=self._device))

    @cached_property
    def sites(self) -> Sites:
        """The modules of `whole` to observe."""
        return find_sites(self.whole, self.checkpoint, self.description)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in the dtype in which they are loaded."""
        loaded_dtype = self._dtype or config_dtype(self.checkpoint)
        infos = self.checkpoint.tensors.values()
        if loaded_dtype is None:
            return sum(info.nbytes for info in infos)
        return sum(math.prod(info.shape) * loaded_dtype.itemsize for info in infos)

    def loader(self) -> Loader:
        """Return a loader whose model has no weights yet."""
        return Loader(self.checkpoint, self.description, LoadOptions(dtype=self._dtype, device=self._device))


#: Sequences between two checks of the convergence: a check takes longer than observing one sequence.
_CHECK_EVERY = 16


def calibrate_whole(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Load a whole model, unless an earlier run did, and observe it on calibration text."""
    check_data(model.whole, data)
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


def check_data(model: PreTrainedModel, *sets: CalibrationSet) -> None:
    """Raise an error unless the vocabulary of a model has the tokens of all sets."""
    vocab_size = model.config.get_text_config().vocab_size
    for data in sets:
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
