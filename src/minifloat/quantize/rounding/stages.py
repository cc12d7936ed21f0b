"""The stages of a layer: groups of linears that share their input, in the order in which the layer runs them.

They are found by running the layer once and watching it, not from a list of architectures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.sites import Sites

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
    linears = {site.path: site for site in sites.linears}
    experts = {site.path: site for site in sites.experts}
    with ExitStack() as stack, torch.inference_mode():
        for name, module in layer.named_modules():
            path = f"{prefix}.{name}" if name else prefix
            hook = module.register_forward_pre_hook(partial(_record_input, events, path), with_kwargs=True)
            stack.callback(hook.remove)
            if path in linears:
                stack.callback(module.register_forward_hook(partial(_record_output, events, path)).remove)
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


def _record_input(events: list[_Event], path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tensor = first_tensor(args, kwargs)
    if tensor is not None:
        events.append(_Event(path, tensor))


def _record_output(events: list[_Event], path: str, _: nn.Module, __: Any, output: Tensor) -> None:
    events.append(_Event(path, output, is_output=True))


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the first tensor among the arguments of a module, which is its input."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


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
