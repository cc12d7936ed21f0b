"""`LayerWalk`: the layers of a model run one after the other, each over all batches, with one layer in memory.

Calibration and rounding are such walks.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from minifloat.calibration.data import Batch
from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import ArgumentPool, StoredTensor, TensorFile
from minifloat.checkpoint.array_file import ArrayContent, ArrayFile, ArrayFormat, read_arrays, write_arrays
from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.journal import WorkFolder, written_file
from minifloat.errors import CheckpointError

_LOG = logging.getLogger(__name__)

_SCRATCH = ".scratch"  #: ends the names of files that a resumed run writes again
_DRAFT = f"hidden{_SCRATCH}"
_OURS = re.compile(rf"\w+{re.escape(_SCRATCH)}|hidden-\d+|layer-\d+\.safetensors|\.layer-\d+\.safetensors\.\d+\.tmp")


class LayerWork:
    """The hidden states and results in a work folder, locked while it is open."""

    def __init__(self, path: Path, fingerprint: str, kind: ArrayFormat) -> None:
        self.path, self._fingerprint, self._kind = path, fingerprint, kind
        self._work = WorkFolder(path, lambda name: _OURS.fullmatch(name) is not None)
        self.finished: list[ArrayFile] = []  # the results of the finished layers, in order
        try:
            self._resume()
        except BaseException:
            self._work.close()
            raise

    def __enter__(self) -> LayerWork:
        return self

    def __exit__(self, *_: object) -> None:
        self._work.close()

    def scratch(self, name: str) -> Path:
        """Return the path of a file that a resumed run writes again."""
        return self.path / f"{name}{_SCRATCH}"

    @property
    def draft(self) -> Path:
        """The file for hidden states while they are written."""
        return self.path / _DRAFT

    def hidden(self, layer: int) -> Path:
        """The file of the hidden states that enter a layer."""
        return self.path / f"hidden-{layer}"

    def results(self, layer: int) -> Path:
        """The file of the results of a layer, which exists once the layer is finished."""
        return self.path / f"layer-{layer}.safetensors"

    def continues(self) -> bool:
        """Return whether the hidden states that enter the first unfinished layer are there, as they were written."""
        if self.hidden(len(self.finished)).name in self._work.finished:
            return True
        self.finished = []
        self._work.clear(self._fingerprint)
        return False

    def keep_draft(self, layer: int) -> None:
        """Rename the draft, which must be synced, to the hidden states that enter a layer."""
        folder, name = self._work.folder, self.hidden(layer).name
        with storage_errors(self.draft, "rename"):
            folder.move(_DRAFT, folder, name)
        folder.sync()
        self._work.finish(name, written_file(folder, name))

    def finish(self, layer: int, content: ArrayContent) -> None:
        """Record a layer as finished, and delete the hidden states that entered it."""
        results, hidden = self.results(layer), self.hidden(layer).name
        write_arrays(results, self._kind, content)
        self._work.folder.sync()
        self._work.finish(results.name, written_file(self._work.folder, results.name))
        self.finished.append(read_arrays(results, self._kind))
        if hidden in self._work.finished:
            self._work.discard(hidden)
        self._work.folder.remove(hidden)

    def remove(self) -> None:
        """Delete the folder; no method may be called afterwards."""
        self.finished = []
        self._work.empty()
        self._work.close()

    def _resume(self) -> None:
        """Load the finished layers of earlier work with the same fingerprint; delete any other work."""
        work, folder = self._work, self._work.folder
        if work.resume(self._fingerprint):
            _LOG.warning("%s: the model, the data or the options changed: earlier work is not continued", self.path)
        work.load(folder)
        for name, reason in work.damaged.items():
            if folder.has(name):
                _LOG.warning("%s %s: check the disk. It is computed again", self.path / name, reason)
        while (results := self.results(len(self.finished))).name in work.finished:
            try:
                self.finished.append(read_arrays(results, self._kind))
            except CheckpointError:
                break
        kept = {self.results(layer).name for layer in range(len(self.finished))}
        for name in folder.names():
            if _OURS.fullmatch(name) and name not in (
                kept | {self.hidden(len(self.finished)).name} & work.finished.keys()
            ):
                folder.remove(name)


ORIGINAL = "original"  #: the stream of hidden states through the original layers

#: Called with the number of a batch and the hidden states that enter the first layer. Returns the streams in which the
#: batch runs through the layers, each with hidden states of its own.
Streams: TypeAlias = Callable[[int, Tensor], Iterable[Hashable]]


def _one_stream(_: int, __: Tensor) -> Iterable[Hashable]:
    return (ORIGINAL,)


class LayerWalk:
    """One walk over the layers that are not finished."""

    def __init__(
        self,
        stack: LayerStack,
        batches: Sequence[Batch],
        work: LayerWork,
        streams: Streams = _one_stream,
        *,
        keep_last: bool = False,
    ) -> None:
        self.stack, self.batches, self.work = stack, batches, work
        self._streams, self._keep_last = streams, keep_last
        self.places: dict[Hashable, dict[int, StoredTensor]] = {}
        self._open = ExitStack()

    def __enter__(self) -> LayerWalk:
        with ExitStack() as stack:
            file = stack.enter_context(TensorFile(self.work.scratch("arguments")))
            self._pool = ArgumentPool(file, self.stack.device)
            self._calls = self._capture()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, run_layer: Callable[[OpenLayer], ArrayContent]) -> None:
        """Run each layer that is not finished with `run_layer`, which writes its outputs and returns its results."""
        for index in range(len(self.work.finished), len(self.stack)):
            with ExitStack() as stack:
                module = stack.enter_context(self.stack.weights.layer(index))
                with torch.inference_mode():
                    layer = OpenLayer(self, index, module, stack, writes=self._keep_last or index + 1 < len(self.stack))
                    content = run_layer(layer)
                layer.finish()
            self.work.finish(index, content)

    def call(self, index: int, number: int) -> LayerCall:
        return self._pool.restore(self._calls[number][index])

    def _capture(self) -> list[tuple[LayerCall, ...]]:
        """Return for each batch the call of each layer, and place its hidden states in their file."""
        work = self.work
        resumed = work.continues()
        if work.finished:
            _LOG.info("%s: %d of %d layers are finished", work.path, len(work.finished), len(self.stack))
        with TensorFile(work.draft) as draft:

            def keep(number: int, hidden: Tensor) -> None:
                for stream in self._streams(number, hidden):
                    place = draft.reserve(hidden) if resumed else draft.append(hidden)
                    self.places.setdefault(stream, {})[number] = place

            calls = self.stack.capture(self.batches, self._pool, keep)
            if not resumed:
                draft.sync()
                work.keep_draft(0)
        return calls


class OpenLayer:
    """A layer whose weights are in memory, with the hidden states that enter it."""

    def __init__(self, walk: LayerWalk, index: int, module: nn.Module, stack: ExitStack, *, writes: bool) -> None:
        self.index, self.module, self.sites = index, module, walk.stack.sites_of(index)
        self.path = f"{walk.stack.path}.{index}"
        self._walk, self._stack = walk, stack
        self._inputs = stack.enter_context(TensorFile(walk.work.hidden(index)))
        self._outputs = stack.enter_context(TensorFile(walk.work.draft)) if writes else None

    def call(self, number: int) -> LayerCall:
        return self._walk.call(self.index, number)

    def hidden(self, place: StoredTensor) -> Tensor:
        """Return hidden states that enter the layer, on the device of the model."""
        return self._inputs.read(place).to(self._walk.stack.device)

    def write(self, place: StoredTensor, output: Tensor) -> None:
        """Write hidden states that enter the next layer, if there is one that needs them."""
        if self._outputs is not None:
            self._outputs.write(place, output)

    def scratch(self, name: str) -> TensorFile:
        return self._stack.enter_context(TensorFile(self._walk.work.scratch(name)))

    def finish(self) -> None:
        """Sync the outputs, which become the inputs of the next layer."""
        if self._outputs is not None:
            self._outputs.sync()
            self._walk.work.keep_draft(self.index + 1)
