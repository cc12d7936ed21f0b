"""What the layers of a model are called with, found without running them.

A decoder calls its layers one after the other, each with what the one before it returned and with arguments that are
the same whatever the layers compute: position embeddings, masks, positions. Where that holds, the layers can be run one
at a time, each over all sequences, and only one needs to be in memory. Whether it holds is not listed by architecture
but tried out, on layers without weights that return something made up: the arguments of every layer must not depend
on it, and what a layer gets must be the very tensor that the layer before returned.

Left out: layers that remember something from one to the next other than through their arguments; no model of
transformers is known to, without a cache.
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
from minifloat.errors import MinifloatError

_HIDDEN_STATES = "hidden_states"
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class CannotWalkError(Exception):
    """The layers of a model cannot be run one at a time; the message completes "it cannot because ..."."""


class _Reached(Exception):
    """The last layer was called: what the model would do after it is of no interest."""


@dataclass(frozen=True)
class Call:
    """What one layer is called with for one sequence, besides the hidden states.

    Attributes:
        args: Positional arguments after the hidden states.
        kwargs: Keyword arguments.
        named: Whether the hidden states are a keyword argument too.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: bool

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The hidden states that a layer makes of others.

        Raises:
            CannotWalkError: It returns something else, or in another shape or dtype.
        """
        named = {_HIDDEN_STATES: hidden} if self.named else {}
        output = layer(*(() if self.named else (hidden,)), *self.args, **named, **self.kwargs)
        made = output[0] if isinstance(output, tuple) else output
        if not isinstance(made, Tensor) or made.shape != hidden.shape or made.dtype != hidden.dtype:
            raise CannotWalkError("a layer returns no hidden states of the shape and dtype that it gets")
        return made


def find_layers(model: PreTrainedModel, sites: Sites) -> str:
    """The path of the module list that holds everything that is watched.

    Raises:
        CannotWalkError: There is none.
    """
    watched = [site.path for site in sites.linears] + [site.path for site in sites.experts]
    found: dict[str, int] = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(re.match(rf"{re.escape(path)}\.\d+\.", name) for name in watched)
    }
    if not watched or not found:
        raise CannotWalkError("no single list of layers holds all linears that are watched")
    return max(found, key=lambda path: found[path])


class Capture:
    """Runs a model up to its last layer, with all layers passed over.

    Args:
        model: Layers may be on the meta device; what the model runs before the first of them may not.
        layers: The list of layers.
    """

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        self.model, self.layers = model, layers
        self._in_tuple = False

    def check(self, input_ids: Tensor) -> None:
        """Find out how layers return hidden states, and whether they can be run one at a time.

        Args:
            input_ids: int64 ``[1, T]``, the sequence to try it with.

        Raises:
            CannotWalkError: They cannot.
        """
        try:
            plain = self._run(input_ids, torch.zeros_like)
        except CannotWalkError as error:
            self._in_tuple = True  # it may take the first of a tuple
            try:
                plain = self._run(input_ids, torch.zeros_like)
            except CannotWalkError:
                raise error from None
        poisoned = self._run(input_ids, partial(torch.full_like, fill_value=torch.nan))
        for call, other in zip(plain[1], poisoned[1], strict=True):
            if not _same((call.args, *call.kwargs.items()), (other.args, *other.kwargs.items())):
                raise CannotWalkError("arguments of a layer depend on what other layers computed")

    def run(self, input_ids: Tensor) -> tuple[Tensor, list[Call]]:
        """The hidden states that enter the first layer, and what each layer is called with.

        Args:
            input_ids: int64 ``[1, T]``.

        Raises:
            CannotWalkError: The layers are called in another way than they were in `check`.
        """
        return self._run(input_ids, lambda hidden: hidden.view(hidden.shape))

    @torch.inference_mode()
    def _run(self, input_ids: Tensor, instead: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Call]]:
        """`run`, with layers that return what `instead` makes of the hidden states."""
        recorder = _Recorder(len(self.layers), instead, self._in_tuple)
        with _replaced_forwards(self.layers, recorder):
            try:
                self.model.base_model(input_ids=input_ids, use_cache=False)
            except _Reached:
                assert recorder.first is not None
                return recorder.first, recorder.calls
            except (CannotWalkError, MinifloatError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise CannotWalkError(f"the model fails when its layers are passed over: {error}") from error
        raise CannotWalkError("not every layer is called")


class _Recorder:
    """Stands in for the layers during one pass."""

    def __init__(self, layers: int, instead: Callable[[Tensor], Tensor], in_tuple: bool) -> None:
        self.calls: list[Call] = []
        self.first: Tensor | None = None
        self._layers, self._instead, self._in_tuple = layers, instead, in_tuple
        self._returned: Tensor | None = None

    def called(self, index: int, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        """What layer `index` does instead of computing."""
        named = _HIDDEN_STATES in kwargs
        hidden = kwargs.pop(_HIDDEN_STATES) if named else args[0] if args else None
        if index != len(self.calls):
            raise CannotWalkError("its layers are not called once each, in order")
        if not isinstance(hidden, Tensor) or (self._returned is not None and hidden is not self._returned):
            raise CannotWalkError("what a layer gets is not what the layer before it returned")
        rest = args if named else args[1:]
        for value in (*rest, *kwargs.values()):
            _require_plain(value)
        self.first = hidden if self.first is None else self.first
        self.calls.append(Call(rest, kwargs, named))
        if len(self.calls) == self._layers:
            raise _Reached
        self._returned = self._instead(hidden)
        return (self._returned,) if self._in_tuple else self._returned


@contextmanager
def _replaced_forwards(layers: nn.ModuleList, recorder: _Recorder) -> Iterator[None]:
    """Have a recorder called instead of the layers. They stay where they are: models read attributes of them."""
    modules: list[Any] = list(layers)
    try:
        for index, module in enumerate(modules):
            module.forward = partial(recorder.called, index)
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def _require_plain(value: Any) -> None:
    """Raise where a layer could leave something for the next one in an argument, such as a cache."""
    if isinstance(value, tuple):
        for item in value:
            _require_plain(item)
    elif not isinstance(value, (Tensor, *_PLAIN)):
        raise CannotWalkError(f"its layers share an object of class {type(value).__name__}")


def _same(mine: Any, theirs: Any) -> bool:
    """Whether two arguments are equal to the bit."""
    if isinstance(mine, tuple):
        return (
            isinstance(theirs, tuple)
            and len(mine) == len(theirs)
            and all(_same(one, other) for one, other in zip(mine, theirs, strict=True))
        )
    if isinstance(mine, Tensor):
        return isinstance(theirs, Tensor) and mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return bool(type(mine) is type(theirs) and mine == theirs)
