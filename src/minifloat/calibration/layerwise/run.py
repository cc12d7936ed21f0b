"""Run a model layer by layer over the calibration set, with the weights of one layer in memory at a time.

Each layer is read from the checkpoint, run over the hidden states of every sequence, observed, and dropped. The
statistics equal those of a run of the whole model to the bit, because every layer gets the same numbers in a different
order. The hidden states are always on disk, so memory does not grow with the data, and finished layers survive when the
process is killed. `layerwise.calls` finds the other arguments of each layer.

A model whose layers cannot run one at a time is calibrated whole, with a warning that states the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from minifloat._version import __version__
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import Capture, LayerCall, LayersNotSeparableError, find_layers
from minifloat.calibration.layerwise.storage import ArgumentPool, StoredTensor, TensorFile
from minifloat.calibration.layerwise.weights import PartialWeights
from minifloat.calibration.layerwise.work_folder import WorkFolder
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import RunOptions
from minifloat.calibration.sites import Sites, find_sites
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.whole import calibrate_whole, check_data
from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.runtime.load import Loader

_LOG = logging.getLogger(__name__)


def calibrate_layerwise(
    model: CalibrationModel, data: CalibrationSet, options: RunOptions, progress: Progress | None = None
) -> ActivationStats:
    """Observe a model on calibration text, with the weights of one layer in memory at a time.

    The result equals that of `calibration.whole.calibrate_whole` to the bit. Besides the weights, memory holds one
    sequence's activations, the statistics, and at most `storage.ARGUMENT_BYTES` of masks and position embeddings. The
    disk holds the hidden states twice: 2 * tokens * hidden size * bytes of the dtype.

    Args:
        model: The model; its weights are read again by every run.
        data: The sequences, with the record of their origin, which the result keeps.
        options: Its `max_memory` bounds the weights in memory, first of the embeddings and then of each layer, with the
            copies made while they are read; None: no bound. `until_stable` is not used.
        progress: Called after each sequence of each layer with the tokens done and the tokens in all, both times the
            number of layers, and the current layer and sequence.

    Raises:
        UsageError: A layer, or the modules before the layers, need more than `max_memory`; names them and their size.
        DataError: There is no sequence, an empty one, or a token id beyond the vocabulary.
        DestinationError: The work folder holds other files, or another process uses it.
        CheckpointError: The model cannot be loaded.
        NonFiniteError: An activation holds NaN or Inf; names the module and the sequence.
        StorageError: The system refused to read or write, for example because the disk is full.
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
            folder = stack.enter_context(WorkFolder(work_dir, _fingerprint(loader, data, options)))
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


@dataclass
class _Arguments:
    """What all layers are called with.

    Attributes:
        hidden: For each sequence the location of its hidden states in their file.
        calls: For each sequence the call of each layer.
    """

    hidden: list[StoredTensor] = field(default_factory=list)
    calls: list[tuple[LayerCall, ...]] = field(default_factory=list)


