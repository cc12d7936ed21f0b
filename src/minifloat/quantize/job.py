"""`quantize_checkpoint`: write a quantized checkpoint from a plain one; the whole run in the order of its steps.

The plan is made first (`planner`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from minifloat.calibration.result import Calibration
from minifloat.checkpoint.progress import Progress
from minifloat.checkpoint.rewrite import NEAREST
from minifloat.errors import UsageError
from minifloat.numerics.scheme import Scheme, get_scheme
from minifloat.quantize.options import DEFAULT_OPTIONS, QuantizeOptions
from minifloat.quantize.planner import planned_source
from minifloat.quantize.report import QuantizeReport
from minifloat.quantize.write import write_run

if TYPE_CHECKING:  # these import torch, which only a run with data needs
    from minifloat.calibration.data import SourceLike
    from minifloat.quantize.data import DataOptions


def quantize_checkpoint(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    scheme: str | Scheme | None = None,
    options: QuantizeOptions = DEFAULT_OPTIONS,
    *,
    calibration: Calibration | None = None,
    data: DataOptions | SourceLike | Sequence[SourceLike] | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> QuantizeReport:
    """Quantize a checkpoint into a new folder.

    Args:
        source: A folder or a model of the hub: Hugging Face layout, safetensors, BF16 / F16 / F32 weights; with
            `options.from_quantized` in any layout that `layouts.describe` reads.
        destination: A folder that does not exist yet, in one that does.
        scheme: A name of `SCHEMES`, or a `Scheme`; by default ``"fp8-block"``, or where no engine but minifloat, or
            not `options.target`, would load that, a scheme of 8 bits that loads; a note says so. With data, inputs stay
            in 16 bits, for some groups of weights or for all (``"fp8"``), where the bounds of `compare` need it. With a
            budget the cheapest format of the mixture, by default the cheapest weight-only scheme that the model allows.
        options: Layout, overrides, method and all else; `QuantizeOptions` describes them.
        calibration: Activation statistics, and the rule that turns them into static scales.
        data: Text that codes are chosen with: files, folders, data sets, or ``"self"`` for text that the model itself
            writes; or `DataOptions` with all options. None: every weight is rounded to nearest.
        progress: Called from this thread as work completes.
        announce: Called before anything is written with each note on engines that will not load the output; with data
            first with a sentence on tokens, time, memory and disk.

    Returns:
        The report on every tensor, with the error of every cast.

    Raises:
        UsageError: An argument is wrong, or less than half of the linear weights would be quantized; nothing was
            written.
        AlreadyQuantizedError: The source is quantized, and `options.from_quantized` is False.
        ConversionError: The quantization of the source has parts other than codes and scales.
        CheckpointError: The source is damaged, or is no checkpoint.
        HubError: The hub has no such source, refuses it, or cannot be reached.
        TensorError: A tensor cannot be quantized; it is named and nothing is left behind.
        DataError: The text of `data` is missing, too short, or does not fit the model.
        SingularHessianError: The inputs of a linear allow no error compensation.
        NotCalibratedError: The statistics lack a module that needs a static scale.
        SaturationError: More held-out activations would saturate than `calibration.max_saturation` allows.
        KernelUnavailable: This machine lacks `options.device`, or what `options.impl` needs.
        StorageError: The system refused to read or write; the work folder stays, and the same call continues.
    """
    started = time.perf_counter()
    wanted = get_scheme(scheme) if isinstance(scheme, str) else scheme
    data_options = _data_options(data, options, calibration)
    if data_options is not None and data_options.announce is None:
        data_options = replace(data_options, announce=announce)
    with planned_source(source, destination, options) as planner, ExitStack() as stack:
        if data_options is None:
            plan, notes = planner.chosen(wanted)
            run = planner.run(plan, (*notes, *planner.unmeasured(wanted, plan)), calibration)
        else:
            from minifloat.quantize.rounded import run_with_data

            run = stack.enter_context(run_with_data(planner, wanted, data_options, Path(destination), progress))
        if announce is not None:
            for note in run.engine_notes:
                announce(note)
        return write_run(run, source, destination, progress, started)


def _data_options(
    data: DataOptions | SourceLike | Sequence[SourceLike] | None,
    options: QuantizeOptions,
    calibration: Calibration | None,
) -> DataOptions | None:
    """Return what `data` and the method stand for; None, without importing torch, if there is no data."""
    chosen = None
    if data is not None or options.method not in (None, NEAREST):
        from minifloat.quantize.data import DataOptions

        chosen = DataOptions.of(data, options.method)
    if chosen is None:
        if options.budget is not None:
            raise UsageError(
                f"a budget of {options.budget} chooses formats by the damage that text shows: give --data FILE, or "
                "--data self for text that the model writes itself"
            )
        return None
    if calibration is not None:
        raise UsageError(
            "static scales come from --data too, after scales are folded; leave --calibration and --stats out"
        )
    return replace(chosen, rounding=replace(chosen.rounding, kv_cache=options.kv_cache))
