"""Reads the inputs of the stages of a layer while it runs, in the original and in the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.calibration.sites import Record, inner_inputs, watch_experts
from minifloat.errors import NonFiniteError
from minifloat.kernels.inputs import round_inputs
from minifloat.model.plan.tensor_plan import Part
from minifloat.model.runtime.names import replace_forward
from minifloat.numerics.activation import static_scale
from minifloat.numerics.scheme import ActivationSpec
from minifloat.quantize.rounding.stages import Stage, on_input, on_output
from minifloat.quantize.rounding.statistics import Rows


@dataclass(frozen=True)
class StageInputs:
    inputs: Tensor  # ``[R, K]``, one row per token
    experts: Tensor | None = None  # int64 ``[R]``, the expert of each row, rising; None: rows are tokens
    tokens: Tensor | None = None  # int64 ``[R]``, the token of each row; None: rows are tokens
    residual: Tensor | None = None  # ``[T, H]``, the residual stream before the stage adds to it


#: Called with the number of the stage of an expert's down projection, and the arguments of a `Record`.
QuantizeExpert = Callable[[int, int, bool, Tensor, Tensor], Tensor]

#: More tokens than any batch has: the key of a row is its expert times this, plus its token.
_MOST_TOKENS = 1 << 32


class _Reached(Exception):
    """The stage has read its input; the rest of the layer is not needed."""


class StageReader:
    """Runs one layer, and reads the inputs of its stages."""

    def __init__(self, model: nn.Module, layer: nn.Module, stages: Sequence[Stage]) -> None:
        self.model, self.layer, self.stages = model, layer, stages
        self.quantize_expert: QuantizeExpert | None = None  # rounds the inputs of experts in the quantized model

    def read_all(self, call: LayerCall, hidden: Tensor) -> tuple[Tensor, list[StageInputs]]:
        """Return the output of the layer, and the inputs of all of its stages; of inner experts the whole module's."""
        stage_inputs: dict[int, StageInputs] = {}
        outer: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        with ExitStack() as stack:
            streams = self._read_residuals(stack, self.stages, hidden)
            for index, stage in enumerate(self.stages):
                module = self.model.get_submodule(stage.path)
                if stage.outer is None or not stage.outer:
                    on_input(stack, module, partial(_keep, stage_inputs, index))
                if stage.outer:
                    rows = outer.setdefault(stage.path, [])
                    stack.callback(watch_experts(module, partial(_keep_expert, rows, None, True)))
            output = call.run(self.layer, hidden)
        for index, stage in enumerate(self.stages):
            if stage.outer:
                stage_inputs[index] = _join(outer[stage.path], stage.width, hidden)
            elif stage.residual is not None:
                stage_inputs[index] = StageInputs(stage_inputs[index].inputs, residual=streams[stage.residual.path])
        return output, [stage_inputs[index] for index in range(len(self.stages))]

    def read(self, stage: Stage, call: LayerCall, hidden: Tensor) -> StageInputs:
        """Run the layer up to a stage, and return the inputs of the stage."""
        module: Any = self.model.get_submodule(stage.path)
        found: dict[int, StageInputs] = {}
        outer: list[tuple[int, Tensor, Tensor]] = []
        with ExitStack() as stack:
            streams = self._read_residuals(stack, [stage], hidden)
            if stage.outer is None:
                on_input(stack, module, partial(_keep_and_stop, found))
            elif stage.outer:
                stack.callback(watch_experts(module, partial(_keep_expert, outer, self._rounding(stage), True)))
                on_output(stack, module, _stop)
            else:
                stack.enter_context(_routing_only(module, found, self._rounding(stage)))
            with suppress(_Reached):
                call.run(self.layer, hidden)
        if stage.outer:
            return _join(outer, stage.width, hidden)
        if stage.residual is not None:
            return StageInputs(found[0].inputs, residual=streams[stage.residual.path])
        return found[0]

    def _rounding(self, stage: Stage) -> Record | None:
        if self.quantize_expert is None:
            return None
        return partial(self.quantize_expert, self.stages.index(stage) + (not stage.outer))

    def _read_residuals(self, stack: ExitStack, stages: Sequence[Stage], hidden: Tensor) -> Mapping[str, Tensor]:
        """Return a mapping that holds the residual stream of each stage once the layer has run."""
        streams = {"": _rows(hidden)}
        for path in {stage.residual.path for stage in stages if stage.residual is not None} - {""}:
            on_input(stack, self.model.get_submodule(path), partial(_keep_stream, streams, path))
        return streams


