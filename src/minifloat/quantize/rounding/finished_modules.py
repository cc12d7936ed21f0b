"""Modules that end with a linear, whose finished part is not run again.

The walk runs a layer several times: up to the inputs of each stage, and once to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.model.runtime.build import replace_forward
from minifloat.quantize.rounding.stages import Stage, first_tensor


@dataclass(frozen=True)
class FinishedModule:
    """A module whose output is the output of a linear in it."""

    path: str
    linear: str
    dimensions: int  # of the linear's input: 2 for ``[T, K]``, 3 for ``[1, T, K]``
    returned: int  # length of the tuple that the module returns, the output first and None behind it; 0: no tuple


class FinishedModules:
    """The closed modules of a layer, and the inputs of their linears."""

    def __init__(self, model: nn.Module, finished: dict[int, FinishedModule], file: TensorFile) -> None:
        self._model, self._finished, self._file = model, finished, file
        self._places: dict[tuple[int, int], StoredTensor] = {}

    def keep(self, stage: int, sequence: int, inputs: Tensor) -> None:
        """Keep the inputs ``[T, K]`` of a stage in one sequence, if its linear closes a module."""
        if stage in self._finished:
            self._places[stage, sequence] = self._file.append(inputs)

    @contextmanager
    def applied(self, sequence: int) -> Iterator[None]:
        """Replace each closed module whose inputs are kept for a sequence by its linear while the block runs."""
        with ExitStack() as stack:
            for stage, module_end in self._finished.items():
                if (stage, sequence) in self._places:
                    inputs = partial(self._file.read, self._places[stage, sequence])
                    stack.enter_context(_replaced(self._model, module_end, inputs))
            yield


def find_finished_modules(
    model: nn.Module, prefix: str, layer: nn.Module, stages: Sequence[Stage], call: LayerCall, hidden: Tensor
) -> dict[int, FinishedModule]:
    """Return the closed modules of a layer by the number of the stage that closes them."""
    numbers = {
        stage.path: number for number, stage in enumerate(stages) if stage.outer is None and len(stage.paths) == 1
    }
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, module in layer.named_modules():
            path = f"{prefix}.{name}"
            if path in numbers:
                hook = module.register_forward_pre_hook(partial(_keep_input, inputs, path), with_kwargs=True)
                stack.callback(hook.remove)
            if name and (path in numbers or next(module.children(), None) is not None):
                stack.callback(module.register_forward_hook(partial(_keep_output, outputs, path)).remove)
        expected = call.run(layer, hidden)
    needed = [stage.residual.path for stage in stages if stage.residual is not None]
    found: dict[int, FinishedModule] = {}
    for linear, number in numbers.items():
        if linear not in outputs or inputs[linear].ndim not in (2, 3):
            continue
        around = (linear[:end] for end in range(len(prefix) + 1, len(linear)) if linear[end] == ".")
        for path in around:  # from the outermost module
            returned = _returned(outputs.get(path), outputs[linear])
            inside = (stages[later].path for later in range(number + 1, len(stages)))
            if returned is not None and not any(read.startswith(f"{path}.") for read in (*needed, *inside)):
                found[number] = FinishedModule(path, linear, inputs[linear].ndim, returned)
                break
    with ExitStack() as stack:
        # With the modules replaced, the layer must give the same bits; otherwise no module counts as finished.
        for module_end in found.values():
            kept = inputs[module_end.linear].reshape(-1, inputs[module_end.linear].shape[-1])
            stack.enter_context(_replaced(model, module_end, lambda kept=kept: kept))  # type: ignore[misc]
        if not call.run(layer, hidden).equal(expected):
            return {}
    return found


@contextmanager
def _replaced(model: nn.Module, module_end: FinishedModule, read: Callable[[], Tensor]) -> Iterator[None]:
    """Let a closed module apply its linear to kept inputs, without the hooks of the linear."""
    module = model.get_submodule(module_end.path)
    linear: Any = model.get_submodule(module_end.linear)

    def forward(*_: Any, **__: Any) -> Any:
        inputs = read().to(linear.weight.device)
        output = linear.forward(inputs[None] if module_end.dimensions == 3 else inputs)
        return (output, *[None] * (module_end.returned - 1)) if module_end.returned else output

    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()


def _returned(result: Any, output: Tensor) -> int | None:
    """Return the length of the tuple that a module returns, 0 for a tensor; None if it holds more than `output`."""
    first, rest = (result[0], result[1:]) if isinstance(result, tuple) and result else (result, ())
    same = isinstance(first, Tensor) and first.data_ptr() == output.data_ptr() and first.shape == output.shape
    if not same or first.dtype != output.dtype or any(value is not None for value in rest):
        return None
    return len(result) if isinstance(result, tuple) else 0


def _keep_input(
    inputs: dict[str, Tensor], path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    tensor = first_tensor(args, kwargs)
    if tensor is not None:
        inputs[path] = tensor


def _keep_output(outputs: dict[str, Any], path: str, _: nn.Module, __: Any, output: Any) -> None:
    outputs[path] = output
