"""The stages of a layer: groups of linears that share their input, in the order in which the layer runs them.

They are found by running the layer once and watching it, not from a list of architectures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.calibration.sites import Sites
from minifloat.model.runtime.names import replace_forward

#: Largest error of a residual sum, as a share of the added output: BF16 rounds the sum to that of the whole stream.
_SUM_TOLERANCE = 0.1
#: Smallest factor of an output that a layer adds to its residual stream.
_SMALLEST_FACTOR = 1e-3


@dataclass(frozen=True)
class Residual:
    """Where the residual stream can be read before a linear adds to it."""

    path: str
    factor: float


@dataclass(frozen=True)
class Stage:
    """Linears that share their input, or the corresponding linears of all experts of a layer."""

    path: str
    experts: tuple[tuple[str, ...], ...]
    width: int
    paths: tuple[str, ...] = ()
    outer: bool | None = None  # for experts, whether these are the down projections
    residual: Residual | None = None  # of a stage of one linear that adds to the residual stream; None for other stages

    @property
    def name(self) -> str:
        """The linears in short, for progress: ``q_proj, k_proj, v_proj``."""
        return ", ".join(module.rpartition(".")[2] for module in self.experts[0])


@dataclass
class _Event:
    """The input, or the output, of a module while the layer runs."""

    path: str
    tensor: Tensor
    is_output: bool = False


def find_stages(
    model: nn.Module, prefix: str, layer: nn.Module, sites: Sites, call: LayerCall, hidden: Tensor
) -> list[Stage]:
    """Return the stages of a layer in the order of execution."""
    events: list[_Event] = []

    def record(path: str, is_output: bool, tensor: Tensor) -> None:
        events.append(_Event(path, tensor, is_output))

    linears = {site.path: site for site in sites.linears}
    experts = {site.path: site for site in sites.experts}
    with ExitStack() as stack, torch.inference_mode():
        for name, module in layer.named_modules():
            path = f"{prefix}.{name}" if name else prefix
            on_input(stack, module, partial(record, path, False))
            if path in linears:
                on_output(stack, module, partial(record, path, True))
        output = call.run(layer, hidden)
    stages: dict[Any, Stage] = {}
    for event in events:
        if event.is_output:
            continue
        if event.path in experts:
            site = experts[event.path]
            stages[event.path, False] = Stage(event.path, site.inner, site.inner_width, outer=False)
            stages[event.path, True] = Stage(event.path, site.outer, site.outer_width, outer=True)
        elif event.path in linears:
            key = (event.tensor.data_ptr(), event.tensor.shape[-1], event.tensor.numel())
            names = linears[event.path].names
            if key in stages:
                earlier = stages[key]
                stages[key] = replace(
                    earlier, experts=((*earlier.experts[0], *names),), paths=(*earlier.paths, event.path)
                )
            else:
                stages[key] = Stage(event.path, (names,), linears[event.path].width, (event.path,))
    residuals = dict(_residuals([*events, _Event("", output)], hidden))
    return [
        replace(stage, residual=residuals.get(stage.path))
        if len(stage.experts[0]) == 1 and stage.outer is None
        else stage
        for stage in stages.values()
    ]


def on_input(stack: ExitStack, module: nn.Module, keep: Callable[[Tensor], None]) -> None:
    """Call `keep` with the input of a module, the first tensor among its arguments, until the stack closes."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if tensor is not None:
            keep(tensor)

    stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def on_output(stack: ExitStack, module: nn.Module, keep: Callable[[Any], None]) -> None:
    """Call `keep` with the output of a module until the stack closes."""
    stack.callback(module.register_forward_hook(lambda _, __, output: keep(output)).remove)


def _residuals(events: list[_Event], hidden: Tensor) -> Iterator[tuple[str, Residual]]:
    """Yield the linears that add to the residual stream, with where it is read before they do."""
    stream, path = hidden.float().reshape(-1), ""
    for index, event in enumerate(events):
        if not event.is_output or event.tensor.numel() != stream.numel():
            continue
        added = event.tensor.float().reshape(-1)
        energy = float(added.square().sum())
        for later in events[index + 1 :]:
            if later.is_output or later.tensor.numel() != stream.numel() or energy == 0:
                continue
            step = later.tensor.float().reshape(-1) - stream
            factor = float((step * added).sum()) / energy
            rest = (step - factor * added).norm()
            if abs(factor) > _SMALLEST_FACTOR and float(rest) <= _SUM_TOLERANCE * float(step.norm()):
                yield event.path, Residual(path, factor)
                stream, path = later.tensor.float().reshape(-1), later.path
                break


