"""The walk that rounds a model layer by layer with calibration text, with one layer in memory at a time.

Each layer runs over all sequences in two streams of hidden states: through the original layers, and through the layers
as they are quantized so far. For each stage of a layer (`minifloat.quantize.rounding.stages`) the walk collects the
inputs of both streams, chooses the codes of the weights that read them, and puts the quantized weights into the layer
before the next stage runs. A third stream, of the held-out sequences alone, goes through layers that are rounded to
nearest: at the end the report says what the method gains.

Hidden states are on disk. A finished layer is a file of codes, so that a killed run continues after it with the same
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.attention import KVTap
from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import ArgumentPool, StoredTensor, TensorFile
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.calibration.measure import head_amax
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.quantize.rounding.closings import Closings, find_closings
from minifloat.quantize.rounding.damage import DamageStreams, GroupsToMeasure, Places
from minifloat.quantize.rounding.divergence import Divergence, measure_divergence
from minifloat.quantize.rounding.fold_sample import FoldSample
from minifloat.quantize.rounding.inputs import LayerInputs
from minifloat.quantize.rounding.layer import LayerRounding
from minifloat.quantize.rounding.layer_file import LayerFile, LayerResult
from minifloat.quantize.rounding.layer_fold import LayerFold
from minifloat.quantize.rounding.layer_parts import fold_of, folded_tensors, rounding_of
from minifloat.quantize.rounding.layer_tensors import layer_tensors
from minifloat.quantize.rounding.options import RoundingOptions
from minifloat.quantize.rounding.slots import SlotRows, slot_statistics
from minifloat.quantize.rounding.stages import Stage, find_stages
from minifloat.quantize.rounding.statistics import HELD_OUT_ROWS, Accumulator, Sample
from minifloat.quantize.rounding.stored_readings import StoredReadings
from minifloat.quantize.rounding.taps import LayerTaps, Reading, pair


@dataclass
class _Streams:
    """Where the hidden states of each sequence are in their file, by stream."""

    original: dict[int, StoredTensor] = field(default_factory=dict)
    quantized: dict[int, StoredTensor] = field(default_factory=dict)
    nearest: dict[int, StoredTensor] = field(default_factory=dict)


class RoundingWalk:
    """One run over all layers."""

    def __init__(
        self,
        stack: LayerStack,
        plan: QuantizationPlan,
        kept: CalibrationSet,
        held_out: CalibrationSet,
        options: RoundingOptions,
        config: Mapping[str, Any],
        progress: Progress | None = None,
        groups: GroupsToMeasure | None = None,
    ) -> None:
        self.damage = None if groups is None else DamageStreams(groups)
        self.stack, self.options, self.progress = stack, options, progress
        self.sequences = (*kept.sequences, *held_out.sequences)
        self.first_held_out = len(kept.sequences)
        self.infos = {tensor.source.name: tensor.source for tensor in plan.tensors}
        self.quantized = {tensor.source.name for tensor in plan.tensors if tensor.parts}
        self.parts: dict[str, tuple[str, Part]] = {
            part.module: (tensor.source.name, part) for tensor in plan.tensors for part in tensor.parts
        }
        self.config = config
        self._passes = 0

    def _runs_quantized(self, number: int) -> bool:
        """Return whether a sequence runs through the quantized layers."""
        return self.options.method.follows_quantized or self.options.kv_cache or number >= self.first_held_out

    def run(self, folder: LayerWork[LayerFile | LayerResult]) -> list[LayerFile]:
        """Round all layers that the folder does not have yet, and return the files of all, and of the comparison."""
        if len(folder.finished) <= len(self.stack):
            with TensorFile(folder.scratch("arguments")) as file:
                pool = ArgumentPool(file, self.stack.device)
                streams, calls_of_sequences = self._start(folder, pool)
                for index in range(len(folder.finished), len(self.stack)):
                    calls = [calls_of_layers[index] for calls_of_layers in calls_of_sequences]
                    layer = _LayerWalk(self, index, folder, streams, calls, pool)
                    folder.finish(index, layer.run())
                record: dict[str, Any] = {"held_out": self._compare(folder, streams).to_dict()}
                if self.damage is not None:
                    record["damage"] = self._measure_damage(folder, streams, self.damage)
                folder.finish(len(self.stack), LayerResult({}, record))
        return [result for result in folder.finished if isinstance(result, LayerFile)]

    def _start(
        self, folder: LayerWork[LayerFile | LayerResult], pool: ArgumentPool
    ) -> tuple[_Streams, list[tuple[LayerCall, ...]]]:
        """Return the places of all hidden states, and the calls of all layers; write the inputs of layer 0."""
        resumed = folder.continues()
        streams, end = _Streams(), 0
        if self.damage is not None:
            records = [result.record for result in folder.finished]
            self.damage.started = [group for record in records for group in record.get("groups", ())]
        with TensorFile(folder.draft) as draft:

            def keep(number: int, hidden: Tensor) -> None:
                nonlocal end
                for stream, chosen in (
                    (streams.original, True),
                    (streams.quantized, self._runs_quantized(number)),
                    (streams.nearest, number >= self.first_held_out),
                ):
                    if chosen:
                        stream[number] = location = StoredTensor(end, hidden.shape, hidden.dtype)
                        end = location.end
                        if not resumed:
                            draft.write(location, hidden)
                if self.damage is not None and number >= self.first_held_out:
                    end = self.damage.place(number, hidden, end)

            calls = self.stack.capture(self.sequences, pool, keep)
            if not resumed:
                draft.sync()
                folder.keep_draft(0)
        return streams, calls

    def _compare(self, folder: LayerWork[LayerFile | LayerResult], streams: _Streams) -> Divergence:
        """Return how far the quantized model is from the original one on held-out text."""
        with TensorFile(folder.hidden(len(self.stack))) as hidden:

            def logits(stream: dict[int, StoredTensor], number: int) -> Tensor:
                return self.stack.logits(self.sequences[number], hidden.read(stream[number])).float()

            return measure_divergence(
                (
                    logits(streams.original, number),
                    logits(streams.nearest, number),
                    logits(streams.quantized, number),
                )
                for number in streams.nearest
            )

    def _measure_damage(
        self, folder: LayerWork[LayerFile | LayerResult], streams: _Streams, damage: DamageStreams
    ) -> dict[str, Any]:
        """Return the KL divergences that the damage of each group makes."""
        with TensorFile(folder.hidden(len(self.stack))) as hidden:

            def logits_of(sequence: Sequence[int], places: Iterable[StoredTensor]) -> Iterator[Tensor]:
                return self.stack.logits_of(sequence, map(hidden.read, places))

            return damage.measure(self.sequences, streams.original, streams.quantized, logits_of)

    def report(self, index: int, what: str, stages: int) -> None:
        """Report that one sequence went through a part of a layer."""
        self._passes += 1
        if self.progress is not None:
            passes = (stages + 2) * len(self.sequences)
            done = index * passes + min(self._passes, passes)
            self.progress(done, passes * len(self.stack), f"layer {index + 1} of {len(self.stack)}, {what}")

    def start_layer(self) -> None:
        """Count the passes of the next layer from zero."""
        self._passes = 0


class _LayerWalk:
    """The walk through one layer."""

    def __init__(
        self,
        walk: RoundingWalk,
        index: int,
        folder: LayerWork[LayerFile | LayerResult],
        streams: _Streams,
        calls: Sequence[LayerCall],
        pool: ArgumentPool,
    ) -> None:
        self.walk, self.index, self.folder, self.streams, self.calls, self.pool = (
            walk,
            index,
            folder,
            streams,
            calls,
            pool,
        )
        self.stack = walk.stack
        self.sites = self.stack.sites_of(index)
        self.prefix = f"{self.stack.path}.{index}"
        self.kv: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def run(self) -> LayerResult:
        """Round the layer, write the hidden states behind it, and return its codes."""
        self.walk.start_layer()
        with ExitStack() as stack:
            with torch.inference_mode(False):  # parameters as in the whole model
                layer = stack.enter_context(self.stack.weights.layer(self.index))
            self.layer = layer
            self.hidden = stack.enter_context(TensorFile(self.folder.hidden(self.index)))
            self.draft = stack.enter_context(TensorFile(self.folder.draft))
            self.reference = StoredReadings(stack.enter_context(TensorFile(self.folder.scratch("reference"))))
            self.rows = stack.enter_context(TensorFile(self.folder.scratch("rows")))
            first = min(self.streams.original)
            model, call, hidden = self.stack.model, self._call(first), self._hidden(self.streams.original, first)
            self.stages = find_stages(model, self.prefix, layer, self.sites, call, hidden)
            closings = find_closings(model, self.prefix, layer, self.stages, call, hidden)
            self.closings = Closings(model, closings, stack.enter_context(TensorFile(self.folder.scratch("closings"))))
            self.taps = LayerTaps(self.stack.model, layer, self.stages)
            rounding = self._round()
            self.draft.sync()
            self.folder.keep_draft(self.index + 1)
        record = {
            "weights": rounding.rows,
            "folds": self.fold.records,
            "groups": self.groups,
            "inputs": self.inputs.rows(),
            "kv": [{"module": name, "k": k.tolist(), "v": v.tolist()} for name, (k, v) in self.kv.items()],
        }
        return LayerResult({**rounding.tensors, **folded_tensors(self.fold, self.walk.quantized)}, record)

    def _round(self) -> LayerRounding:
        """Run all passes over the layer, and return its rounded weights."""
        rounding = self._rounding()
        self.inputs = LayerInputs(self.stack.model, self.stages, rounding.parts)
        self._run_original()
        with self.inputs.applied():
            self._run_nearest(rounding)
        rounding = self._rounding()  # with views of the restored weights
        self.fold = self._fold()
        self.inputs.fold(self.fold.by_slot)
        rounding.measure()
        self.taps.quantize_expert = self.inputs.quantize_expert
        with self.inputs.applied():
            for number, stage in enumerate(self.stages):
                self._round_stage(number, stage, rounding)
            self._run_quantized()
            self.groups = self._run_damaged(rounding)
        return rounding

    def _rounding(self) -> LayerRounding:
        """Return the weights of the layer that are to be rounded, with views of them in the model."""
        schemes = () if self.walk.damage is None else self.walk.damage.request.schemes
        return rounding_of(self._views(), self.stages, self.walk.parts, self.walk.options.method, schemes)

    def _views(self) -> dict[str, Tensor]:
        """Return the layer's tensors in the model, by name in the checkpoint."""
        return layer_tensors(self.stack.model, self.stack.weights.assignments(self.index), self.walk.infos)

    def _fold(self) -> LayerFold:
        """Fold scales of input channels, if the options say so, and return what was folded."""
        walk = self.walk
        fold, prefix = fold_of(self.index, self._views(), walk.infos, walk.config, self.stages, walk.parts)
        if self.walk.options.fold and prefix:
            fold.run(FoldSample(self.reference, self.stages, self.walk.first_held_out, len(self.walk.sequences)))
        return fold

    def _run_original(self) -> None:
        """Run the original layer over every sequence, and keep the inputs of its stages on disk."""
        for number in self.streams.original:
            output, readings = self.taps.read_all(self._call(number), self._hidden(self.streams.original, number))
            self.draft.write(self.streams.original[number], output)
            self.reference.keep(number, readings)
            if number < self.walk.first_held_out:
                for stage, reading in enumerate(readings):
                    inner = self.stages[stage].outer is False
                    self.inputs.observe(stage, reading, readings[stage + 1] if inner else None)
            self.walk.report(self.index, "original", len(self.stages))
        if self.walk.damage is not None:
            self.walk.damage.run_original(self._run_stream)

    def _run_nearest(self, rounding: LayerRounding) -> None:
        """Run the layer, rounded to nearest, over the held-out sequences; then restore its weights."""
        rounding.measure()
        rounding.round_to_nearest()
        for number, location in self.streams.nearest.items():
            self.draft.write(location, self._call(number).run(self.layer, self._hidden(self.streams.nearest, number)))
        with torch.inference_mode(False):
            self.stack.weights.fill(self.index)

    def _run_quantized(self) -> None:
        """Run the quantized layer over the sequences of its stream, and record the ranges of K and V if asked to."""
        with ExitStack() as stack:
            if self.walk.options.kv_cache:
                stack.enter_context(KVTap(self.stack.model, self._observe_kv))
            for number, location in self.streams.quantized.items():
                hidden = self._hidden(self.streams.quantized, number)
                with nullcontext() if self.walk.options.kv_cache else self.closings.applied(number):
                    self.draft.write(location, self._call(number).run(self.layer, hidden))
                self.walk.report(self.index, "quantized", len(self.stages))

    def _observe_kv(self, path: str, key: Tensor, value: Tensor) -> None:
        """Record the largest key and value of each head."""
        name = self.sites.attention_name(path)
        k, v = head_amax(key).cpu(), head_amax(value).cpu()
        if name in self.kv:
            k, v = torch.maximum(k, self.kv[name][0]), torch.maximum(v, self.kv[name][1])
        self.kv[name] = k, v

    def _run_damaged(self, rounding: LayerRounding) -> list[str]:
        """Run the streams that measure damage, and return the groups whose streams begin in this layer."""
        if self.walk.damage is None:
            return []
        return self.walk.damage.run_quantized(
            self._run_stream, rounding.weights, rounding.originals, self.streams.original, self.streams.quantized
        )

    def _run_stream(self, source: Places, destination: Places) -> None:
        """Run the layer over the hidden states at `source`, for the sequences of `destination`."""
        for number, location in destination.items():
            self.draft.write(location, self._call(number).run(self.layer, self._hidden(source, number)))

    def _round_stage(self, number: int, stage: Stage, rounding: LayerRounding) -> None:
        """Collect the inputs of a stage, and round the weights that read them."""
        if not any(module in rounding.parts for slot in stage.slots for module in slot):
            return
        if stage.outer is None:
            self._round_dense(number, stage, rounding)
        else:
            self._round_experts(number, stage, rounding)

    def _round_dense(self, number: int, stage: Stage, rounding: LayerRounding) -> None:
        follows = self.walk.options.method.follows_quantized
        adding = None if stage.residual is None else rounding.weights[stage.slots[0][0]]
        accumulator = Accumulator(stage.width, drift=follows, adding=adding, device=self.stack.device)
        held_out = Sample(HELD_OUT_ROWS, len(self.streams.nearest))
        for sequence, rows in self._rows(number, stage):
            (held_out if sequence >= self.walk.first_held_out else accumulator).add(rows)
        statistics = accumulator.finish()
        rounding.round_slot(stage.slots[0], statistics, held_out.rows(), {"tokens": statistics.tokens})

    def _round_experts(self, number: int, stage: Stage, rounding: LayerRounding) -> None:
        follows = self.walk.options.method.follows_quantized
        held_out = [Sample(HELD_OUT_ROWS, len(self.streams.nearest)) for _ in stage.slots]
        slots = SlotRows(self.rows, len(stage.slots))
        for sequence, (rows, experts) in self._paired(number, stage):
            assert experts is not None
            if sequence < self.walk.first_held_out:
                slots.keep(rows, experts)
                continue
            for expert in experts.unique().tolist():
                held_out[expert].add(rows.pick(experts == expert))
        for slot, statistics, facts in slot_statistics(slots, stage.width, drift=follows):
            rounding.round_slot(stage.slots[slot], statistics, held_out[slot].rows(), facts)

    def _rows(self, number: int, stage: Stage) -> Iterator[tuple[int, Any]]:
        for sequence, (rows, _) in self._paired(number, stage):
            yield sequence, rows

    def _paired(self, number: int, stage: Stage) -> Iterator[tuple[int, Any]]:
        """Yield for each sequence the inputs of a stage in both models, and the expert of each row."""
        for sequence in self.streams.original:
            original = self.fold.scaled(number, self.reference.read(sequence, number))
            if self.walk.options.method.follows_quantized:
                hidden = self._hidden(self.streams.quantized, sequence)
                with self.closings.applied(sequence):
                    quantized = self.taps.read(stage, self._call(sequence), hidden)
                self.closings.keep(number, sequence, quantized.inputs)
            elif stage.outer is False:
                routing = self.reference.read(sequence, number + 1)  # of the down projections: the same rows
                quantized = Reading(original.inputs[routing.tokens], routing.slots, routing.tokens)
            else:
                quantized = original
            yield sequence, pair(original, quantized, stage, sequence)
            self.walk.report(self.index, stage.name, len(self.stages))

    def _call(self, sequence: int) -> LayerCall:
        return self.pool.restore(self.calls[sequence])

    def _hidden(self, stream: Places, sequence: int) -> Tensor:
        return self.hidden.read(stream[sequence]).to(self.stack.device)
