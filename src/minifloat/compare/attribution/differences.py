"""Where two models of one architecture hold different weights, and how these are exchanged for each other.

A difference is one of effect: parameters, codes, scales and the quantization of inputs are compared bit by bit. It lies
in a whole module (a linear with its bias, a norm) or, where a module holds several stacks of experts or has modules
within, in one of its parameters. Weights that are tied in both models differ in one place, wherever they are used.

Left out: what is neither a module nor a tensor, such as the epsilon of a norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from minifloat.errors import UsageError
from minifloat.runtime.experts import QuantizedExperts
from minifloat.runtime.linear import QuantizedWeight

#: What a module holds under a name.
ModuleOrTensor = nn.Module | Tensor | None

#: More dimensions than a matrix: experts, each of which has its own name in a checkpoint.
_MATRIX = 2

#: Buffers of a quantized weight as checkpoints store it; packed it has another one instead.
_STORED = ("codes", "scale", "global_scale")
_PACKED = "packed"


@dataclass(frozen=True)
class Location:
    """Where a module or tensor hangs in a model.

    Attributes:
        holder: Name of the module that it is an attribute of; empty for the model itself.
        attribute: Name of the attribute.
    """

    holder: str
    attribute: str

    @property
    def name(self) -> str:
        """Both names as one."""
        return f"{self.holder}.{self.attribute}" if self.holder else self.attribute

    def get(self, model: nn.Module) -> ModuleOrTensor:
        """What is there in a model."""
        return _held(model.get_submodule(self.holder), self.attribute)


@dataclass(frozen=True)
class Difference:
    """What two models hold differently.

    Attributes:
        places: Where; more than one where it is tied in both.
    """

    places: tuple[Location, ...]

    @property
    def name(self) -> str:
        """As overrides name modules: without ``.weight``."""
        return self.places[0].name.removesuffix(".weight")

    @property
    def role(self) -> str:
        """The last part of the name, which differences of a kind share: ``"down_proj"``."""
        return self.name.rpartition(".")[2]

    def is_quantization(self, baseline: nn.Module, candidate: nn.Module) -> bool:
        """Whether it is that the candidate's weight is quantized and the baseline's is not."""
        return _is_quantized(self.places[0].get(candidate)) and not _is_quantized(self.places[0].get(baseline))


def find_differences(baseline: PreTrainedModel, candidate: PreTrainedModel) -> tuple[Difference, ...]:
    """All differences, in the order of the baseline's modules.

    Raises:
        UsageError: The models are of different architectures or sizes.
    """
    tied: dict[object, list[Location]] = {}
    for place in _differing(baseline, candidate, ""):
        ids = [frozenset(map(id, _tensors(place.get(model)))) for model in (baseline, candidate)]
        tied.setdefault(tuple(ids) if all(ids) else place, []).append(place)
    return tuple(Difference(tuple(places)) for places in tied.values())


@contextmanager
def exchanged(model: nn.Module, other: nn.Module, differences: Iterable[Difference]) -> Iterator[None]:
    """Let a model hold what another holds in some places; afterwards it is as it was, whatever happens."""
    places = [place for difference in differences for place in difference.places]
    holders = {place.holder: model.get_submodule(place.holder) for place in places}
    slots = [slot for holder in holders.values() for slot in (holder._parameters, holder._buffers, holder._modules)]
    before: list[dict[str, ModuleOrTensor]] = [dict(slot) for slot in slots]
    try:
        for place in places:
            _put(holders[place.holder], place.attribute, place.get(other))
        yield
    finally:
        for slot, content in zip(slots, before, strict=True):
            slot.clear()
            slot.update(content)  # type: ignore[arg-type]  # each gets back what it held


def stored_bytes(held: ModuleOrTensor, element_bytes: int) -> int:
    """Bytes in a checkpoint.

    Args:
        held: What a model holds.
        element_bytes: Of an element that is not quantized, which may be loaded in another dtype than it is stored in.
    """
    if isinstance(held, Tensor):
        return held.numel() * element_bytes
    if held is None:
        return 0
    quantized = 0
    for weight in held.modules():
        if isinstance(weight, QuantizedWeight):
            quantized += weight.nbytes + (0 if weight.input_scale is None else weight.input_scale.nbytes)
    return quantized + sum(parameter.numel() for parameter in held.parameters()) * element_bytes


def _differing(a: nn.Module, b: nn.Module, path: str) -> Iterator[Location]:
    if a is b:
        return
    if type(a) is not type(b):
        raise _unlike(path, type(a).__name__, type(b).__name__)
    for name in dict.fromkeys([*_names(a), *_names(b)]):
        place, x, y = Location(path, name), _held(a, name), _held(b, name)
        if isinstance(x, nn.Module) and isinstance(y, nn.Module) and _is_entered(x) and _is_entered(y):
            yield from _differing(x, y, place.name)
        elif not _same(x, y):
            if x is None or y is None or _shape(x) != _shape(y):
                raise _unlike(place.name, _described(x), _described(y))
            yield place


def _unlike(path: str, first: str, second: str) -> UsageError:
    return UsageError(
        f"damage can be attributed to modules of one architecture only; {path or 'the model'} is {first} in the "
        f"baseline and {second} in the candidate"
    )


def _is_entered(module: nn.Module) -> bool:
    """Whether a module is looked at attribute by attribute."""
    if _is_quantized(module):
        return False
    return any(True for _ in module.children()) or any(p.ndim > _MATRIX for p in module.parameters(recurse=False))


def _is_quantized(held: ModuleOrTensor) -> bool:
    return isinstance(held, (QuantizedWeight, QuantizedExperts))


def _names(module: nn.Module) -> list[str]:
    return [*module._parameters, *module._buffers, *module._modules]


def _held(module: nn.Module, name: str) -> ModuleOrTensor:
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


def _tensors(held: ModuleOrTensor) -> Sequence[Tensor]:
    if isinstance(held, nn.Module):
        return [*held.parameters(), *held.buffers()]
    return [] if held is None else [held]


def _shape(held: ModuleOrTensor) -> tuple[int, ...]:
    """Of the weight; empty where there is none."""
    weight = held if isinstance(held, (Tensor, QuantizedWeight, QuantizedExperts)) else getattr(held, "weight", None)
    return () if weight is None else tuple(weight.shape)


def _described(held: ModuleOrTensor) -> str:
    return "missing" if held is None else f"{type(held).__name__} {list(_shape(held))}"


def _same(x: ModuleOrTensor, y: ModuleOrTensor) -> bool:
    """Whether two things do the same, bit by bit."""
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return _same_bits(x, y)
    if not (isinstance(x, nn.Module) and type(x) is type(y)):
        return False
    if isinstance(x, QuantizedWeight) and isinstance(y, QuantizedWeight) and not _same_weight(x, y):
        return False
    compared = (_PACKED, *_STORED) if isinstance(x, QuantizedWeight) else ()
    names = [name for name in dict.fromkeys([*_names(x), *_names(y)]) if name not in compared]
    return all(_same(_held(x, name), _held(y, name)) for name in names)


def _same_weight(x: QuantizedWeight, y: QuantizedWeight) -> bool:
    if x.activation != y.activation or x.spec != y.spec or x.shape != y.shape:
        return False
    if x.is_packed and y.is_packed:
        return _same(_held(x, _PACKED), _held(y, _PACKED))
    first, second = x.quantized, y.quantized
    return all(_same(getattr(first, name), getattr(second, name)) for name in _STORED)


def _same_bits(x: Tensor, y: Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return torch.equal(x.detach().reshape(-1).view(torch.uint8), y.detach().reshape(-1).view(torch.uint8))
