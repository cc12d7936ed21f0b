"""Run calibration text through a model and return the statistics of its activations.

The model runs without lm_head, one sequence at a time. A quantized model runs only if asked for (`from_quantized`),
because its statistics contain its rounding errors. A model that fits into the memory limit is loaded whole
(`calibration.whole`); a larger one runs layer by layer (`calibration.layerwise`). An interrupted run returns nothing,
because partial statistics cannot be told from complete ones; a layer-by-layer run can be continued.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.run import calibrate_layerwise
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import DEFAULT_OPTIONS, CalibrateOptions
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.whole import calibrate_whole
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.model.layouts.decoded import plain_view

_LOG = logging.getLogger(__name__)


@contextmanager
def open_source(model: str | os.PathLike[str], options: CalibrateOptions) -> Iterator[Checkpoint]:
    """Open a model, or the plain view of a quantized one."""
    with Checkpoint.open(model_folder(model, revision=options.revision)) as stored:
        yield plain_view(stored) if options.from_quantized else stored


def calibrate_set(
    model: str | os.PathLike[str],
    data: CalibrationSet,
    options: CalibrateOptions = DEFAULT_OPTIONS,
    progress: Progress | None = None,
) -> ActivationStats:
    """Return the statistics of a model's activations on text that is tokens already."""
    with open_source(model, options) as checkpoint:
        return calibrate_opened(CalibrationModel(checkpoint, options), data, options, progress)


def calibrate_opened(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Return the statistics of an open model's activations, as `calibrate_set`; several runs may share the model."""
    if options.max_memory is None or model.weight_bytes <= options.max_memory:
        return calibrate_whole(model, data, options, progress)
    if options.until_stable is not None:
        _LOG.warning("layers run one after the other over all of the data: the run cannot stop when scales settle")
    return calibrate_layerwise(model, data, options, progress)
