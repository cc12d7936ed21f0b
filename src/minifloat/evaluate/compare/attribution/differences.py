"""The differences between two models of one architecture, bit by bit, and the exchange of differing modules.

A difference is a whole module (a linear with its bias, a norm) or, where a module holds several stacks of experts or
has submodules, one of its parameters. Weights that are tied in both models are one difference, with several locations.
Left out: attributes that are neither modules nor tensors, such as the epsilon of a norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minifloat.errors import UsageError
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import LoadedLmHead

#: A submodule, parameter or buffer; None if a model has none of the name.
ModuleOrTensor = nn.Module | Tensor | None

#: Dimensions of a matrix. Parameters with more are stacks of experts, each of which has its own name in a checkpoint.
_MATRIX_DIMS = 2

#: Buffers of a quantized weight in the form that checkpoints store; a packed weight has one other buffer instead.
_STORED = ("codes", "scale", "global_scale")
_PACKED = "packed"


@dataclass(frozen=True)
class Location:
    holder: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.holder}.{self.attribute}" if self.holder else self.attribute

    def get(self, model: nn.Module) -> ModuleOrTensor:
        return _attribute(model.get_submodule(self.holder), self.attribute)


@dataclass(frozen=True)
class Difference:
    locations: tuple[Location, ...]

    @property
    def name(self) -> str:
        """Name of the module as overrides spell it, without ``.weight``."""
        return self.locations[0].name.removesuffix(".weight")

    @property
    def role(self) -> str:
        """Last part of the name, which similar modules of all layers share: ``"down_proj"``."""
        return self.name.rpartition(".")[2]

    def is_quantization(self, baseline: nn.Module, candidate: nn.Module) -> bool:
        """Return whether the candidate's checkpoint stores the weight quantized and the baseline's does not."""
        location = self.locations[0]
        return is_stored_quantized(location.get(candidate)) and not _is_quantized(location.get(baseline))


def find_differences(baseline: PreTrainedModel, candidate: PreTrainedModel) -> tuple[Difference, ...]:
    tied: dict[object, list[Location]] = {}
    for location in _differing(baseline, candidate, ""):
        ids = [frozenset(map(id, _tensors(location.get(model)))) for model in (baseline, candidate)]
        tied.setdefault(tuple(ids) if all(ids) else location, []).append(location)
    return tuple(Difference(tuple(locations)) for locations in tied.values())


@contextmanager
def exchanged(model: nn.Module, other: nn.Module, differences: Iterable[Difference]) -> Iterator[None]:
    """Put another model's modules into a model while the context lasts; restore the model's own in any case."""
    locations = [location for difference in differences for location in difference.locations]
    holders = {location.holder: model.get_submodule(location.holder) for location in locations}
    slots = [slot for holder in holders.values() for slot in (holder._parameters, holder._buffers, holder._modules)]
    before: list[dict[str, ModuleOrTensor]] = [dict(slot) for slot in slots]
    try:
        for location in locations:
            _put(holders[location.holder], location.attribute, location.get(other))
        yield
    finally:
        for slot, content in zip(slots, before, strict=True):
            slot.clear()
            slot.update(content)  # type: ignore[arg-type]  # each slot gets back its own content


def stored_bytes(value: ModuleOrTensor, element_bytes: int) -> int:
    if isinstance(value, Tensor):
        return value.numel() * element_bytes
    if value is None:
        return 0
    quantized = 0
    for weight in value.modules():
        if isinstance(weight, QuantizedWeight):
            quantized += weight.nbytes + (0 if weight.input_scale is None else weight.input_scale.nbytes)
    return quantized + sum(parameter.numel() for parameter in value.parameters()) * element_bytes


def _differing(a: nn.Module, b: nn.Module, path: str) -> Iterator[Location]:
    if a is b:
        return
    if type(a) is not type(b):
        raise _unlike(path, type(a).__name__, type(b).__name__)
    for name in dict.fromkeys([*_names(a), *_names(b)]):
        location, x, y = Location(path, name), _attribute(a, name), _attribute(b, name)
        if isinstance(x, nn.Module) and isinstance(y, nn.Module) and _is_divisible(x) and _is_divisible(y):
            yield from _differing(x, y, location.name)
        elif not _same(x, y):
            if x is None or y is None or _shape(x) != _shape(y):
                raise _unlike(location.name, _described(x), _described(y))
            yield location


def _unlike(path: str, first: str, second: str) -> UsageError:
    return UsageError(
        f"attribution needs two models of one architecture; {path or 'the model'} is {first} in the baseline and "
        f"{second} in the candidate"
    )


def _is_divisible(module: nn.Module) -> bool:
    """Return whether a module is compared attribute by attribute instead of as a whole."""
    if _is_quantized(module):
        return False
    return any(True for _ in module.children()) or any(p.ndim > _MATRIX_DIMS for p in module.parameters(recurse=False))


def _is_quantized(value: ModuleOrTensor) -> bool:
    return isinstance(value, (QuantizedWeight, QuantizedExperts))


def is_stored_quantized(value: ModuleOrTensor) -> bool:
    """Return whether a weight is quantized in its checkpoint, unlike an output layer that was quantized when loaded."""
    return _is_quantized(value) and not isinstance(value, LoadedLmHead)


def _names(module: nn.Module) -> list[str]:
    return [*module._parameters, *module._buffers, *module._modules]


def _attribute(module: nn.Module, name: str) -> ModuleOrTensor:
    for slot in (module._parameters, module._buffers, module._modules):
        if slot.get(name) is not None:
            return slot[name]
    return None


def _put(module: nn.Module, name: str, value: ModuleOrTensor) -> None:
    for slot in (module._parameters, module._buffers, module._modules):
        slot.pop(name, None)
    if isinstance(value, nn.Module):
        module._modules[name] = value
    elif isinstance(value, nn.Parameter):
        module._parameters[name] = value
    else:
        module._buffers[name] = value


def _tensors(value: ModuleOrTensor) -> Sequence[Tensor]:
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    return [] if value is None else [value]


def _shape(value: ModuleOrTensor) -> tuple[int, ...]:
    if isinstance(value, (Tensor, QuantizedWeight, QuantizedExperts)):
        return tuple(value.shape)
    weight = getattr(value, "weight", None)
    return () if weight is None else tuple(weight.shape)


def _described(value: ModuleOrTensor) -> str:
    return "missing" if value is None else f"{type(value).__name__} {list(_shape(value))}"


def _same(x: ModuleOrTensor, y: ModuleOrTensor) -> bool:
    """Return whether two modules or tensors are the same, bit by bit."""
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        if x.dtype != y.dtype or x.shape != y.shape:
            return False
        return torch.equal(x.detach().reshape(-1).view(torch.uint8), y.detach().reshape(-1).view(torch.uint8))
    if not (isinstance(x, nn.Module) and type(x) is type(y)):
        return False
    if isinstance(x, QuantizedWeight) and isinstance(y, QuantizedWeight) and not _same_weight(x, y):
        return False
    compared = (_PACKED, *_STORED) if isinstance(x, QuantizedWeight) else ()
    names = [name for name in dict.fromkeys([*_names(x), *_names(y)]) if name not in compared]
    return all(_same(_attribute(x, name), _attribute(y, name)) for name in names)


def _same_weight(x: QuantizedWeight, y: QuantizedWeight) -> bool:
    formats = [(weight.activation, weight.int8_inputs, weight.spec, weight.shape) for weight in (x, y)]
    if formats[0] != formats[1]:
        return False
    if x.is_packed and y.is_packed:
        return _same(_attribute(x, _PACKED), _attribute(y, _PACKED))
    first, second = x.quantized, y.quantized
    return all(_same(getattr(first, name), getattr(second, name)) for name in _STORED)
