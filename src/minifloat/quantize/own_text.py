"""Text that the model writes itself (``--data self``), written before the job that uses it.

The model's own weights write it, or, where memory is short, those of an FP8 copy that is removed afterwards.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from minifloat.calibration.calibrate import load_texts, open_source
from minifloat.calibration.data import CalibrationSet, SourceLike, as_sources
from minifloat.calibration.options import CalibrateOptions, TextOptions
from minifloat.calibration.own_text import ShortMemoryError
from minifloat.calibration.readers import OWN_TEXT
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.numerics.scheme import get_scheme
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.planner import planned_source
from minifloat.quantize.write import write_run

_LOG = logging.getLogger(__name__)


def prepare_texts(
    checkpoint: Checkpoint,
    sources: SourceLike | Sequence[SourceLike],
    text: TextOptions,
    file: Path | None,
    *,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> CalibrationSet:
    """Return the sequences of all sources, after the source `self` has been written to its file."""
    try:
        return load_texts(checkpoint, sources, text, own_text_file=file, device=device, progress=progress)
    except ShortMemoryError:
        _LOG.info("memory is short: a quantized copy of the model writes the text")
    with tempfile.TemporaryDirectory(prefix=".own-text-", dir=None if file is None else file.parent) as scratch:
        copy = Path(scratch) / "copy"
        options = QuantizeOptions(allow_partial=True, from_quantized=isinstance(checkpoint, DecodedCheckpoint))
        with planned_source(checkpoint.path, copy, options) as planner:
            write_run(planner.run(*planner.chosen(get_scheme("fp8"))), checkpoint.path, copy)
        return load_texts(checkpoint, sources, text, own_text_file=file, weights=copy, device=device, progress=progress)


def prepare_own_text(
    model: str | os.PathLike[str],
    sources: SourceLike | Sequence[SourceLike],
    options: CalibrateOptions,
    progress: Progress | None = None,
) -> None:
    """Write the source `self`, if it is among the sources, so that a calibration finds it in its file."""
    if any(source.name == OWN_TEXT for source in as_sources(sources)):
        with open_source(model, options) as checkpoint:
            prepare_texts(checkpoint, sources, options, options.own_text_file, device=options.device, progress=progress)
