"""Calibration of a model that does not fit in memory: layer by layer, each over all sequences.

A layer is read from the checkpoint, run over the hidden states of every sequence, observed, and forgotten. The results
are those of the whole model to the bit, because every layer gets the same numbers; what changes is the order. The
hidden states are always on disk, so that memory does not grow with the data, and the work of finished layers outlives
a kill. What a layer is called with besides hidden states comes from `calibration.walk`.

Models whose layers cannot be run one at a time are calibrated whole, with a warning that says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from minifloat._version import __version__
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.identity import ModelIdentity
from minifloat.calibration.observe import Observer
from minifloat.calibration.sites import Sites, find_sites
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.walk import Call, CannotWalkError, Capture, find_layers
from minifloat.calibration.walk_folder import WalkFolder
from minifloat.calibration.walk_store import ArgumentPool, Slot, TensorFile
from minifloat.calibration.walk_weights import PartialWeights
from minifloat.calibration.whole import calibrate_whole, check_data, check_source
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import storage_errors
from minifloat.errors import UsageError
from minifloat.report.progress import Progress
from minifloat.runtime.load import Loader

_LOG = logging.getLogger(__name__)


def calibrate_blocks(
    path: str | os.PathLike[str],
    data: CalibrationSet,
    *,
    max_memory: int,
    histogram: bool = False,
    per_channel: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    work_dir: Path | None = None,
    progress: Progress | None = None,
) -> ActivationStats:
    """Observe a model on calibration text, with the weights of one layer in memory at a time.

    The result is that of `calibration.calibrate.calibrate` to the bit. Beside the weights, memory holds one sequence's
    activations, the statistics, and at most `walk_store.ARGUMENT_BYTES` of masks and position embeddings. The disk
    holds the hidden states twice: 2 * tokens * hidden size * bytes of the dtype.

    Args:
        path: Folder of an unquantized checkpoint.
        data: The sequences, and their record, which is kept in the result.
        max_memory: Bytes of weights in memory at a time: of the embeddings, then of each layer, with what is copied
            while it is read.
        histogram: Also count magnitudes.
        per_channel: Also record the amax of each input channel.
        dtype: Of weights and activations; by default that of config.json.
        device: Where layers run.
        work_dir: Where hidden states and finished statistics are kept, in a folder that exists; deleted at the end.
            After an interruption of any kind the same call continues behind the last finished layer. By default a
            temporary folder, which nothing continues from.
        progress: Called after each sequence of each layer with tokens done, tokens to do, both times layers, and what
            is at work.

    Raises:
        UsageError: A layer, or what comes before the layers, holds more than `max_memory`; names it and its size.
        AlreadyQuantizedError: The checkpoint is quantized.
        DataError: No sequence, an empty one, or a token id beyond the vocabulary.
        DestinationError: The work folder holds something else, or another process uses it.
        CheckpointError: The model cannot be loaded.
        NonFiniteError: NaN or Inf in an activation; names the module and the sequence.
        StorageError: The system refuses, such as when the disk is full.
    """
    options: dict[str, Any] = {"histogram": histogram, "per_channel": per_channel}
    with ExitStack() as stack:
        checkpoint = stack.enter_context(Checkpoint.open(path))
        check_source(checkpoint)
        loader = Loader(checkpoint, dtype=dtype, device=device)
        check_data(data, loader.model.config.get_text_config().vocab_size)
        if work_dir is None:
            parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="minifloat-"))
            work_dir = Path(parent) / "work"
        try:
            walk = _Walk(loader, data, max_memory, options)
            folder = stack.enter_context(WalkFolder(work_dir, _fingerprint(loader, data, options)))
            try:
                return walk.run(folder, progress)
            except CannotWalkError:
                folder.remove()
                raise
            except UsageError:  # the embeddings do not fit
                if not folder.finished:
                    folder.remove()
                raise
        except CannotWalkError as error:
            reason = str(error)
    _LOG.warning(
        "%s cannot be calibrated layer by layer, because %s: the whole model is loaded, more than max_memory allows",
        loader.model.__class__.__name__,
        reason,
    )
    return calibrate_whole(path, data, dtype=dtype, device=device, progress=progress, **options)


class _Walk:
    """One calibration, layer by layer.

    Raises:
        CannotWalkError: The model's layers cannot be told apart.
        UsageError: A layer is larger than `max_memory`.
    """

    def __init__(self, loader: Loader, data: CalibrationSet, max_memory: int, options: Mapping[str, Any]) -> None:
        self.model, self.device, self.data, self.options = loader.model, loader.device, data, options
        self.identity = ModelIdentity.of(loader.checkpoint)
        self.sites = find_sites(self.model, loader.checkpoint)
        self.path = find_layers(self.model, self.sites)
        self.layers: Any = self.model.get_submodule(self.path)
        self.weights = PartialWeights(loader, self.path, max_memory)
        self.model.train(False)
        for module in self.model.modules():  # buffers that the model computed itself
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)

    def run(self, folder: WalkFolder, progress: Progress | None) -> ActivationStats:
        """Run all layers that are not finished; then the folder is removed.

        Raises:
            CannotWalkError: The model's layers cannot be run one at a time.
        """
        if len(folder.finished) < len(self.layers):
            with TensorFile(folder.arguments) as file:
                pool = ArgumentPool(file, self.device)
                slots, calls = self._capture(folder, pool)
                for index in range(len(folder.finished), len(self.layers)):
                    mine = (pool.restore(of_sequence[index]) for of_sequence in calls)
                    folder.finish(index, self._run_layer(index, folder, slots, mine, progress))
        inputs = {name: stats for layer in folder.finished for name, stats in layer.inputs.items()}
        kv = {name: stats for layer in folder.finished for name, stats in layer.kv.items()}
        folder.remove()
        return self._statistics(self.data.record, inputs, kv)

    def _capture(self, folder: WalkFolder, pool: ArgumentPool) -> tuple[list[Slot], list[tuple[Call, ...]]]:
        """Where hidden states lie in their files, and the calls of all layers, for each sequence.

        The hidden states that enter the first layer are written, unless those of a later one are there.
        """
        resumed = folder.hidden(len(folder.finished)).exists()
        if not resumed:
            folder.restart()
        elif folder.finished:
            _LOG.info("%s: %d of %d layers are finished", folder.path, len(folder.finished), len(self.layers))
        slots: list[Slot] = []
        calls: list[tuple[Call, ...]] = []
        with self.weights.before_layers(), TensorFile(folder.draft) as draft:
            capture = Capture(self.model, self.layers)
            capture.check(self._ids(self.data.sequences[0]))
            for sequence in self.data.sequences:
                hidden, of_sequence = capture.run(self._ids(sequence))
                slots.append(Slot(slots[-1].end if slots else 0, hidden.shape, hidden.dtype))
                calls.append(pool.keep(of_sequence))
                if not resumed:
                    draft.write(slots[-1], hidden)
            if not resumed:
                draft.sync()
                folder.keep_draft(0)
        return slots, calls

    @torch.inference_mode()
    def _run_layer(
        self, index: int, folder: WalkFolder, slots: Sequence[Slot], calls: Iterable[Call], progress: Progress | None
    ) -> ActivationStats:
        """The statistics of one layer; its output is kept for the next one, if there is one."""
        is_last = index + 1 == len(self.layers)
        done, total = index * self.data.tokens, len(self.layers) * self.data.tokens
        with ExitStack() as stack:
            with torch.inference_mode(False):  # parameters as the whole model has them
                layer = stack.enter_context(self.weights.layer(index))
            observer = stack.enter_context(Observer(self.model, sites=self._sites_of(index), **self.options))
            entering = stack.enter_context(TensorFile(folder.hidden(index)))
            leaving = stack.enter_context(TensorFile(folder.draft))
            for number, (slot, call) in enumerate(zip(slots, calls, strict=True)):
                hidden = entering.read(slot).to(self.device)
                with observer.sequence(number):
                    output = call.run(layer, hidden)
                if not is_last:
                    leaving.write(slot, output)
                done += len(self.data.sequences[number])
                if progress is not None:
                    progress(done, total, f"layer {index + 1} of {len(self.layers)}, sequence {number + 1}")
            if not is_last:
                leaving.sync()
                folder.keep_draft(index + 1)
        return self._statistics({}, observer.inputs(), observer.kv())

    def _sites_of(self, index: int) -> Sites:
        """What is watched in one layer."""
        start = f"{self.path}.{index}."
        return Sites(
            tuple(site for site in self.sites.linears if site.path.startswith(start)),
            tuple(site for site in self.sites.experts if site.path.startswith(start)),
        )

    def _ids(self, sequence: Sequence[int]) -> Tensor:
        return torch.tensor([sequence], device=self.device)

    def _statistics(self, record: Mapping[str, Any], inputs: Any, kv: Any) -> ActivationStats:
        return ActivationStats(self.identity, len(self.data.sequences), self.data.tokens, record, inputs, kv)


def _fingerprint(loader: Loader, data: CalibrationSet, options: Mapping[str, Any]) -> str:
    """A digest of all that the statistics depend on: files (by size and time of change), data, options, versions."""
    checkpoint = loader.checkpoint
    files = []
    for shard in checkpoint.shards:
        path = checkpoint.shard_path(shard)
        with storage_errors(path, "look at it"):
            status = path.stat()
        files.append([shard, status.st_size, status.st_mtime_ns])
    parts = [
        [__version__, torch.__version__, transformers.__version__],
        [str(checkpoint.path), checkpoint.config, files],
        [list(map(list, data.sequences))],
        [dict(options), str(loader.model.dtype), loader.device.type],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
