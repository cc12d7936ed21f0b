"""Run a model layer by layer over the calibration set, with the weights of one layer in memory at a time.

Each layer is read from the checkpoint, run over the hidden states of every sequence, observed, and dropped. The
statistics equal those of a run of the whole model to the bit, because every layer gets the same numbers in a different
order. The hidden states are always on disk, so memory does not grow with the data, and finished layers survive when the
process is killed. `layerwise.calls` finds the other arguments of each layer.

A model whose layers cannot run one at a time is calibrated whole, with a warning that states the reason.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import LayerCall, LayersNotSeparableError
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.storage import ArgumentPool, StoredTensor, TensorFile
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.stats_file import read_stats, write_stats
from minifloat.calibration.whole import calibrate_whole, check_data
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.runtime.load import Loader

_LOG = logging.getLogger(__name__)


def calibrate_layerwise(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Observe a model on calibration text, with the weights of one layer in memory at a time.

    The result equals that of `calibration.whole.calibrate_whole` to the bit. Besides the weights, memory holds one
    sequence's activations, the statistics, and at most `storage.ARGUMENT_BYTES` of masks and position embeddings. The
    disk holds the hidden states twice: 2 * tokens * hidden size * bytes of the dtype.
    """
    with ExitStack() as stack:
        loader = model.loader()
        check_data(data, loader.model.config.get_text_config().vocab_size)
        work_dir = options.work_dir
        if work_dir is None:
            parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="minifloat-"))
            work_dir = Path(parent) / "work"
        try:
            run = _LayerwiseRun(model, loader, data, options)
            fingerprint = run_fingerprint(
                loader, data, {"histogram": options.histogram, "per_channel": options.per_channel}
            )
            folder = stack.enter_context(LayerWork(work_dir, fingerprint, read_stats, write_stats))
            try:
                return run.run(folder, progress)
            except LayersNotSeparableError:
                folder.remove()
                raise
            except UsageError:  # the embeddings do not fit
                if not folder.finished:
                    folder.remove()
                raise
        except LayersNotSeparableError as error:
            reason = str(error)
    _LOG.warning(
        "%s cannot be calibrated layer by layer, because %s: the whole model is loaded, more than max_memory allows",
        loader.model.__class__.__name__,
        reason,
    )
    return calibrate_whole(model, data, options, progress)


class _LayerwiseRun:
    """One calibration run, layer by layer."""

    def __init__(
        self, model: CalibrationModel, loader: Loader, data: CalibrationSet, options: CalibrateOptions
    ) -> None:
        self.stack = LayerStack(model, loader, options.max_memory)
        self.identity, self.data, self.options = model.identity, data, options

    def run(self, folder: LayerWork[ActivationStats], progress: Progress | None) -> ActivationStats:
        """Run all unfinished layers, remove the work folder, and return the statistics of all layers."""
        if len(folder.finished) < len(self.stack):
            with TensorFile(folder.scratch("arguments")) as file:
                pool = ArgumentPool(file, self.stack.device)
                hidden, calls_of_sequences = self._capture(folder, pool)
                for index in range(len(folder.finished), len(self.stack)):
                    calls = (pool.restore(calls_of_layers[index]) for calls_of_layers in calls_of_sequences)
                    folder.finish(index, self._run_layer(index, folder, hidden, calls, progress))
        inputs = {name: stats for layer in folder.finished for name, stats in layer.inputs.items()}
        kv = {name: stats for layer in folder.finished for name, stats in layer.kv.items()}
        folder.remove()
        return self._statistics(self.data.record, inputs, kv)

    def _capture(
        self, folder: LayerWork[ActivationStats], pool: ArgumentPool
    ) -> tuple[list[StoredTensor], list[tuple[LayerCall, ...]]]:
        """Return for each sequence the location of its hidden states in their file, and the call of each layer.

        Also write the hidden states that enter the first layer, unless the folder has those of the first unfinished
        one.
        """
        resumed = folder.continues()
        if folder.finished:
            _LOG.info("%s: %d of %d layers are finished", folder.path, len(folder.finished), len(self.stack))
        locations: list[StoredTensor] = []
        with TensorFile(folder.draft) as draft:

            def keep(_: int, hidden: Tensor) -> None:
                locations.append(StoredTensor(locations[-1].end if locations else 0, hidden.shape, hidden.dtype))
                if not resumed:
                    draft.write(locations[-1], hidden)

            calls = self.stack.capture(self.data.sequences, pool, keep)
            if not resumed:
                draft.sync()
                folder.keep_draft(0)
        return locations, calls

    @torch.inference_mode()
    def _run_layer(
        self,
        index: int,
        folder: LayerWork[ActivationStats],
        locations: Sequence[StoredTensor],
        calls: Iterable[LayerCall],
        progress: Progress | None,
    ) -> ActivationStats:
        """Return the statistics of one layer, and write its outputs as inputs of the next layer if there is one."""
        is_last = index + 1 == len(self.stack)
        done, total = index * self.data.tokens, len(self.stack) * self.data.tokens
        with ExitStack() as stack:
            with torch.inference_mode(False):  # parameters as in the whole model
                layer = stack.enter_context(self.stack.weights.layer(index))
            observer = stack.enter_context(
                Observer(
                    self.stack.model,
                    sites=self.stack.sites_of(index),
                    histogram=self.options.histogram,
                    per_channel=self.options.per_channel,
                )
            )
            inputs = stack.enter_context(TensorFile(folder.hidden(index)))
            outputs = stack.enter_context(TensorFile(folder.draft))
            for number, (location, call) in enumerate(zip(locations, calls, strict=True)):
                hidden = inputs.read(location).to(self.stack.device)
                with observer.sequence(number):
                    output = call.run(layer, hidden)
                if not is_last:
                    outputs.write(location, output)
                done += len(self.data.sequences[number])
                if progress is not None:
                    progress(done, total, f"layer {index + 1} of {len(self.stack)}, sequence {number + 1}")
            if not is_last:
                outputs.sync()
                folder.keep_draft(index + 1)
        return self._statistics({}, observer.inputs(), observer.kv())

    def _statistics(self, record: Mapping[str, Any], inputs: Any, kv: Any) -> ActivationStats:
        return ActivationStats(self.identity, len(self.data.sequences), self.data.tokens, record, inputs, kv)
