"""Measures before anything is rounded what rounding all weights of a model costs, without and with their inputs.

Streams of hidden states go through the original layers, through layers with weights rounded to nearest, and through
those with rounded inputs too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
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
from minifloat.quantize.rounding.damage import KLMeans, token_divergence
from minifloat.quantize.rounding.layer import PlannedWeights
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.rounded_model import LAYER_FORMAT
from minifloat.quantize.rounding.stage_inputs import InputQuantizer
from minifloat.quantize.rounding.stages import find_stages

#: Streams of hidden states beside `ORIGINAL`: all weights rounded to nearest, and all inputs too.
WEIGHTS, INPUTS = "weights", "inputs too"


@dataclass(frozen=True)
class Loss:
    """What a change of the model costs, as means over tokens."""

    kl: float  # KL divergence from the original model, in nats
    disagreement: float  # share of tokens whose most probable next token is another


@contextmanager
def measured_losses(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    text: CalibrationSet,
    options: RoundingOptions,
    work_dir: Path,
    progress: Progress | None = None,
) -> Iterator[dict[str, Loss]]:
    """Measure the loss of each stream, by name."""
    with layers_required(checkpoint, "quantize it with --scheme"):
        model = CalibrationModel(checkpoint, CalibrateOptions(device=options.device))
        loader = model.loader()
        check_data(loader.model, text, text)
        stack = LayerStack(model, loader, options.max_memory)
        schemes = {name: repr(scheme) for name, scheme in plan.modules.items()}
        with LayerWork(work_dir, run_fingerprint(loader, text, "inputs", schemes), LAYER_FORMAT) as folder:
            _InputWalk(stack, plan, text, options, checkpoint.config, progress).run(folder)
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
        options: RoundingOptions,
        config: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        self.stack, self.batches, self.progress = stack, stack.batches(text.sequences), progress
        self.weights = PlannedWeights(plan, config, options.method, folds=False)

    def run(self, work: LayerWork) -> None:
        """Run the layers that are not finished, then compare both streams with the original one."""
        if len(work.finished) > len(self.stack):
            return
        with LayerWalk(self.stack, self.batches, work, self._streams, keep_last=True) as walk:
            walk.run(lambda layer: self._run_layer(walk, layer))
            with TensorFile(work.hidden(len(self.stack))) as hidden, self.stack.logits_in_float32():
                losses = {name: asdict(loss) for name, loss in self._compare(walk, hidden).items()}
        work.finish(len(self.stack), ArrayContent({"losses": losses}, {}))

    def _streams(self, _: int, __: Tensor) -> list[Hashable]:
        return [ORIGINAL, WEIGHTS, INPUTS]

    def _run_layer(self, walk: LayerWalk, layer: OpenLayer) -> ArrayContent:
        first = layer.hidden(walk.places[ORIGINAL][0])
        found = find_stages(self.stack.model, layer.path, layer.module, layer.sites, layer.call(0), first)
        rounding = self.weights.rounding(self.weights.views(self.stack, layer.index), found)
        self._run_stream(layer, walk.places[ORIGINAL])
        rounding.measure()
        rounding.round_to_nearest()
        self._run_stream(layer, walk.places[WEIGHTS])
        with InputQuantizer(self.stack.model, found, rounding.parts).applied():
            self._run_stream(layer, walk.places[INPUTS])
        if self.progress is not None:
            self.progress(layer.index + 1, len(self.stack), f"layer {layer.index + 1} of {len(self.stack)}")
        return ArrayContent({}, {})

    def _run_stream(self, layer: OpenLayer, places: Mapping[int, StoredTensor]) -> None:
        for number, place in places.items():
            layer.write(place, layer.call(number).run(layer.module, layer.hidden(place)))

    def _compare(self, walk: LayerWalk, hidden: TensorFile) -> dict[str, Loss]:
        means = {name: (KLMeans(), KLMeans()) for name in (WEIGHTS, INPUTS)}
        for number, batch in enumerate(self.batches):
            states = [hidden.read(walk.places[name][number]) for name in (ORIGINAL, *means)]
            for logits in self.stack.logits_of(batch, states):
                original = next(logits)
                for (kl, changed), candidate in zip(means.values(), logits, strict=True):
                    divergences, differs = token_divergence(original, candidate)
                    kl.add(divergences[None])
                    changed.add(differs[None])
        return {name: Loss(kl.mean, changed.mean) for name, (kl, changed) in means.items()}
