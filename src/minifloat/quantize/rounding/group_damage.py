"""The damage of a change to each group of weights, from gradients and one layer at a time.

A small change of a model makes a KL divergence of half the expected square of the change of its loss, where the loss is
that of tokens drawn from the model's own distribution (the Fisher information). Each linear, or experts module, is
called again on the inputs that the original model gave it, with its weights or its inputs rounded; the product of the
gradient with what its outputs changed by is the change of the loss. Products of tokens count as independent, those of
linears of one group are added up first.

Streams of hidden states in 16 bits cannot measure this: any change makes later layers round otherwise, and that costs
as much as a group (docs/rounding.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.rounding.layer import PlannedWeights
from minifloat.quantize.rounding.methods import METHODS
from minifloat.quantize.rounding.stage_inputs import InputQuantizer
from minifloat.quantize.rounding.stages import Stage

#: Tokens that measure damage.
DAMAGE_TOKENS = 4096

#: Group -> name of a change -> KL divergence in nats per token.
Damages: TypeAlias = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Change:
    """What is rounded to nearest: the weights of a plan, or the inputs of its linears."""

    plan: QuantizationPlan
    inputs: bool = False


@dataclass(frozen=True)
class DamageRequest:
    """Groups of modules, and the changes whose damage to each of them is measured, by name."""

    groups: Mapping[str, Sequence[str]]
    changes: Mapping[str, Change]

    def to_dict(self) -> dict[str, Any]:
        """Return what determines the measurements, as JSON values."""
        changes = {
            name: [change.inputs, {module: repr(scheme) for module, scheme in change.plan.modules.items()}]
            for name, change in self.changes.items()
        }
        return {"groups": {name: [*modules] for name, modules in self.groups.items()}, "changes": changes}


@dataclass
class _Call:
    """A call of a module in the original model, and the gradient of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gradient: Tensor


@dataclass
class LayerDamage:
    """The damage of changes to one layer."""

    request: DamageRequest
    stack: LayerStack
    index: int
    stages: Sequence[Stage]
    _calls: dict[str, list[_Call]] = field(default_factory=dict)  # by path in the model
    _last: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_module = {module: name for name, modules in self.request.groups.items() for module in modules}
        sites = self.stack.sites_of(self.index)
        named = [(site.path, site.names) for site in sites.linears]
        named += [(site.path, sum((*site.inner, *site.outer), ())) for site in sites.experts]
        #: Modules of the groups: path in the model -> name of the group.
        self.groups = {path: of_module[name] for path, names in named for name in names if name in of_module}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep the arguments of the modules of the groups while the block runs the layer."""
        with ExitStack() as stack:
            for path in self.groups:
                hook = partial(self._keep, path)
                module = self.stack.model.get_submodule(path)
                stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """Add the gradients of the outputs of modules, by path, in the batch that was watched last."""
        for path in self.groups.keys() & self._last.keys():
            gradient = gradients.get(path)
            if gradient is not None:
                args, kwargs = self._last[path]
                self._calls.setdefault(path, []).append(_Call(args, kwargs, gradient.nan_to_num(0.0, 0.0, 0.0)))
        self._last.clear()

    @torch.no_grad()
    def measure(self, tokens: int) -> Damages:
        """Return half the mean of the squared change of the loss over so many tokens; the layer keeps its weights."""
        original, found = self._products(), Damages()
        for name, change in self.request.changes.items():
            planned = PlannedWeights(change.plan, {}, METHODS["nearest"], folds=False)
            rounding = planned.rounding(planned.views(self.stack, self.index), self.stages)
            inputs = InputQuantizer(self.stack.model, self.stages, rounding.parts)
            if not change.inputs:
                rounding.measure()
                rounding.round_to_nearest()
            with inputs.applied() if change.inputs else nullcontext():
                changed = self._products()
            if not change.inputs:
                self.stack.weights.fill(self.index)
            for group, products in changed.items():
                pairs = zip(products, original[group], strict=True)
                squares = sum(float((one - other).square().sum()) for one, other in pairs)
                found.setdefault(group, {})[name] = squares / (2 * max(tokens, 1))
        return found

    def _products(self) -> dict[str, list[Tensor]]:
        """Return for each group and batch the gradients times the outputs, summed over channels and linears."""
        sums: dict[tuple[str, int, int], Tensor] = {}
        for path, calls in self._calls.items():
            module = self.stack.model.get_submodule(path)
            for number, call in enumerate(calls):
                output = module(*call.args, **call.kwargs)
                rows = (output.double() * call.gradient.double()).sum(-1).flatten()
                key = self.groups[path], number, len(rows)
                sums[key] = sums[key] + rows if key in sums else rows
        found: dict[str, list[Tensor]] = {}
        for (group, _, _), rows in sums.items():
            found.setdefault(group, []).append(rows)
        return found

    def _keep(self, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept = [value.detach() if isinstance(value, Tensor) else value for value in (*args, *kwargs.values())]
        self._last[path] = tuple(kept[: len(args)]), dict(zip(kwargs, kept[len(args) :], strict=True))
