"""Measures before anything is rounded what rounding the inputs of linears costs, in all of them and group by group.

Streams of hidden states go through the original layers. In the stream of a group its inputs alone are rounded; in two
more all weights are rounded to nearest, in one of them all inputs too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import layers_required
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.storage import StoredTensor, TensorFile
from minifloat.calibration.layerwise.walk import ORIGINAL, LayerWalk, LayerWork, OpenLayer
from minifloat.calibration.model import CalibrationModel, check_data
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.quantize.rounding.damage import KLMeans, Places, token_divergence
from minifloat.quantize.rounding.layer import PlannedWeights
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT, layer_content
from minifloat.quantize.rounding.stage_inputs import InputQuantizer
from minifloat.quantize.rounding.stages import Stage, find_stages


@dataclass(frozen=True)
class Loss:
    """What a change of the model costs, as means over tokens."""

    kl: float  # KL divergence from the original model, in nats
    disagreement: float  # share of tokens whose most probable next token is another


@dataclass(frozen=True)
class Stream:
    """How a stream of hidden states differs from the original model."""

    name: str
    modules: frozenset[str]  # whose inputs are rounded
    nearest: bool = False  # whether all weights are rounded to nearest


@contextmanager
def measured_losses(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    text: CalibrationSet,
    streams: Sequence[Stream],
    options: RoundingOptions,
    work_dir: Path,
    progress: Progress | None = None,
) -> Iterator[dict[str, Loss]]:
    """Measure the loss of each stream, by name; those that no layer changes are left out."""
    with layers_required(checkpoint, "quantize it with --scheme"):
        model = CalibrationModel(checkpoint, CalibrateOptions(device=options.device))
        loader = model.loader()
        check_data(loader.model, text, text)
        stack = LayerStack(model, loader, options.max_memory)
        schemes = {name: repr(scheme) for name, scheme in plan.modules.items()}
        named = {stream.name: [sorted(stream.modules), stream.nearest] for stream in streams}
        fingerprint = run_fingerprint(loader, text, {"inputs": named, "modules": schemes})
        with LayerWork(work_dir, fingerprint, LAYER_FORMAT) as folder:
            _InputWalk(stack, plan, text, streams, options, checkpoint.config, progress).run(folder)
            record = folder.finished[-1].record["losses"]
            yield {name: Loss(**loss) for name, loss in record.items()}
            folder.remove()


class _InputWalk:
    """One run over all layers."""

    def __init__(
        self,
        stack: LayerStack,
        plan: QuantizationPlan,
        text: CalibrationSet,
        streams: Sequence[Stream],
        options: RoundingOptions,
        config: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        self.stack, self.sequences, self.progress = stack, text.sequences, progress
        self.weights = PlannedWeights(plan, config, options.method, folds=False)
        self.streams = sorted(streams, key=lambda stream: stream.nearest)
        self.started: set[str] = set()

    def run(self, work: LayerWork) -> None:
        """Run the layers that are not finished, then compare all streams with the original one."""
        if len(work.finished) > len(self.stack):
            return
        self.started = {name for file in work.finished for name in file.record["started"]}
        with LayerWalk(self.stack, self.sequences, work, self._streams, keep_last=True) as walk:
            walk.run(lambda layer: self._run_layer(walk, layer))
            with TensorFile(work.hidden(len(self.stack))) as hidden, self.stack.logits_in_float32():
                losses = {name: asdict(loss) for name, loss in self._compare(walk, hidden).items()}
        work.finish(len(self.stack), layer_content({}, {"losses": losses}))

    def _streams(self, _: int, __: Tensor) -> list[Hashable]:
        return [ORIGINAL, *(stream.name for stream in self.streams)]

    def _run_layer(self, walk: LayerWalk, layer: OpenLayer) -> ArrayContent:
        original = walk.places[ORIGINAL]
        self._run_stream(layer, original, original)
        found = find_stages(
            self.stack.model, layer.path, layer.module, layer.sites, layer.call(0), layer.hidden(original[0])
        )
        rounding = self.weights.rounding(self.weights.views(self.stack, layer.index), found)
        inputs = InputQuantizer(self.stack.model, found, rounding.parts)
        new, nearest = [], False
        for stream in self.streams:
            if stream.nearest and not nearest:
                rounding.measure()
                rounding.round_to_nearest()
                nearest = True
            changed = _stages_of(stream, found)
            if stream.name not in self.started:
                if not (changed or (stream.nearest and rounding.parts)):
                    continue
                new.append(stream.name)
            source = original if stream.name in new else walk.places[stream.name]
            with inputs.applied(changed):
                self._run_stream(layer, source, walk.places[stream.name])
        self.started.update(new)
        if self.progress is not None:
            self.progress(layer.index + 1, len(self.stack), f"layer {layer.index + 1} of {len(self.stack)}")
        return layer_content({}, {"started": new})

    def _run_stream(self, layer: OpenLayer, source: Places, destination: Places) -> None:
        for number, place in destination.items():
            layer.write(place, layer.call(number).run(layer.module, layer.hidden(source[number])))

    def _compare(self, walk: LayerWalk, hidden: TensorFile) -> dict[str, Loss]:
        started = [stream.name for stream in self.streams if stream.name in self.started]
        means = {name: (KLMeans(), KLMeans()) for name in started}
        for number, sequence in enumerate(self.sequences):
            places: list[StoredTensor] = [walk.places[name][number] for name in (ORIGINAL, *means)]
            logits = self.stack.logits_of(sequence, map(hidden.read, places))
            original = next(logits)
            for (kl, changed), candidate in zip(means.values(), logits, strict=True):
                divergences, differs = token_divergence(original, candidate)
                kl.add(divergences[None])
                changed.add(differs[None])
        return {name: Loss(kl.mean, changed.mean) for name, (kl, changed) in means.items()}


def _stages_of(stream: Stream, stages: Sequence[Stage]) -> set[int]:
    """Return the numbers of the stages whose inputs a stream rounds."""
    return {
        number
        for number, stage in enumerate(stages)
        if any(module in stream.modules for expert in stage.experts for module in expert)
    }
