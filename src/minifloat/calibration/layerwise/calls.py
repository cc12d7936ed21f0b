"""Find the arguments with which a model calls its layers, without running the layers.

A decoder calls its layers in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minifloat.calibration.sites import Sites
from minifloat.checkpoint import Checkpoint
from minifloat.errors import MinifloatError, UsageError
from minifloat.model.runtime.products import fast_products

_HIDDEN_STATES = "hidden_states"
#: How often the arguments of layers are compared before they count as dependent on the layers' outputs.
_ATTEMPTS = 3
# Not detected: layers that pass state on other than through arguments; no model of transformers does so without a
# cache.
_STATELESS_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)


class LayersNotSeparableError(Exception):
    """The layers of a model cannot be run one at a time; the message completes "it cannot because ..."."""


@contextmanager
def layers_required(checkpoint: Checkpoint, cure: str) -> Iterator[None]:
    """Refuse a model whose layers cannot be run one at a time, with the cure."""
    try:
        yield
    except LayersNotSeparableError as error:
        raise UsageError(
            f"{checkpoint.path}: its layers cannot be run one at a time, because {error}; {cure}"
        ) from error


class _LastLayerReached(Exception):
    """The last layer was called; the rest of the forward pass is not needed."""


@dataclass(frozen=True)
class LayerCall:
    """The arguments of one layer for one batch, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Return the hidden states that the layer computes from `hidden`."""
        named = {_HIDDEN_STATES: hidden} if self.named else {}
        with fast_products():
            result = layer(*(() if self.named else (hidden,)), *self.args, **named, **self.kwargs)
        output = result[0] if isinstance(result, tuple) else result
        if not isinstance(output, Tensor) or output.shape != hidden.shape or output.dtype != hidden.dtype:
            raise LayersNotSeparableError("a layer returns no hidden states of the shape and dtype that it gets")
        return output


def find_layers(model: PreTrainedModel, sites: Sites) -> str:
    """Return the path of the module list that holds all sites."""
    observed = [site.path for site in sites.linears] + [site.path for site in sites.experts]
    lengths: dict[str, int] = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(re.match(rf"{re.escape(path)}\.\d+\.", name) for name in observed)
    }
    if not observed or not lengths:
        raise LayersNotSeparableError("no single list of layers holds all linears that are observed")
    return max(lengths, key=lambda path: lengths[path])


class Capture:
    """Runs a model up to its last layer, with a placeholder in place of every layer."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        self.model, self.layers = model, layers
        self._in_tuple = False

    def check(self, input_ids: Tensor) -> None:
        """Check that the layers can be run one at a time, and find out whether they return a tuple."""
        try:
            _, calls_with_zeros = self._run(input_ids, torch.zeros_like)
        except LayersNotSeparableError as error:
            self._in_tuple = True  # the model may take the first element of a tuple
            try:
                _, calls_with_zeros = self._run(input_ids, torch.zeros_like)
            except LayersNotSeparableError:
                raise error from None
        for _ in range(_ATTEMPTS):
            _, calls_with_nan = self._run(input_ids, partial(torch.full_like, fill_value=torch.nan))
            pairs = zip(calls_with_zeros, calls_with_nan, strict=True)
            if all(_same(_arguments(call), _arguments(other)) for call, other in pairs):
                return
            # The last bit of a cosine depends on how a tensor is divided among threads, whose number may have changed.
            _, calls_with_zeros = self._run(input_ids, torch.zeros_like)
        raise LayersNotSeparableError("arguments of a layer depend on what other layers computed")

    def run(self, input_ids: Tensor) -> tuple[Tensor, list[LayerCall]]:
        """Return the hidden states that enter the first layer, and the call of each layer."""
        return self._run(input_ids, lambda hidden: hidden.view(hidden.shape))

    @torch.inference_mode()
    def logits(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the logits ``[B, T, V]`` of the model whose last layer returns `hidden`."""
        return self.logits_with_grad(input_ids, hidden)

    def logits_with_grad(self, input_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return what `logits` returns, with gradients where they are enabled."""
        result = (hidden,) if self._in_tuple else hidden
        with _replaced_forwards(self.layers, lambda *_, **__: result), fast_products():
            output: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return output

    @torch.inference_mode()
    def _run(self, input_ids: Tensor, placeholder: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[LayerCall]]:
        """Return what `run` returns, with layers whose output is ``placeholder(hidden states)``."""
        recorder = _CallRecorder(len(self.layers), placeholder, self._in_tuple)
        with _replaced_forwards(self.layers, recorder.forward):
            try:
                self.model.base_model(input_ids=input_ids, use_cache=False)
            except _LastLayerReached:
                assert recorder.first_hidden is not None
                return recorder.first_hidden, recorder.calls
            except (LayersNotSeparableError, MinifloatError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise LayersNotSeparableError(f"the model fails when its layers are skipped: {error}") from error
        raise LayersNotSeparableError("not every layer is called")


class _CallRecorder:
    """Takes the place of all layers during one forward pass, and records their calls."""

    def __init__(self, num_layers: int, placeholder: Callable[[Tensor], Tensor], in_tuple: bool) -> None:
        self.calls: list[LayerCall] = []
        self.first_hidden: Tensor | None = None
        self._num_layers, self._placeholder, self._in_tuple = num_layers, placeholder, in_tuple
        self._last_output: Tensor | None = None

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """Record the call of layer `index`, and return the placeholder of its output."""
        named = _HIDDEN_STATES in kwargs
        hidden = kwargs.pop(_HIDDEN_STATES) if named else args[0] if args else None
        if index != len(self.calls):
            raise LayersNotSeparableError("its layers are not called once each, in order")
        if not isinstance(hidden, Tensor) or (self._last_output is not None and hidden is not self._last_output):
            raise LayersNotSeparableError("what a layer gets is not what the layer before it returned")
        other_args = args if named else args[1:]
        for value in (*other_args, *kwargs.values()):
            _require_stateless(value)
        self.first_hidden = hidden if self.first_hidden is None else self.first_hidden
        self.calls.append(LayerCall(other_args, kwargs, named))
        if len(self.calls) == self._num_layers:
            raise _LastLayerReached
        self._last_output = self._placeholder(hidden)
        return (self._last_output,) if self._in_tuple else self._last_output


@contextmanager
def _replaced_forwards(layers: nn.ModuleList, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of each layer by `forward`, which gets the index of the layer first."""
    modules: list[Any] = list(layers)
    try:
        for index, module in enumerate(modules):
            module.forward = partial(forward, index)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _require_stateless(value: Any) -> None:
    """Raise an error for an argument in which a layer could leave state for a later layer, such as a cache."""
    if isinstance(value, tuple):
        for item in value:
            _require_stateless(item)
    elif not isinstance(value, (Tensor, *_STATELESS_TYPES)):
        raise LayersNotSeparableError(f"its layers share an object of class {type(value).__name__}")


def _arguments(call: LayerCall) -> tuple[Any, ...]:
    return (call.args, *call.kwargs.items())


def _same(left: Any, right: Any) -> bool:
    """Return whether two arguments are equal to the bit."""
    if isinstance(left, tuple):
        return isinstance(right, tuple) and len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    return bool(type(left) is type(right) and left == right)
