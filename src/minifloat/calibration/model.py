"""The model that a calibration runs: its checkpoint is opened, described and, where it fits, loaded once for all texts.

The calibration text and the held-out text are two runs of the same model.
"""

from __future__ import annotations

import math
from functools import cached_property

from transformers import PreTrainedModel

from minifloat.calibration.identity import ModelIdentity
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.sites import Sites, find_sites
from minifloat.checkpoint import Checkpoint
from minifloat.errors import AlreadyQuantizedError
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
