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

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.calibration.layerwise.walk import ORIGINAL, LayerWalk, OpenLayer
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.calibration.measure import head_amax
from minifloat.calibration.observe import KVObserver
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan
from minifloat.quantize.rounding.closings import Closings, find_closings
from minifloat.quantize.rounding.damage import DamageStreams, GroupsToMeasure, Places
from minifloat.quantize.rounding.divergence import Divergence, measure_divergence
from minifloat.quantize.rounding.fold_sample import FoldSample
from minifloat.quantize.rounding.inputs import LayerInputs
from minifloat.quantize.rounding.layer import LayerRounding
from minifloat.quantize.rounding.layer_fold import LayerFold
from minifloat.quantize.rounding.layer_parts import fold_of, folded_tensors, rounding_of
from minifloat.quantize.rounding.layer_tensors import layer_tensors
from minifloat.quantize.rounding.options import RoundingOptions
from minifloat.quantize.rounding.rounded_model import layer_content
from minifloat.quantize.rounding.slots import SlotRows, slot_statistics
from minifloat.quantize.rounding.stages import Stage, find_stages
from minifloat.quantize.rounding.statistics import HELD_OUT_ROWS, Accumulator, Sample
from minifloat.quantize.rounding.taps import LayerTaps, Reading, StoredReadings, pair

#: Streams of hidden states beside `ORIGINAL`: through the layers as they are quantized so far, and, of the held-out
#: sequences alone, through layers that are rounded to nearest.
QUANTIZED, NEAREST = "quantized", "nearest"


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

    def run(self, work: LayerWork) -> None:
        """Round all layers that are not finished, then compare the models on held-out text."""
        if len(work.finished) > len(self.stack):
            return
        with LayerWalk(self.stack, self.sequences, work, self._streams, keep_last=True) as walk:
            if self.damage is not None:
                self.damage.start(walk.places, [file.record for file in work.finished])
            walk.run(lambda layer: _LayerRun(self, walk, layer).run())
            with TensorFile(work.hidden(len(self.stack))) as hidden:
                record: dict[str, Any] = {"held_out": self._compare(walk, hidden).to_dict()}
                if self.damage is not None:
                    record["damage"] = self._measure_damage(walk, hidden, self.damage)
        work.finish(len(self.stack), layer_content({}, record))

    def _streams(self, number: int, hidden: Tensor) -> list[Hashable]:
        """Return the streams in which a sequence runs."""
        held_out = number >= self.first_held_out
        streams: list[Hashable] = [ORIGINAL]
        if self.options.method.follows_quantized or self.options.kv_cache or held_out:
            streams.append(QUANTIZED)
        if held_out:
            streams.append(NEAREST)
            if self.damage is not None:
                streams += self.damage.streams_of(hidden.shape[1])
        return streams

    def _compare(self, walk: LayerWalk, hidden: TensorFile) -> Divergence:
        """Return how far the quantized model is from the original one on held-out text."""

        def logits(stream: str, number: int) -> Tensor:
            return self.stack.logits(self.sequences[number], hidden.read(walk.places[stream][number])).float()

        return measure_divergence(
            (logits(ORIGINAL, number), logits(NEAREST, number), logits(QUANTIZED, number))
            for number in walk.places[NEAREST]
        )

    def _measure_damage(self, walk: LayerWalk, hidden: TensorFile, damage: DamageStreams) -> dict[str, Any]:
        """Return the KL divergences that the damage of each group makes."""

        def logits_of(sequence: Sequence[int], places: Iterable[StoredTensor]) -> Iterator[Tensor]:
            return self.stack.logits_of(sequence, map(hidden.read, places))

        return damage.measure(self.sequences, walk.places[ORIGINAL], walk.places[QUANTIZED], logits_of)

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


