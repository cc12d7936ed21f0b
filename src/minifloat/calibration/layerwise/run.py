"""Run a model layer by layer over the calibration set, with the weights of one layer in memory at a time.

The statistics equal those of a run of the whole model to the bit, because every layer gets the same numbers in another
order. A model whose layers cannot run one at a time is calibrated whole, with a warning that states the reason.
"""

from __future__ import annotations

import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import LayersNotSeparableError
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.walk import ORIGINAL, LayerWalk, OpenLayer
from minifloat.calibration.layerwise.work_folder import LayerWork
from minifloat.calibration.model import CalibrationModel, calibrate_whole, check_data
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.stats_file import STATS_FORMAT, decode_stats, encode_stats
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError

_LOG = logging.getLogger(__name__)


def calibrate_layerwise(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Observe a model on calibration text, with the weights of one layer in memory at a time."""
    with ExitStack() as stack:
        loader = model.loader()
        check_data(data, loader.model.config.get_text_config().vocab_size)
        work_dir = options.work_dir
        if work_dir is None:
            parent = stack.enter_context(tempfile.TemporaryDirectory(prefix="minifloat-"))
            work_dir = Path(parent) / "work"
        try:
            layers = LayerStack(model, loader, options.max_memory)
            facts = {"histogram": options.histogram, "per_channel": options.per_channel}
            work = stack.enter_context(LayerWork(work_dir, run_fingerprint(loader, data, facts), STATS_FORMAT))
            try:
                if len(work.finished) < len(layers):
                    with LayerWalk(layers, data.sequences, work) as walk:
                        walk.run(_Observation(walk, model, data, options, progress).run_layer)
            except LayersNotSeparableError:
                work.remove()
                raise
            except UsageError:  # the embeddings do not fit
                if not work.finished:
                    work.remove()
                raise
            parts = [decode_stats(file) for file in work.finished]
            inputs = {name: stats for part in parts for name, stats in part.inputs.items()}
            kv = {name: stats for part in parts for name, stats in part.kv.items()}
            work.remove()
            return ActivationStats(model.identity, len(data.sequences), data.tokens, data.record, inputs, kv)
        except LayersNotSeparableError as error:
            reason = str(error)
    _LOG.warning(
        "%s cannot be calibrated layer by layer, because %s: the whole model is loaded, more than max_memory allows",
        loader.model.__class__.__name__,
        reason,
    )
    return calibrate_whole(model, data, options, progress)


class _Observation:
    """Observes each layer of a walk."""

    def __init__(
        self,
        walk: LayerWalk,
        model: CalibrationModel,
        data: CalibrationSet,
        options: CalibrateOptions,
        progress: Progress | None,
    ) -> None:
        self.walk, self.identity, self.data, self.progress = walk, model.identity, data, progress
        self.recorded: dict[str, Any] = {"histogram": options.histogram, "per_channel": options.per_channel}

    def run_layer(self, layer: OpenLayer) -> ArrayContent:
        """Run a layer over all sequences, and return its statistics."""
        layers, data = len(self.walk.stack), self.data
        done = layer.index * data.tokens
        with Observer(self.walk.stack.model, sites=layer.sites, **self.recorded) as observer:
            for number, place in self.walk.places[ORIGINAL].items():
                with observer.sequence(number):
                    output = layer.call(number).run(layer.module, layer.hidden(place))
                layer.write(place, output)
                done += len(data.sequences[number])
                if self.progress is not None:
                    step = f"layer {layer.index + 1} of {layers}, sequence {number + 1}"
                    self.progress(done, layers * data.tokens, step)
        stats = ActivationStats(self.identity, len(data.sequences), data.tokens, {}, observer.inputs(), observer.kv())
        return encode_stats(stats)
