"""Reads the parameters that a decoder names straight from a checkpoint, with the checks of `load`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minifloat.model.layouts import StoredWeight
from minifloat.model.runtime.tensors import StoredTensors, check_shape, warn_of_dequantized
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_LOG = logging.getLogger(__name__)
#: What the names of parameters begin with; checkpoints of the model without its head leave the prefix out.
_PREFIX = "model."


@dataclass(frozen=True)
class FusedParameter:
    """A parameter that a checkpoint may have in the place of one or more parameters of each expert."""

    shape: tuple[int, int, int]
    parts: tuple[tuple[str, ...], ...]
    transposed: bool = False  #: ``[experts, columns, rows]`` unless it is quantized
    either: bool = False

    def stored_shape(self, found: Sequence[int], is_quantized: bool) -> tuple[int, int, int]:
        """Return the shape that it has to have in a checkpoint, given the one that it has."""
        experts, rows, columns = self.shape
        turned = self.transposed or (self.either and tuple(found) != self.shape)
        return (experts, columns, rows) if turned and not is_quantized else self.shape


@dataclass(frozen=True)
class ModelParameters:
    """The parameters that a model needs."""

    architecture: str
    shapes: Mapping[str, tuple[int, ...]]
    fused: Mapping[str, FusedParameter]
    renamings: tuple[tuple[str, str], ...]
    ignorable: re.Pattern[str]
    tied: tuple[str, str] | None  #: of which either may be missing


class WeightSource:
    """Reads the parameters of a model from a checkpoint."""

    def __init__(
        self, tensors: StoredTensors, parameters: ModelParameters, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._tensors, self._parameters = tensors, parameters
        self._dtype, self._device = dtype, device
        self._dequantized: list[str] = []
        self._names = self._match()
        self._check_missing()
        for parameter, name in self._names.items():
            fused, shape = parameters.fused.get(parameter), tensors.shape(name)
            is_quantized = self.is_quantized(parameter)
            expected = parameters.shapes[parameter] if fused is None else fused.stored_shape(shape, is_quantized)
            check_shape(parameter, expected, shape)

    def is_same_tensor(self, first: str, second: str) -> bool:
        """Return whether two parameters are tied to one tensor of the checkpoint."""
        return self._names[first] == self._names[second]

    def reading_ahead(self) -> AbstractContextManager[None]:
        """Read quantized weights on a second thread, in the order of `ModelParameters.shapes`."""
        replaced = self._replaced()
        order = (replaced.get(name, name) for name in self._parameters.shapes)
        return self._tensors.reading_ahead(dict.fromkeys(self._names[name] for name in order))

    def is_quantized(self, parameter: str) -> bool:
        return self._names[parameter] in self._tensors.quantized

    @property
    def dequantized(self) -> tuple[str, ...]:
        """The quantized weights that have been read dequantized so far."""
        return tuple(self._dequantized)

    def spec(self, parameter: str) -> WeightSpec | None:
        """Return the format of what `matrix` returns; None if it is not quantized."""
        stored = self.stored(parameter)
        return None if stored is None else stored.spec

    def stored(self, parameter: str) -> StoredWeight | None:
        stored = self._tensors.quantized.get(self._names[parameter])
        return None if stored is None or stored[0].fused else stored[0]

    def tensor(self, parameter: str) -> Tensor:
        """Return a parameter as a tensor in the model's dtype, dequantized if it is stored quantized."""
        name = self._names[parameter]
        stored = self._tensors.quantized.get(name)
        if stored is None:
            return self._tensors.read_plain(name, self._dtype).to(self._device, self._dtype)
        self._dequantized.append(name)
        weights = [self._tensors.read_weight(weight).dequantize(self._dtype) for weight in stored]
        return (torch.stack(weights) if stored[0].fused else weights[0]).to(self._device)

    def matrix(self, parameter: str) -> Tensor | QuantizedTensor:
        stored = self.stored(parameter)
        return self.tensor(parameter) if stored is None else self._to_device(self._tensors.read_weight(stored))

    def experts(self, fused: str) -> Iterator[Sequence[Tensor | QuantizedTensor]]:
        """Yield a projection of each expert; quantized only if all are, because kernels take one kind of weight."""
        if fused in self._names:
            stored = self._tensors.quantized.get(self._names[fused])
            if stored is None:
                matrices = self.tensor(fused)
                parameter = self._parameters.fused[fused]
                turned = parameter.transposed or tuple(matrices.shape) != parameter.shape
                yield from ([m.T.contiguous()] if turned else [m] for m in matrices)
            else:
                yield from ([self._to_device(self._tensors.read_weight(weight))] for weight in stored)
            return
        parts = self._parameters.fused[fused].parts
        quantized = all(self.is_quantized(name) for names in parts for name in names)
        for names in parts:
            if quantized:
                yield [self.matrix(name) for name in names]
            else:
                rows = [self.tensor(name) for name in names]
                yield [rows[0] if len(rows) == 1 else torch.cat(rows)]

    def warn(self) -> None:
        """Log the quantized weights that had to be dequantized."""
        warn_of_dequantized(self._dequantized)

    def _match(self) -> dict[str, str]:
        found: dict[str, list[str]] = {}
        surplus = []
        parameters = self._parameters.shapes.keys() | self._parameters.fused.keys()
        for name in self._tensors.names:
            match = next((c for c in self._candidates(name) if c in parameters), None)
            if match is None:
                surplus.append(name)
            else:
                found.setdefault(match, []).append(name)
        for fused, replacement in self._parameters.fused.items():
            singles = [name for names in replacement.parts for part in names for name in found.get(part, ())]
            if fused in found:
                found[fused] += singles
        for parameter, names in found.items():
            self._tensors.refuse_doubled(parameter, names)
        self._tensors.refuse_surplus(self._parameters.architecture, surplus, self._parameters.ignorable)
        return {parameter: names[0] for parameter, names in found.items()}

    def _candidates(self, name: str) -> Iterator[str]:
        renamed = name
        for pattern, replacement in self._parameters.renamings:
            renamed = re.sub(pattern, replacement, renamed)
        for candidate in (renamed, name):
            yield from (candidate, _PREFIX + candidate, candidate.removeprefix(_PREFIX))

    def _check_missing(self) -> None:
        """Tie what the config ties, and raise a CheckpointError if a parameter has no tensor."""
        if self._parameters.tied is not None:
            target, source = self._parameters.tied
            if target in self._names and self.is_quantized(target):
                _LOG.warning("config.json ties %s to %s, but one of them is stored quantized: not tied", target, source)
            elif target in self._names:
                self._names.setdefault(source, self._names[target])
            elif source in self._names:
                self._names[target] = self._names[source]
        replaced = self._replaced()
        missing = [name for name in self._parameters.shapes if name not in self._names and name not in replaced]
        self._tensors.refuse_missing(self._parameters.architecture, missing)

    def _replaced(self) -> dict[str, str]:
        """Return the parameters of experts that the checkpoint has fused, each with the fused parameter."""
        return {
            part: fused
            for fused, parameter in self._parameters.fused.items()
            if fused in self._names
            for names in parameter.parts
            for part in names
        }

    def _to_device(self, weight: QuantizedTensor) -> QuantizedTensor:
        if self._device.type == "cpu":
            return weight
        global_scale = None if weight.global_scale is None else weight.global_scale.to(self._device)
        return replace(
            weight,
            codes=weight.codes.to(self._device),
            scale=weight.scale.to(self._device),
            global_scale=global_scale,
        )
