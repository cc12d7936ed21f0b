"""The weights of a model in parts: what it runs before its layers, then each layer, never more than a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from minifloat.calibration.walk import CannotWalkError
from minifloat.errors import UsageError
from minifloat.runtime.load import TORCH_DTYPES, Loader
from minifloat.runtime.names import Assignment


class PartialWeights:
    """Reads the weights of one part of a model and forgets them.

    Args:
        loader: Its model is empty.
        path: Of the model's list of layers.
        max_memory: Bytes of weights that may be in memory at a time.

    Raises:
        CheckpointError: The checkpoint has a tensor that the model has no place for.
        UsageError: A layer does not fit; names the largest one.
    """

    def __init__(self, loader: Loader, path: str, max_memory: int) -> None:
        self._loader, self._path, self._max_memory = loader, path, max_memory
        layers = loader.model.get_submodule(path)
        assert isinstance(layers, nn.ModuleList)
        self._layers = layers
        self._by_layer: list[list[Assignment]] = [[] for _ in layers]
        self._by_module: dict[str, list[Assignment]] = {}
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
        """Inside, modules outside of the layers get their weights when they are first called.

        So nothing that is not needed before the layers is read: no lm_head, no vision tower. A `UsageError` is raised
        from the call where they do not fit, a `CannotWalkError` where the checkpoint does not have them.
        """
        placed: list[str] = []
        with ExitStack() as stack:
            for path, module in self._loader.model.named_modules():
                if path == self._path or path.startswith(f"{self._path}.") or not module._parameters:
                    continue
                stack.callback(self._restore, path, dict(module._parameters))
                stack.callback(module.register_forward_pre_hook(partial(self._fill, path, placed)).remove)
            yield

    @contextmanager
    def layer(self, index: int) -> Iterator[nn.Module]:
        """The layer, with its weights; afterwards it is no longer in the model.

        Raises:
            CannotWalkError: A parameter of it has no tensor of its own.
        """
        for assignment in self._by_layer[index]:
            self._loader.place(assignment)
        layer: nn.Module = self._layers[index]
        _require_filled(f"{self._path}.{index}", layer.named_parameters())
        try:
            yield layer
        finally:
            self._layers[index] = nn.Identity()

    def _fill(self, path: str, placed: list[str], module: nn.Module, _: Any) -> None:
        if path in placed:
            return
        placed.append(path)
        needed = [assignment for name in placed for assignment in self._by_module.get(name, ())]
        self._require_room(f"what comes before the layers ({', '.join(placed)})", self._size(needed))
        for assignment in self._by_module.get(path, ()):
            self._loader.place(assignment)
        _require_filled(path, module._parameters.items())

    def _restore(self, path: str, empty: dict[str, nn.Parameter | None]) -> None:
        self._loader.model.get_submodule(path)._parameters.update(empty)

    def _size(self, assignments: list[Assignment]) -> int:
        """Bytes of parameters, and of the tensors that the largest one of them is converted from."""
        tensors, held, passing = self._loader.checkpoint.tensors, 0, 0
        for assignment in assignments:
            dtype = self._loader.dtype_of(assignment.target)
            infos = [tensors[source] for source in assignment.sources if source in tensors]
            held += sum(info.nbytes // TORCH_DTYPES[info.dtype].itemsize for info in infos) * dtype.itemsize
            if assignment.converter is not None or any(TORCH_DTYPES[info.dtype] != dtype for info in infos):
                passing = max(passing, sum(info.nbytes for info in infos))
        return held + passing

    def _require_room(self, what: str, size: int) -> None:
        if size > self._max_memory:
            raise UsageError(
                f"{what} needs {_shown(size)} for its weights, more than the {_shown(self._max_memory)} that are "
                f"allowed; layers are calibrated one at a time and cannot be divided: allow at least {_shown(size)}"
            )


def _require_filled(path: str, parameters: Any) -> None:
    for name, parameter in parameters:
        if parameter is not None and parameter.is_meta:
            raise CannotWalkError(f"{path}.{name} has no tensor of its own")


def _shown(size: int) -> str:
    """A number of bytes in MiB, rounded up."""
    return f"{-(-size // 2**20):,} MiB"