def pair(original: StageInputs, quantized: StageInputs, stage: Stage, where: str) -> tuple[Rows, Tensor | None]:
    """Return the inputs of a stage in both models token by token, and the expert of each row.

    `where`: which sequences these are, in words.
    """
    inputs, reference = quantized.inputs, original.inputs
    if stage.outer is False:
        assert quantized.tokens is not None
        reference = reference[quantized.tokens]
    elif stage.outer:
        assert quantized.experts is not None
        assert quantized.tokens is not None
        assert original.experts is not None
        assert original.tokens is not None
        keys = quantized.experts * _MOST_TOKENS + quantized.tokens
        known = original.experts * _MOST_TOKENS + original.tokens
        order = known.argsort()
        place = torch.searchsorted(known[order], keys).clamp(max=max(len(known) - 1, 0))
        row = order[place] if len(known) else place
        same = known[row] == keys if len(known) else torch.zeros(len(keys), dtype=torch.bool)
        # Rows that the original model sent to other experts count as without drift.
        reference = inputs.clone()
        reference[same] = original.inputs[row[same]]
    residual = None
    if stage.residual is not None and original.residual is not None and quantized.residual is not None:
        residual = (original.residual - quantized.residual) / stage.residual.factor
    for tensor in (inputs, reference):
        if not bool(tensor.sum(dtype=torch.float32).isfinite()):
            raise NonFiniteError(stage.experts[0][0], f"its input holds NaN or Inf in {where}")
    return Rows(inputs, reference, residual), quantized.experts


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).cpu()


def _keep(found: dict[int, StageInputs], index: int, tensor: Tensor) -> None:
    found[index] = StageInputs(_rows(tensor))


def _keep_and_stop(found: dict[int, StageInputs], tensor: Tensor) -> None:
    _keep(found, 0, tensor)
    raise _Reached


def _keep_stream(streams: dict[str, Tensor], path: str, tensor: Tensor) -> None:
    streams[path] = _rows(tensor)


def _keep_expert(
    rows: list[tuple[int, Tensor, Tensor]],
    quantize: Record | None,
    wanted: bool,
    expert: int,
    outer: bool,
    x: Tensor,
    tokens: Tensor,
) -> Tensor | None:
    """Keep the rows of an expert's down projections (`wanted`) or of its other inputs, quantized as the model's are."""
    replaced = None if quantize is None else quantize(expert, outer, x, tokens)
    if outer is wanted:
        rows.append((expert, tokens.cpu(), (x if replaced is None else replaced).cpu()))
    return replaced


def _stop(*_: Any) -> None:
    raise _Reached


@contextmanager
def _routing_only(module: Any, found: dict[int, StageInputs], quantize: Record | None) -> Iterator[None]:
    """Replace the forward method of an experts module by one that keeps each expert's inputs and stops."""

    def forward(hidden_states: Tensor, *routing: Tensor) -> Tensor:
        rows: list[tuple[int, Tensor, Tensor]] = []
        for expert, token, x in inner_inputs(module, hidden_states, *routing):
            _keep_expert(rows, quantize, False, expert, False, x, token)
        found[0] = _join(rows, hidden_states.shape[-1], hidden_states)
        raise _Reached

    undo = replace_forward(module, forward)
    try:
        yield
    finally:
        undo()


def _join(rows: Sequence[tuple[int, Tensor, Tensor]], width: int, like: Tensor) -> StageInputs:
    """Return the rows of all experts below each other."""
    if not rows:
        none = torch.zeros(0, dtype=torch.int64)
        return StageInputs(torch.zeros(0, width, dtype=like.dtype), none, none)
    experts = torch.cat([torch.full((len(tokens),), expert) for expert, tokens, _ in rows])
    return StageInputs(torch.cat([x for _, _, x in rows]), experts, torch.cat([tokens for _, tokens, _ in rows]))