class _LayerwiseRun:
    """One calibration run, layer by layer.

    Raises:
        LayersNotSeparableError: The model has no single list of layers.
        UsageError: A layer is larger than `RunOptions.max_memory`.
    """

    def __init__(self, model: CalibrationModel, loader: Loader, data: CalibrationSet, options: RunOptions) -> None:
        self.model, self.device, self.data, self.options = loader.model, loader.device, data, options
        self.identity = model.identity
        self.sites = find_sites(self.model, model.checkpoint, model.description)
        self.path = find_layers(self.model, self.sites)
        self.layers: Any = self.model.get_submodule(self.path)
        self.weights = PartialWeights(loader, self.path, options.max_memory)
        self.model.train(False)
        for module in self.model.modules():  # buffers that the model computed itself
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)

    def run(self, folder: WorkFolder, progress: Progress | None) -> ActivationStats:
        """Run all unfinished layers, remove the work folder, and return the statistics of all layers.

        Raises:
            LayersNotSeparableError: The model's layers cannot be run one at a time.
        """
        if len(folder.finished) < len(self.layers):
            with TensorFile(folder.arguments) as file:
                pool = ArgumentPool(file, self.device)
                arguments = self._capture(folder, pool)
                for index in range(len(folder.finished), len(self.layers)):
                    calls = (pool.restore(calls_of_sequence[index]) for calls_of_sequence in arguments.calls)
                    folder.finish(index, self._run_layer(index, folder, arguments.hidden, calls, progress))
        inputs = {name: stats for layer in folder.finished for name, stats in layer.inputs.items()}
        kv = {name: stats for layer in folder.finished for name, stats in layer.kv.items()}
        folder.remove()
        return self._statistics(self.data.record, inputs, kv)

    def _capture(self, folder: WorkFolder, pool: ArgumentPool) -> _Arguments:
        """Return the arguments of all layers, without running the layers.

        Also write the hidden states that enter the first layer, unless the folder has those of the first unfinished
        one.
        """
        resumed = folder.hidden(len(folder.finished)).exists()
        if not resumed:
            folder.restart()
        elif folder.finished:
            _LOG.info("%s: %d of %d layers are finished", folder.path, len(folder.finished), len(self.layers))
        arguments = _Arguments()
        end = 0
        with self.weights.before_layers(), TensorFile(folder.draft) as draft:
            capture = Capture(self.model, self.layers)
            capture.check(self._ids(self.data.sequences[0]))
            for sequence in self.data.sequences:
                hidden, calls = capture.run(self._ids(sequence))
                location = StoredTensor(end, hidden.shape, hidden.dtype)
                end = location.end
                arguments.hidden.append(location)
                arguments.calls.append(pool.keep(calls))
                if not resumed:
                    draft.write(location, hidden)
            if not resumed:
                draft.sync()
                folder.keep_draft(0)
        return arguments

    @torch.inference_mode()
    def _run_layer(
        self,
        index: int,
        folder: WorkFolder,
        locations: Sequence[StoredTensor],
        calls: Iterable[LayerCall],
        progress: Progress | None,
    ) -> ActivationStats:
        """Return the statistics of one layer, and write its outputs as inputs of the next layer if there is one."""
        is_last = index + 1 == len(self.layers)
        done, total = index * self.data.tokens, len(self.layers) * self.data.tokens
        with ExitStack() as stack:
            with torch.inference_mode(False):  # parameters as in the whole model
                layer = stack.enter_context(self.weights.layer(index))
            observer = stack.enter_context(
                Observer(
                    self.model,
                    sites=self._sites_of(index),
                    histogram=self.options.histogram,
                    per_channel=self.options.per_channel,
                )
            )
            inputs = stack.enter_context(TensorFile(folder.hidden(index)))
            outputs = stack.enter_context(TensorFile(folder.draft))
            for number, (location, call) in enumerate(zip(locations, calls, strict=True)):
                hidden = inputs.read(location).to(self.device)
                with observer.sequence(number):
                    output = call.run(layer, hidden)
                if not is_last:
                    outputs.write(location, output)
                done += len(self.data.sequences[number])
                if progress is not None:
                    progress(done, total, f"layer {index + 1} of {len(self.layers)}, sequence {number + 1}")
            if not is_last:
                outputs.sync()
                folder.keep_draft(index + 1)
        return self._statistics({}, observer.inputs(), observer.kv())

    def _sites_of(self, index: int) -> Sites:
        """Return the sites inside one layer."""
        prefix = f"{self.path}.{index}."
        return Sites(
            tuple(site for site in self.sites.linears if site.path.startswith(prefix)),
            tuple(site for site in self.sites.experts if site.path.startswith(prefix)),
        )

    def _ids(self, sequence: Sequence[int]) -> Tensor:
        return torch.tensor([sequence], device=self.device)

    def _statistics(self, record: Mapping[str, Any], inputs: Any, kv: Any) -> ActivationStats:
        return ActivationStats(self.identity, len(self.data.sequences), self.data.tokens, record, inputs, kv)


def _fingerprint(loader: Loader, data: CalibrationSet, options: RunOptions) -> str:
    """Return a digest of everything that the statistics depend on.

    It covers the files (by size and time of change), the data, the options, and the versions of the software.
    """
    checkpoint = loader.checkpoint
    files = []
    for shard in checkpoint.shards:
        path = checkpoint.shard_path(shard)
        with storage_errors(path, "look at it"):
            status = path.stat()
        files.append([shard, status.st_size, status.st_mtime_ns])
    recorded = {"histogram": options.histogram, "per_channel": options.per_channel}
    parts = [
        [__version__, torch.__version__, transformers.__version__],
        [str(checkpoint.path), checkpoint.config, files],
        [list(map(list, data.sequences))],
        [recorded, str(loader.model.dtype), loader.device.type],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
