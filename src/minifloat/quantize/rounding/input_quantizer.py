"""The inputs of a layer's linears in the quantized model: rounded as a server rounds them, where the scheme says so.

Schemes with quantized inputs (W8A8, W4A8, W4A4) are rounded with the inputs that their weights will meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.calibration.experts import watch_experts
from minifloat.model.plan.tensor_plan import Part
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.scale_rules import float_scales, global_divisor
from minifloat.numerics.scheme import ActivationSpec
from minifloat.quantize.rounding.stage_inputs import StageInputs
from minifloat.quantize.rounding.stages import Stage


class InputQuantizer:
    """The formats and the ranges of the inputs of one layer."""

    def __init__(self, model: nn.Module, stages: Sequence[Stage], parts: Mapping[str, Part]) -> None:
        self._model, self._stages = model, stages
        self._specs: dict[int, ActivationSpec] = {}
        for number, stage in enumerate(stages):
            members = (parts[module] for expert in stage.experts for module in expert if module in parts)
            specs = {part.scheme.activation for part in members}
            if len(specs) == 1 and (spec := specs.pop()) is not None:
                self._specs[number] = spec
        self._largest: dict[tuple[int, int], Tensor] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._exponents: Mapping[tuple[int, int], Tensor] = {}

    def observe(self, number: int, stage_input: StageInputs, routing: StageInputs | None = None) -> None:
        """Record the largest input of each channel in one sequence of calibration text."""
        if number not in self._specs:
            return
        for expert, largest, tokens in largest_inputs(stage_input, routing):
            self.add(number, expert, largest, tokens)

    def add(self, number: int, expert: int, largest: Tensor, tokens: int) -> None:
        """Record the largest input of each channel of a expert, float32 ``[K]``, in some tokens."""
        key = number, expert
        self._largest[key] = torch.maximum(self._largest[key], largest) if key in self._largest else largest
        self._tokens[key] = self._tokens.get(key, 0) + tokens

    def fold(self, exponents: Mapping[tuple[int, int], Tensor]) -> None:
        """Take account of folds."""
        self._exponents = exponents

    def rows(self) -> list[dict[str, Any]]:
        """Return for each linear with quantized inputs its largest input, and the tokens that it was seen in."""
        return [
            {"module": module, "amax": self._amax(number, expert), "tokens": self._tokens.get((number, expert), 0)}
            for number, stage in enumerate(self._stages)
            if number in self._specs
            for expert, modules in enumerate(stage.experts)
            for module in modules
        ]

    def quantize(self, number: int, expert: int, inputs: Tensor) -> Tensor:
        """Return inputs ``[..., K]`` of a stage as they are after rounding, in their own dtype."""
        spec = self._specs.get(number)
        if spec is None or not inputs.numel():
            return inputs
        codes, grid = quantize_activation(inputs, spec, self._scale(spec, number, expert))
        return dequantize_activation(codes, grid, spec).to(inputs.dtype)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Round the inputs of all linears of the layer while the block runs."""
        with ExitStack() as stack:
            for number, stage in enumerate(self._stages):
                if number not in self._specs:
                    continue
                if stage.outer is None:
                    for path in stage.paths:
                        module = self._model.get_submodule(path)
                        hook = module.register_forward_pre_hook(partial(self._replace, number), with_kwargs=True)
                        stack.callback(hook.remove)
                elif stage.outer:
                    module = self._model.get_submodule(stage.path)
                    stack.callback(watch_experts(module, partial(self.quantize_expert, number)))
            yield

    def quantize_expert(self, outer_number: int, expert: int, outer: bool, inputs: Tensor, _: Tensor) -> Tensor:
        """Return the inputs of an expert after rounding; the stage of gate and up comes right before that of down."""
        return self.quantize(outer_number if outer else outer_number - 1, expert, inputs)

    def _replace(
        self, number: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.quantize(number, 0, args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self.quantize(number, 0, kwargs[name])}

    def _scale(self, spec: ActivationSpec, number: int, expert: int) -> Tensor | None:
        """Return the static scale, or the divisor, of an input; None if the format has none."""
        if not spec.needs_calibration:
            return None
        amax = torch.tensor(self._amax(number, expert))
        return global_divisor(amax) if spec.has_global_scale else float_scales(amax, spec.element)

    def _amax(self, number: int, expert: int) -> float:
        """Return the largest input of a expert after the folds; of all experts if no token reached this one."""
        found = [key for key in self._largest if key == (number, expert)]
        keys = found or [key for key in self._largest if key[0] == number]
        largest = [0.0]
        for key in keys:
            exponents = self._exponents.get(key if self._stages[number].outer else (number, 0))
            values = self._largest[key]
            largest.append(float((values if exponents is None else torch.ldexp(values, -exponents)).max()))
        return max(largest)


def largest_inputs(stage_input: StageInputs, routing: StageInputs | None = None) -> Iterator[tuple[int, Tensor, int]]:
    """Yield for each expert of a stage its largest input by channel, float32 ``[K]``, and its number of tokens."""
    experts, inputs = stage_input.experts, stage_input.inputs
    if routing is not None and routing.tokens is not None:
        experts, inputs = routing.experts, inputs[routing.tokens]
    for expert in [0] if experts is None else torch.unique(experts).tolist():
        rows = inputs if experts is None else inputs[experts == expert]
        yield expert, rows.abs().amax(0).float(), len(rows)