class StoredStageInputs:
    """Keeps the inputs of the stages of each batch in a file. The indices of experts stay in memory."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file
        self._places: dict[tuple[int, int], tuple[StoredTensor, StoredTensor | None, StageInputs]] = {}

    def keep(self, batch: int, stage_inputs: Sequence[StageInputs]) -> None:
        for stage, given in enumerate(stage_inputs):
            residual = None if given.residual is None else self._file.append(given.residual)
            rest = replace(given, inputs=torch.empty(0), residual=None)
            self._places[batch, stage] = self._file.append(given.inputs), residual, rest

    def read(self, batch: int, stage: int) -> StageInputs:
        inputs, residual, rest = self._places[batch, stage]
        stream = None if residual is None else self._file.read(residual)
        return replace(rest, inputs=self._file.read(inputs), residual=stream)


def routed(tokens: StageInputs, down: StageInputs) -> StageInputs:
    """Return the inputs of a whole experts module in the rows of the down projections behind it."""
    return StageInputs(tokens.inputs[down.tokens], down.experts, down.tokens)


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
        self._factors: Mapping[tuple[int, int], Tensor] = {}

    def observe(self, number: int, stage_input: StageInputs) -> None:
        """Record the largest input of each channel in one batch of calibration text."""
        if number not in self._specs:
            return
        for expert, largest, tokens in _largest_inputs(stage_input):
            key = number, expert
            self._largest[key] = torch.maximum(self._largest[key], largest) if key in self._largest else largest
            self._tokens[key] = self._tokens.get(key, 0) + tokens

    def fold(self, factors: Mapping[tuple[int, int], Tensor]) -> None:
        self._factors = factors

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
        largest = torch.tensor(self._amax(number, expert)) if spec.needs_calibration else None
        return round_inputs(inputs, spec, None if largest is None else static_scale(spec, largest)).to(inputs.dtype)

    @contextmanager
    def applied(self, numbers: Container[int] | None = None) -> Iterator[None]:
        """Round the inputs of the linears of the layer, or of some of its stages, while the block runs."""
        with ExitStack() as stack:
            for number, stage in enumerate(self._stages):
                if number not in self._specs or (numbers is not None and number not in numbers):
                    continue
                if stage.outer is None:
                    last: list[Tensor] = []
                    for path in stage.paths:
                        module = self._model.get_submodule(path)
                        hook = module.register_forward_pre_hook(partial(self._replace, number, last), with_kwargs=True)
                        stack.callback(hook.remove)
                elif stage.outer:
                    module = self._model.get_submodule(stage.path)
                    stack.callback(watch_experts(module, partial(self.quantize_expert, number)))
            yield

    def quantize_expert(self, outer_number: int, expert: int, outer: bool, inputs: Tensor, _: Tensor) -> Tensor:
        """Return the inputs of an expert after rounding; the stage of gate and up comes right before that of down."""
        return self.quantize(outer_number if outer else outer_number - 1, expert, inputs)

    def _replace(
        self, number: int, last: list[Tensor], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Round the input of a linear; `last` keeps the input and the result for others that read the same tensor."""
        name = "" if args else next(iter(kwargs))
        inputs = kwargs[name] if name else args[0]
        if not last or last[0] is not inputs:
            last[:] = inputs, self.quantize(number, 0, inputs)
        return (args, {**kwargs, name: last[1]}) if name else ((last[1], *args[1:]), kwargs)

    def _amax(self, number: int, expert: int) -> float:
        """Return the largest input of an expert after the folds; of all experts if no token reached this one."""
        found = [key for key in self._largest if key == (number, expert)]
        keys = found or [key for key in self._largest if key[0] == number]
        largest = [0.0]
        for key in keys:
            factors = self._factors.get(key if self._stages[number].outer else (number, 0))
            values = self._largest[key]
            largest.append(float((values if factors is None else values / factors).max()))
        return max(largest)


def _largest_inputs(stage_input: StageInputs) -> Iterator[tuple[int, Tensor, int]]:
    """Yield for each expert of a stage its largest input by channel, float32 ``[K]``, and its number of tokens."""
    experts, inputs = stage_input.experts, stage_input.inputs
    for expert in [0] if experts is None else torch.unique(experts).tolist():
        rows = inputs if experts is None else inputs[experts == expert]
        yield expert, rows.abs().amax(0).float(), len(rows)
