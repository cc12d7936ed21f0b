"""`LayerStack`: a model whose decoder layers are loaded and run one at a time, within a memory limit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from minifloat._version import __version__
from minifloat.calibration.data import Batch, CalibrationSet
from minifloat.calibration.layerwise.calls import Capture, LayerCall, LayersNotSeparableError, find_layers
from minifloat.calibration.layerwise.storage import ArgumentPool
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import BATCH_TOKENS
from minifloat.calibration.sites import Sites, find_sites
from minifloat.checkpoint.files import storage_errors
from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.linear import linear
from minifloat.kernels.pack import PackedWeight, pack
from minifloat.model.runtime.load import Loader
from minifloat.model.runtime.names import Assignment, replace_forward
from minifloat.model.runtime.products import fast_products
from minifloat.model.runtime.tensors import TORCH_DTYPES

#: Tokens of a batch times the width of its widest activation, which bounds the memory of a layer's pass.
_BATCH_VALUES = 1 << 24


class PartialWeights:
    """Reads the weights of one part of a model at a time, and drops them after use."""

    def __init__(self, loader: Loader, path: str, max_memory: int | None) -> None:
        self._loader, self._path, self._max_memory = loader, path, max_memory
        layers = loader.model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        self._by_layer: list[list[Assignment]] = [[] for _ in layers]
        self._by_module: dict[str, list[Assignment]] = {}
        self._before_layers = False
        for assignment in loader.assignments():
            owner = assignment.target.rpartition(".")[0]
            if owner.startswith(f"{path}."):
                index = int(owner[len(path) + 1 :].partition(".")[0])
                self._by_layer[index].append(assignment)
            else:
                self._by_module.setdefault(owner, []).append(assignment)
        sizes = [self._size(assignments) for assignments in self._by_layer]
        largest = sizes.index(max(sizes))
        self._require_room(f"{path}.{largest}", sizes[largest])

    @contextmanager
    def before_layers(self) -> Iterator[None]:
        """Load the weights of modules outside of the layers when the model first calls each module.

        Contexts within this one use its weights.
        """
        if self._before_layers:
            yield
            return
        placed: list[str] = []
        with ExitStack() as stack:
            for path, module in self._loader.model.named_modules():
                if path == self._path or path.startswith(f"{self._path}.") or not module._parameters:
                    continue
                stack.callback(self._restore, path, dict(module._parameters))
                stack.callback(module.register_forward_pre_hook(partial(self._fill, path, placed)).remove)
            self._before_layers = True
            stack.callback(setattr, self, "_before_layers", False)
            yield

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """Load the weights of a layer, and empty the layer afterwards."""
        layer: nn.Module = self._layers[index]
        empty = [(module, dict(module._parameters), dict(module._buffers)) for module in layer.modules()]
        try:
            self.fill(index)
            _require_filled(f"{self._path}.{index}", layer.named_parameters())
            yield layer
        finally:
            for module, parameters, buffers in empty:
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def fill(self, index: int) -> None:
        """Read the weights of a layer from the checkpoint into its parameters, which become new tensors."""
        for assignment in self._by_layer[index]:
            self._loader.place(assignment)

    def assignments(self, index: int) -> list[Assignment]:
        """Return where in a layer each of its tensors goes."""
        return self._by_layer[index]

    def _fill(self, path: str, placed: list[str], module: nn.Module, _: Any) -> None:
        if path in placed:
            return
        placed.append(path)
        needed = [assignment for name in placed for assignment in self._by_module.get(name, ())]
        self._require_room(f"the part of the model before the layers ({', '.join(placed)})", self._size(needed))
        for assignment in self._by_module.get(path, ()):
            self._loader.place(assignment)
        self._tie(path, module, placed)
        _require_filled(path, module._parameters.items())

    def _tie(self, path: str, module: nn.Module, placed: list[str]) -> None:
        """Fill the parameters of a module that the config ties to those of another module."""
        for leaf, parameter in module._parameters.items():
            source = self._loader.model.all_tied_weights_keys.get(f"{path}.{leaf}")
            if parameter is not None and parameter.is_meta and source is not None:
                owner, _, name = source.rpartition(".")
                self._fill(owner, placed, self._loader.model.get_submodule(owner), None)
                module._parameters[leaf] = self._loader.model.get_submodule(owner)._parameters[name]

    def _restore(self, path: str, empty: dict[str, nn.Parameter | None]) -> None:
        self._loader.model.get_submodule(path)._parameters.update(empty)

    def _size(self, assignments: list[Assignment]) -> int:
        """Return the bytes of the parameters, plus those of the largest set of tensors to convert at a time."""
        tensors, parameter_bytes, converted_bytes = self._loader.checkpoint.tensors, 0, 0
        for assignment in assignments:
            dtype = self._loader.dtype_of(assignment.target)
            infos = [tensors[source] for source in assignment.sources if source in tensors]
            parameter_bytes += sum(info.nbytes // TORCH_DTYPES[info.dtype].itemsize for info in infos) * dtype.itemsize
            if assignment.converter is not None or any(TORCH_DTYPES[info.dtype] != dtype for info in infos):
                converted_bytes = max(converted_bytes, sum(info.nbytes for info in infos))
        return parameter_bytes + converted_bytes

    def _require_room(self, part: str, size: int) -> None:
        if self._max_memory is not None and size > self._max_memory:
            raise UsageError(
                f"{part} needs {_mib(size)} for its weights, more than the {_mib(self._max_memory)} that are "
                f"allowed; layers are calibrated one at a time and cannot be divided: allow at least {_mib(size)}"
            )


def _require_filled(path: str, parameters: Any) -> None:
    for name, parameter in parameters:
        if parameter is not None and parameter.is_meta:
            raise LayersNotSeparableError(f"{path}.{name} has no tensor of its own")


def _mib(size: int) -> str:
    """Return a number of bytes in MiB, rounded up."""
    return f"{-(-size // 2**20):,} MiB"


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

    def batches(self, sequences: Iterable[Sequence[int]]) -> list[Batch]:
        """Join neighbours of one length to batches that run through a layer at full speed and in bounded memory."""
        widest = max(size for parameter in self._layers.parameters() for size in parameter.shape[-2:])
        tokens = min(BATCH_TOKENS, _BATCH_VALUES // widest)
        found: list[list[Sequence[int]]] = []
        for sequence in sequences:
            last = found[-1] if found else []
            if last and len(last[0]) == len(sequence) and (len(last) + 1) * len(sequence) <= tokens:
                last.append(sequence)
            else:
                found.append([sequence])
        return [tuple(batch) for batch in found]

    def capture(
        self, batches: Sequence[Batch], pool: ArgumentPool, keep: Callable[[int, Tensor], None]
    ) -> list[tuple[LayerCall, ...]]:
        """Return for each batch the call of each layer, without running the layers."""
        calls_of_batches = []
        with self.weights.before_layers():
            self._capture = capture = Capture(self.model, self._layers)
            capture.check(self._ids(batches[0]))
            for number, batch in enumerate(batches):
                hidden, calls = capture.run(self._ids(batch))
                calls_of_batches.append(pool.keep(calls))
                keep(number, hidden)
        return calls_of_batches

    def logits_of(self, batch: Batch, states: Sequence[Tensor]) -> Iterator[Iterator[Tensor]]:
        """Yield for each sequence of a batch its logits ``[T, V]`` of each of some hidden states ``[B, T, H]``.

        For the calls within `logits_in_float32`.
        """
        capture = self._capture
        assert capture is not None  # `capture` was called
        for row, sequence in enumerate(batch):
            rows = [hidden[row : row + 1] for hidden in states]
            yield map(partial(self._logits_of_one, capture, self._ids([sequence])), rows)

    def _logits_of_one(self, capture: Capture, ids: Tensor, hidden: Tensor) -> Tensor:
        return capture.logits(ids, hidden.to(self.device))[0]

    @contextmanager
    def logits_in_float32(self) -> Iterator[None]:
        """Hold the head, and let that of a model in 16 bits return float32: rounding to BF16 adds 0.001 to a KL."""
        model: Any = self.model
        head = model.get_output_embeddings()
        packed: list[PackedWeight] = []

        def forward(x: Tensor) -> Tensor:
            bias = None if head.bias is None else head.bias.float()
            if self.device.type != "cpu" or native.load() is None:
                return nn.functional.linear(x.float(), head.weight.float(), bias)
            if not packed:
                packed.append(pack(head.weight))
            return linear(x.float(), packed[0], bias)

        with self.weights.before_layers(), ExitStack() as stack:
            if type(head) is nn.Linear and self.model.dtype != torch.float32:
                stack.callback(replace_forward(head, forward))
            yield

    def loss_gradient(self, sequence: Sequence[int], hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradient of the loss of drawn tokens, summed, with respect to what the last layer returns.

        It is zero where logits are not finite.
        """
        assert self._capture is not None  # `capture` was called
        with self.weights.before_layers(), torch.enable_grad(), fast_products():
            hidden = hidden.requires_grad_()
            logits = self._capture.logits_with_grad(self._ids([sequence]), hidden)[0].float()
            if not bool(logits.isfinite().all()):
                return torch.zeros_like(hidden)
            drawn = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
            loss = torch.nn.functional.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
            return torch.autograd.grad(loss, hidden)[0]

    def sites_of(self, index: int) -> Sites:
        prefix = f"{self.path}.{index}."
        return Sites(
            tuple(site for site in self.sites.linears if site.path.startswith(prefix)),
            tuple(site for site in self.sites.experts if site.path.startswith(prefix)),
        )

    def _ids(self, batch: Batch) -> Tensor:
        return torch.tensor(batch, device=self.device)


def run_fingerprint(loader: Loader, data: CalibrationSet, *facts: Any) -> str:
    """Return a digest of everything that the results of a run depend on."""
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
