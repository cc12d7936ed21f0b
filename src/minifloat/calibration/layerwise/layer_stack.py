"""`LayerStack`: a model whose decoder layers are loaded and run one at a time.

Calibration observes each layer, and `minifloat.quantize.rounding` quantizes each layer; both walk over the same stack.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from minifloat._version import __version__
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import Capture, LayerCall, find_layers
from minifloat.calibration.layerwise.storage import ArgumentPool
from minifloat.calibration.layerwise.weights import PartialWeights
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.sites import Sites, find_sites
from minifloat.checkpoint.files import storage_errors
from minifloat.model.runtime.load import Loader


class LayerStack:
    """The layers of a model, with the arguments that each layer is called with."""

    def __init__(self, model: CalibrationModel, loader: Loader, max_memory: int | None) -> None:
        self.model, self.device = loader.model, loader.device
        self.sites = find_sites(self.model, model.checkpoint, model.description)
        self.path = find_layers(self.model, self.sites)
        self._layers: Any = self.model.get_submodule(self.path)
        self.weights = PartialWeights(loader, self.path, max_memory)
        self._capture: Capture | None = None
        self.model.train(False)
        for module in self.model.modules():  # buffers that the model computed itself
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)

    def __len__(self) -> int:
        return len(self._layers)

    def capture(
        self, sequences: Sequence[Sequence[int]], pool: ArgumentPool, keep: Callable[[int, Tensor], None]
    ) -> list[tuple[LayerCall, ...]]:
        """Return for each sequence the call of each layer, without running the layers."""
        calls_of_sequences = []
        with self.weights.before_layers():
            self._capture = capture = Capture(self.model, self._layers)
            capture.check(self._ids(sequences[0]))
            for number, sequence in enumerate(sequences):
                hidden, calls = capture.run(self._ids(sequence))
                calls_of_sequences.append(pool.keep(calls))
                keep(number, hidden)
        return calls_of_sequences

    def logits(self, sequence: Sequence[int], hidden: Tensor) -> Tensor:
        """Return the logits ``[T, V]`` that the model gives if its layers return `hidden` for a sequence."""
        assert self._capture is not None  # `capture` was called
        with self.weights.before_layers():
            return self._capture.logits(self._ids(sequence), hidden.to(self.device))[0]

    def logits_of(self, sequence: Sequence[int], states: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield what `logits` returns for each of several hidden states of one sequence; the head is read once."""
        assert self._capture is not None  # `capture` was called
        with self.weights.before_layers():
            for hidden in states:
                yield self._capture.logits(self._ids(sequence), hidden.to(self.device))[0]

    def sites_of(self, index: int) -> Sites:
        """Return the sites inside one layer."""
        prefix = f"{self.path}.{index}."
        return Sites(
            tuple(site for site in self.sites.linears if site.path.startswith(prefix)),
            tuple(site for site in self.sites.experts if site.path.startswith(prefix)),
        )

    def _ids(self, sequence: Sequence[int]) -> Tensor:
        return torch.tensor([sequence], device=self.device)


def run_fingerprint(loader: Loader, data: CalibrationSet, *facts: Any) -> str:
    """Return a digest of everything that the results of a run depend on.

    It covers the files (by size and time of change), the data, the versions of the software, and the caller's facts.
    """
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
        [*facts, str(loader.model.dtype), loader.device.type],
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
