"""The walk that rounds a model layer by layer with calibration text, with one layer in memory at a time.

Each layer runs over all batches of sequences in two streams of hidden states: through the original layers, and through
the layers as they are quantized so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import TensorFile
from minifloat.calibration.layerwise.walk import ORIGINAL, LayerWalk, LayerWork, OpenLayer
from minifloat.calibration.observe import KVObserver, head_amax
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.rounding.damage import (
    Divergence,
    KLMeans,
    measure_divergence,
    token_divergence,
)
from minifloat.quantize.rounding.layer import LayerRounding, PlannedWeights
from minifloat.quantize.rounding.layer_fold import FoldSample, LayerFold
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.output_moments import OutputMoments
from minifloat.quantize.rounding.stage_inputs import InputQuantizer, StageReader, StoredStageInputs, pair, routed
from minifloat.quantize.rounding.stages import FinishedModules, Stage, find_finished_modules, find_stages
from minifloat.quantize.rounding.statistics import (
    HELD_OUT_ROWS,
    Accumulator,
    ExpertRows,
    Rows,
    Sample,
    Statistics,
    divide,
    filled_statistics,
)
from minifloat.quantize.rounding.texts import SplitBatches, SplitText

#: Streams of hidden states beside `ORIGINAL`: through the layers as they are quantized so far, and, of the held-out
#: batches alone, through layers that are rounded to nearest.
QUANTIZED, NEAREST = "quantized", "nearest"


class RoundingWalk:
    """One run over all layers."""

    def __init__(
        self,
        stack: LayerStack,
        plan: QuantizationPlan,
        texts: SplitText,
        options: RoundingOptions,
        config: Mapping[str, Any],
        moments: OutputMoments,
        progress: Progress | None = None,
    ) -> None:
        self.moments = moments
        self.stack, self.options, self.progress = stack, options, progress
        self.texts = SplitBatches.of(texts, stack.batches)
        self.weights = PlannedWeights(plan, config, options.method, options.fold)
        self._passes = 0

    def run(self, work: LayerWork) -> None:
        """Round all layers that are not finished, then compare the models on held-out text."""
        if len(work.finished) > len(self.stack):
            return
        with LayerWalk(self.stack, self.texts.batches, work, self._streams, keep_last=True) as walk:
            walk.run(lambda layer: self._round_layer(walk, layer))
            with TensorFile(work.hidden(len(self.stack))) as hidden, self.stack.logits_in_float32():
                first = self.texts.first_chosen_on, self.texts.first_reported
                record: dict[str, Any] = {
                    "choosing": self._compare(walk, hidden, range(*first)).to_dict(),
                    "held_out": self._compare(walk, hidden, range(first[1], len(self.texts.batches))).to_dict(),
                }
                if seen := self._seen(walk, hidden):
                    record["seen"] = seen
        work.finish(len(self.stack), ArrayContent(record, {}))

    def _streams(self, number: int, hidden: Tensor) -> list[Hashable]:
        held_out = number >= self.texts.first_chosen_on
        streams: list[Hashable] = [ORIGINAL]
        if self.options.method.follows_quantized or self.options.kv_cache or held_out:
            streams.append(QUANTIZED)
        if held_out:
            streams.append(NEAREST)
        return streams

    def _round_layer(self, walk: LayerWalk, layer: OpenLayer) -> ArrayContent:
        self._passes = 0
        return _LayerRun(self, walk, layer).run()

    def _compare(self, walk: LayerWalk, hidden: TensorFile, numbers: range) -> Divergence:
        """Return how far the quantized model is from the original one on some held-out batches."""
        return measure_divergence(self._logits(walk, hidden, numbers, ORIGINAL, NEAREST, QUANTIZED))

    @torch.inference_mode()
    def _seen(self, walk: LayerWalk, hidden: TensorFile) -> dict[str, Any]:
        """Return the KL divergence on as much of the text that codes were chosen with as is reported on."""
        both = [number for number in range(self.texts.first_chosen_on) if number in walk.places[QUANTIZED]]
        step = max(len(both) // (len(self.texts.batches) - self.texts.first_reported), 1)
        found = KLMeans()
        for logits in self._logits(walk, hidden, both[::step], ORIGINAL, QUANTIZED):
            found.add(token_divergence(*logits)[0][None])
        return {"tokens": found.total, "method": found.mean, "method_error": found.error} if both else {}

    def _logits(
        self, walk: LayerWalk, hidden: TensorFile, numbers: Iterable[int], *streams: str
    ) -> Iterator[Iterator[Tensor]]:
        """Yield for each sequence of some batches its logits in each stream."""
        for number in numbers:
            states = [hidden.read(walk.places[stream][number]) for stream in streams]
            yield from self.stack.logits_of(self.texts.batches[number], states)

    def report(self, index: int, what: str, stages: int) -> None:
        """Report that one batch went through a part of a layer."""
        self._passes += 1
        if self.progress is not None:
            passes = stages * self.texts.first_reported + 2 * len(self.texts.batches)
            done = index * passes + min(self._passes, passes)
            self.progress(done, passes * len(self.stack), f"layer {index + 1} of {len(self.stack)}, {what}")


class _LayerRun:
    def __init__(self, walk: RoundingWalk, layers: LayerWalk, layer: OpenLayer) -> None:
        self.walk, self.layer, self.model = walk, layer, walk.stack.model
        self.original, self.quantized, self.nearest = (
            layers.places[stream] for stream in (ORIGINAL, QUANTIZED, NEAREST)
        )
        self.reference, self.rows = StoredStageInputs(layer.scratch("reference")), layer.scratch("rows")
        call, hidden = layer.call(0), layer.hidden(self.original[0])
        self.stages = find_stages(self.model, layer.path, layer.module, layer.sites, call, hidden)
        finished = find_finished_modules(self.model, layer.path, layer.module, self.stages, call, hidden)
        self.finished = FinishedModules(self.model, finished, layer.scratch("closings"))
        self.reader = StageReader(self.model, layer.module, self.stages)
        self.kv: dict[str, tuple[Tensor, Tensor]] = {}

    def run(self) -> ArrayContent:
        """Round the layer, write the hidden states behind it, and return its codes."""
        rounding = self._rounding()
        inputs = InputQuantizer(self.model, self.stages, rounding.parts)
        self._run_original(inputs)
        with inputs.applied():
            self._run_nearest(rounding)
        rounding = self._rounding()  # with views of the restored weights
        fold = self._fold()
        inputs.fold(fold.by_expert)
        rounding.measure()
        if self.walk.options.method.weighs_outputs:
            rounding.moments = fold.moments(self.walk.moments.of(rounding.parts.keys() - fold.rescaled))
        self.reader.quantize_expert = inputs.quantize_expert
        with inputs.applied():
            for number, stage in enumerate(self.stages):
                self._round_stage(number, stage, rounding, fold)
            self._run_quantized()
        kv = [{"module": name, "k": k.tolist(), "v": v.tolist()} for name, (k, v) in self.kv.items()]
        return self.walk.weights.result(rounding, fold, inputs=inputs.rows(), kv=kv)

    def _rounding(self) -> LayerRounding:
        """Return the weights of the layer that are to be rounded, with views of them in the model."""
        views = self.walk.weights.views(self.walk.stack, self.layer.index)
        return self.walk.weights.rounding(views, self.stages)

    def _fold(self) -> LayerFold:
        """Fold scales of input channels, if the options say so, and return what was folded."""
        sample = FoldSample(self.reference, self.stages, self.walk.texts)
        views = self.walk.weights.views(self.walk.stack, self.layer.index)
        return self.walk.weights.fold(self.layer.index, views, self.stages, sample)

    def _run_original(self, inputs: InputQuantizer) -> None:
        """Run the original layer over every batch, and keep the inputs of its stages on disk."""
        for number, place in self.original.items():
            output, stage_inputs = self.reader.read_all(self.layer.call(number), self.layer.hidden(place))
            self.layer.write(place, output)
            if number < self.walk.texts.first_reported:
                self.reference.keep(number, stage_inputs)
            if number < self.walk.texts.first_chosen_on:
                for stage, stage_input in enumerate(stage_inputs):
                    inner = self.stages[stage].outer is False
                    inputs.observe(stage, routed(stage_input, stage_inputs[stage + 1]) if inner else stage_input)
            self.walk.report(self.layer.index, "original", len(self.stages))

    def _run_nearest(self, rounding: LayerRounding) -> None:
        """Run the layer, rounded to nearest, over the held-out batches; then restore its weights."""
        rounding.measure()
        rounding.round_to_nearest()
        for number, place in self.nearest.items():
            self.layer.write(place, self.layer.call(number).run(self.layer.module, self.layer.hidden(place)))
        with torch.inference_mode(False):
            self.walk.stack.weights.fill(self.layer.index)

    def _run_quantized(self) -> None:
        """Run the quantized layer over the batches of its stream, and record the ranges of K and V if asked to."""
        with ExitStack() as stack:
            if self.walk.options.kv_cache:
                stack.enter_context(KVObserver(self.model, self._observe_kv))
            for number, place in self.quantized.items():
                hidden = self.layer.hidden(place)
                with nullcontext() if self.walk.options.kv_cache else self.finished.applied(number, hidden):
                    self.layer.write(place, self.layer.call(number).run(self.layer.module, hidden))
                self.walk.report(self.layer.index, "quantized", len(self.stages))

    def _observe_kv(self, path: str, key: Tensor, value: Tensor) -> None:
        name = self.layer.sites.attention_name(path)
        k, v = head_amax(key).cpu(), head_amax(value).cpu()
        if name in self.kv:
            k, v = torch.maximum(k, self.kv[name][0]), torch.maximum(v, self.kv[name][1])
        self.kv[name] = k, v

    def _round_stage(self, number: int, stage: Stage, rounding: LayerRounding, fold: LayerFold) -> None:
        """Collect the inputs of a stage, and round the weights that read them."""
        if not any(module in rounding.parts for expert in stage.experts for module in expert):
            return
        follows = self.walk.options.method.follows_quantized
        paired = self._paired(number, stage, fold)
        chosen_on = self.walk.texts.first_chosen_on
        samples = [Sample(HELD_OUT_ROWS, self.walk.texts.first_reported - chosen_on) for _ in stage.experts]
        found: Iterable[tuple[int, Statistics, dict[str, Any]]]
        if stage.outer is None:
            adding = None if stage.residual is None else rounding.weights[stage.experts[0][0]]
            accumulator = Accumulator(stage.width, drift=follows, adding=adding, device=self.walk.stack.device)
            divide(paired, accumulator, samples, chosen_on)
            statistics = accumulator.finish()
            found = [(0, statistics, {"tokens": statistics.tokens})]
        else:
            experts = ExpertRows(self.rows, len(stage.experts))
            divide(paired, experts, samples, chosen_on)
            found = filled_statistics(experts, stage.width, drift=follows)
        for expert, statistics, facts in found:
            rounding.round_group(stage.experts[expert], statistics, samples[expert].rows(), facts)

    def _paired(self, number: int, stage: Stage, fold: LayerFold) -> Iterator[tuple[int, Rows, Tensor | None]]:
        """Yield for each batch that is not only reported the inputs of a stage in both models, and its experts."""
        for batch in range(self.walk.texts.first_reported):
            original = fold.scaled(number, self.reference.read(batch, number))
            if self.walk.options.method.follows_quantized:
                hidden = self.layer.hidden(self.quantized[batch])
                with self.finished.applied(batch, hidden):
                    quantized = self.reader.read(stage, self.layer.call(batch), hidden)
                self.finished.keep(number, batch, quantized.inputs)
            elif stage.outer is False:
                quantized = routed(original, self.reference.read(batch, number + 1))
            else:
                quantized = original
            yield batch, *pair(original, quantized, stage, self.walk.texts.name(batch))
            self.walk.report(self.layer.index, stage.name, len(self.stages))