@dataclass(frozen=True)
class FinishedModule:
    """A module whose output is the output of a linear in it."""

    path: str
    linear: str
    dimensions: int  # of the linear's input: 2 for ``[B T, K]``, 3 for ``[B, T, K]``
    returned: int  # length of the tuple that the module returns, the output first and None behind it; 0: no tuple


class FinishedModules:
    """The closed modules of a layer, with the inputs of their linears; once a linear has run, with its outputs."""

    def __init__(self, model: nn.Module, finished: dict[int, FinishedModule], file: TensorFile) -> None:
        self._model, self._finished, self._file = model, finished, file
        self._places: dict[tuple[int, int], StoredTensor] = {}
        self._ran: set[tuple[int, int]] = set()

    def keep(self, stage: int, batch: int, inputs: Tensor) -> None:
        """Keep the inputs ``[B T, K]`` of a stage in one batch, if its linear closes a module."""
        if stage in self._finished:
            self._places[stage, batch] = self._file.append(inputs)

    @contextmanager
    def applied(self, batch: int, hidden: Tensor) -> Iterator[None]:
        """Replace each closed module whose inputs are kept for a batch by its output while the block runs.

        `hidden`: the hidden states ``[B, T, H]`` of the batch, for their shape.
        """
        with ExitStack() as stack:
            for stage, module_end in self._finished.items():
                if (stage, batch) in self._places:
                    output = partial(self._output, stage, batch, hidden.shape)
                    stack.enter_context(_replaced(self._model, module_end, output))
            yield

    def _output(self, stage: int, batch: int, shape: torch.Size) -> Tensor:
        """Return the output of a closed module, whose linear has its final weight."""
        key = stage, batch
        kept = self._file.read(self._places[key])
        if key in self._ran:
            return kept
        output = _closing_output(self._model, self._finished[stage], kept, shape)
        if stage != max(self._finished):  # behind the last one the layer runs once
            place = StoredTensor(self._places[key].offset, output.shape, output.dtype)
            if place.end > self._places[key].end:
                place = self._file.reserve(output)
            self._file.write(place, output)
            self._places[key] = place
            self._ran.add(key)
        return output


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
                on_input(stack, module, partial(inputs.__setitem__, path))
            if name and (path in numbers or next(module.children(), None) is not None):
                on_output(stack, module, partial(outputs.__setitem__, path))
        expected = call.run(layer, hidden)
    needed = [stage.residual.path for stage in stages if stage.residual is not None]
    leading = hidden.shape[:-1], torch.Size([hidden.shape[:-1].numel()])
    found: dict[int, FinishedModule] = {}
    for linear, number in numbers.items():
        if linear not in outputs or inputs[linear].shape[:-1] not in leading:
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
            stack.enter_context(
                _replaced(model, module_end, partial(_closing_output, model, module_end, kept, hidden.shape))
            )
        if not call.run(layer, hidden).equal(expected):
            return {}
    return found


def _closing_output(model: nn.Module, module_end: FinishedModule, inputs: Tensor, shape: torch.Size) -> Tensor:
    """Return the output of the linear that closes a module on inputs ``[B T, K]``, without the hooks of the linear.

    `shape`: that of the hidden states.
    """
    linear: Any = model.get_submodule(module_end.linear)
    inputs = inputs.to(linear.weight.device)
    output: Tensor = linear.forward(inputs.reshape(*shape[:-1], -1) if module_end.dimensions == 3 else inputs)
    return output


@contextmanager
def _replaced(model: nn.Module, module_end: FinishedModule, output_of: Callable[[], Tensor]) -> Iterator[None]:
    """Let a closed module return an output that is known."""
    module = model.get_submodule(module_end.path)
    device = next(module.parameters()).device

    def forward(*_: Any, **__: Any) -> Any:
        output = output_of().to(device)
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
