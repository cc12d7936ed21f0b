"""`LayerWalk`: the layers of a model run one after the other, each over all sequences, with one layer in memory.

Calibration, rounding and the collection of Hessians are such walks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import TypeAlias

import torch
from torch import Tensor, nn

from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import ArgumentPool, StoredTensor, TensorFile
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.checkpoint.array_file import ArrayContent

_LOG = logging.getLogger(__name__)

ORIGINAL = "original"  #: the stream of hidden states through the original layers

#: Called with the number of a sequence and the hidden states that enter the first layer. Returns the streams in which
#: the sequence runs through the layers, each with hidden states of its own.
Streams: TypeAlias = Callable[[int, Tensor], Iterable[Hashable]]


def _one_stream(_: int, __: Tensor) -> Iterable[Hashable]:
    return (ORIGINAL,)


class LayerWalk:
    """One walk over the layers that are not finished."""

    def __init__(
        self,
        stack: LayerStack,
        sequences: Sequence[Sequence[int]],
        work: LayerWork,
        streams: Streams = _one_stream,
        *,
        keep_last: bool = False,
    ) -> None:
        self.stack, self.sequences, self.work = stack, sequences, work
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

    def call(self, index: int, sequence: int) -> LayerCall:
        """Return the arguments of a layer for a sequence."""
        return self._pool.restore(self._calls[sequence][index])

    def _capture(self) -> list[tuple[LayerCall, ...]]:
        """Return for each sequence the call of each layer, and place its hidden states in their file."""
        work = self.work
        resumed = work.continues()
        if work.finished:
            _LOG.info("%s: %d of %d layers are finished", work.path, len(work.finished), len(self.stack))
        with TensorFile(work.draft) as draft:

            def keep(number: int, hidden: Tensor) -> None:
                for stream in self._streams(number, hidden):
                    place = draft.reserve(hidden) if resumed else draft.append(hidden)
                    self.places.setdefault(stream, {})[number] = place

            calls = self.stack.capture(self.sequences, self._pool, keep)
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

    def call(self, sequence: int) -> LayerCall:
        """Return the arguments of the layer for a sequence."""
        return self._walk.call(self.index, sequence)

    def hidden(self, place: StoredTensor) -> Tensor:
        """Return hidden states that enter the layer, on the device of the model."""
        return self._inputs.read(place).to(self._walk.stack.device)

    def write(self, place: StoredTensor, output: Tensor) -> None:
        """Write hidden states that enter the next layer, if there is one that needs them."""
        if self._outputs is not None:
            self._outputs.write(place, output)

    def scratch(self, name: str) -> TensorFile:
        """Return an open file for tensors of this layer."""
        return self._stack.enter_context(TensorFile(self._walk.work.scratch(name)))

    def finish(self) -> None:
        """Sync the outputs, which become the inputs of the next layer."""
        if self._outputs is not None:
            self._outputs.sync()
            self._walk.work.keep_draft(self.index + 1)