class _LayerRun:
    """The passes over one layer."""

    def __init__(self, walk: RoundingWalk, layers: LayerWalk, layer: OpenLayer) -> None:
        self.walk, self.layer, self.model = walk, layer, walk.stack.model
        self.original, self.quantized, self.nearest = (
            layers.places[stream] for stream in (ORIGINAL, QUANTIZED, NEAREST)
        )
        self.reference, self.rows = StoredReadings(layer.scratch("reference")), layer.scratch("rows")
        call, hidden = layer.call(0), layer.hidden(self.original[0])
        self.stages = find_stages(self.model, layer.path, layer.module, layer.sites, call, hidden)
        closings = find_closings(self.model, layer.path, layer.module, self.stages, call, hidden)
        self.closings = Closings(self.model, closings, layer.scratch("closings"))
        self.taps = LayerTaps(self.model, layer.module, self.stages)
        self.kv: dict[str, tuple[Tensor, Tensor]] = {}

    def run(self) -> ArrayContent:
        """Round the layer, write the hidden states behind it, and return its codes."""
        self.walk.start_layer()
        rounding = self._rounding()
        inputs = LayerInputs(self.model, self.stages, rounding.parts)
        self._run_original(inputs)
        with inputs.applied():
            self._run_nearest(rounding)
        rounding = self._rounding()  # with views of the restored weights
        fold = self._fold()
        inputs.fold(fold.by_slot)
        rounding.measure()
        self.taps.quantize_expert = inputs.quantize_expert
        with inputs.applied():
            for number, stage in enumerate(self.stages):
                self._round_stage(number, stage, rounding, fold)
            self._run_quantized()
            groups = self._run_damaged(rounding)
        record = {
            "weights": rounding.rows,
            "folds": fold.records,
            "groups": groups,
            "inputs": inputs.rows(),
            "kv": [{"module": name, "k": k.tolist(), "v": v.tolist()} for name, (k, v) in self.kv.items()],
        }
        return layer_content({**rounding.tensors, **folded_tensors(fold, self.walk.quantized)}, record)

    def _rounding(self) -> LayerRounding:
        """Return the weights of the layer that are to be rounded, with views of them in the model."""
        schemes = () if self.walk.damage is None else self.walk.damage.request.schemes
        return rounding_of(self._views(), self.stages, self.walk.parts, self.walk.options.method, schemes)

    def _views(self) -> dict[str, Tensor]:
        """Return the layer's tensors in the model, by name in the checkpoint."""
        return layer_tensors(self.model, self.walk.stack.weights.assignments(self.layer.index), self.walk.infos)

    def _fold(self) -> LayerFold:
        """Fold scales of input channels, if the options say so, and return what was folded."""
        walk = self.walk
        fold, prefix = fold_of(self.layer.index, self._views(), walk.infos, walk.config, self.stages, walk.parts)
        if self.walk.options.fold and prefix:
            fold.run(FoldSample(self.reference, self.stages, self.walk.first_held_out, len(self.walk.sequences)))
        return fold

    def _run_original(self, inputs: LayerInputs) -> None:
        """Run the original layer over every sequence, and keep the inputs of its stages on disk."""
        for number, place in self.original.items():
            output, readings = self.taps.read_all(self.layer.call(number), self.layer.hidden(place))
            self.layer.write(place, output)
            self.reference.keep(number, readings)
            if number < self.walk.first_held_out:
                for stage, reading in enumerate(readings):
                    inner = self.stages[stage].outer is False
                    inputs.observe(stage, reading, readings[stage + 1] if inner else None)
            self.walk.report(self.layer.index, "original", len(self.stages))
        if self.walk.damage is not None:
            self.walk.damage.run_original(self._run_stream)

    def _run_nearest(self, rounding: LayerRounding) -> None:
        """Run the layer, rounded to nearest, over the held-out sequences; then restore its weights."""
        rounding.measure()
        rounding.round_to_nearest()
        self._run_stream(self.nearest, self.nearest)
        with torch.inference_mode(False):
            self.walk.stack.weights.fill(self.layer.index)

    def _run_quantized(self) -> None:
        """Run the quantized layer over the sequences of its stream, and record the ranges of K and V if asked to."""
        with ExitStack() as stack:
            if self.walk.options.kv_cache:
                stack.enter_context(KVObserver(self.model, self._observe_kv))
            for number, place in self.quantized.items():
                hidden = self.layer.hidden(place)
                with nullcontext() if self.walk.options.kv_cache else self.closings.applied(number):
                    self.layer.write(place, self.layer.call(number).run(self.layer.module, hidden))
                self.walk.report(self.layer.index, "quantized", len(self.stages))

    def _observe_kv(self, path: str, key: Tensor, value: Tensor) -> None:
        """Record the largest key and value of each head."""
        name = self.layer.sites.attention_name(path)
        k, v = head_amax(key).cpu(), head_amax(value).cpu()
        if name in self.kv:
            k, v = torch.maximum(k, self.kv[name][0]), torch.maximum(v, self.kv[name][1])
        self.kv[name] = k, v

    def _run_damaged(self, rounding: LayerRounding) -> list[str]:
        """Run the streams that measure damage, and return the groups whose streams begin in this layer."""
        if self.walk.damage is None:
            return []
        return self.walk.damage.run_quantized(
            self._run_stream, rounding.weights, rounding.originals, self.original, self.quantized
        )

    def _run_stream(self, source: Places, destination: Places) -> None:
        """Run the layer over the hidden states at `source`, for the sequences of `destination`."""
        for number, place in destination.items():
            hidden = self.layer.hidden(source[number])
            self.layer.write(place, self.layer.call(number).run(self.layer.module, hidden))

    def _round_stage(self, number: int, stage: Stage, rounding: LayerRounding, fold: LayerFold) -> None:
        """Collect the inputs of a stage, and round the weights that read them."""
        if not any(module in rounding.parts for slot in stage.slots for module in slot):
            return
        if stage.outer is None:
            self._round_dense(number, stage, rounding, fold)
        else:
            self._round_experts(number, stage, rounding, fold)

    def _round_dense(self, number: int, stage: Stage, rounding: LayerRounding, fold: LayerFold) -> None:
        follows = self.walk.options.method.follows_quantized
        adding = None if stage.residual is None else rounding.weights[stage.slots[0][0]]
        accumulator = Accumulator(stage.width, drift=follows, adding=adding, device=self.walk.stack.device)
        held_out = Sample(HELD_OUT_ROWS, len(self.nearest))
        for sequence, (rows, _) in self._paired(number, stage, fold):
            (held_out if sequence >= self.walk.first_held_out else accumulator).add(rows)
        statistics = accumulator.finish()
        rounding.round_slot(stage.slots[0], statistics, held_out.rows(), {"tokens": statistics.tokens})

    def _round_experts(self, number: int, stage: Stage, rounding: LayerRounding, fold: LayerFold) -> None:
        follows = self.walk.options.method.follows_quantized
        held_out = [Sample(HELD_OUT_ROWS, len(self.nearest)) for _ in stage.slots]
        slots = SlotRows(self.rows, len(stage.slots))
        for sequence, (rows, experts) in self._paired(number, stage, fold):
            assert experts is not None
            if sequence < self.walk.first_held_out:
                slots.keep(rows, experts)
                continue
            for expert in experts.unique().tolist():
                held_out[expert].add(rows.pick(experts == expert))
        for slot, statistics, facts in slot_statistics(slots, stage.width, drift=follows):
            rounding.round_slot(stage.slots[slot], statistics, held_out[slot].rows(), facts)

    def _paired(self, number: int, stage: Stage, fold: LayerFold) -> Iterator[tuple[int, Any]]:
        """Yield for each sequence the inputs of a stage in both models, and the expert of each row."""
        for sequence in self.original:
            original = fold.scaled(number, self.reference.read(sequence, number))
            if self.walk.options.method.follows_quantized:
                hidden = self.layer.hidden(self.quantized[sequence])
                with self.closings.applied(sequence):
                    quantized = self.taps.read(stage, self.layer.call(sequence), hidden)
                self.closings.keep(number, sequence, quantized.inputs)
            elif stage.outer is False:
                routing = self.reference.read(sequence, number + 1)  # of the down projections: the same rows
                quantized = Reading(original.inputs[routing.tokens], routing.slots, routing.tokens)
            else:
                quantized = original
            yield sequence, pair(original, quantized, stage, sequence)
            self.walk.report(self.layer.index, stage.name, len(self.stages))
