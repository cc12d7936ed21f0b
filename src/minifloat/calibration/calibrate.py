"""A calibration from text sources to files: what `minifloat calibrate` and `quantize --calibration` run.

A fraction of the sequences is held out: the scales come from the other sequences, and the histograms of the held-out
ones show how much those scales would saturate (`calibration.result`).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from minifloat.calibration.data import CalibrationSet, SourceLike, as_sources, load_calibration_data
from minifloat.calibration.layerwise.calls import LayersNotSeparableError
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.walk import ORIGINAL, LayerWalk, LayerWork, OpenLayer
from minifloat.calibration.model import CalibrationModel, calibrate_whole, check_data
from minifloat.calibration.observe import Observer
from minifloat.calibration.options import DEFAULT_OPTIONS, DEFAULT_TEXT, CalibrateOptions, TextOptions
from minifloat.calibration.own_text import write_own_text
from minifloat.calibration.readers import OWN_TEXT, Source
from minifloat.calibration.result import STATS_FORMAT, Calibration, decode_stats, encode_stats
from minifloat.calibration.rules import HistogramRule, parse_rule
from minifloat.calibration.stats import ActivationStats
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.layouts.decoded import plain_view
from minifloat.model.runtime.config import plain_config, read_generation_config
from minifloat.model.runtime.tokenizer import has_tokenizer, load_tokenizer, token_id_tokenizer

_LOG = logging.getLogger(__name__)


def calibrate_layerwise(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Observe a model on calibration text, with the weights of one layer in memory at a time."""
    with ExitStack() as stack:
        loader = model.loader()
        check_data(loader.model, data)
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
                    with LayerWalk(layers, [(sequence,) for sequence in data.sequences], work) as walk:
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


@contextmanager
def open_source(model: str | os.PathLike[str], options: CalibrateOptions) -> Iterator[Checkpoint]:
    """Open a model, or the plain view of a quantized one."""
    with Checkpoint.open(model_folder(model, revision=options.revision)) as stored:
        yield plain_view(stored) if options.from_quantized else stored


def calibrate_set(
    model: str | os.PathLike[str],
    data: CalibrationSet,
    options: CalibrateOptions = DEFAULT_OPTIONS,
    progress: Progress | None = None,
) -> ActivationStats:
    """Return the statistics of a model's activations on text that is tokens already."""
    with open_source(model, options) as checkpoint:
        return calibrate_opened(CalibrationModel(checkpoint, options), data, options, progress)


def calibrate_opened(
    model: CalibrationModel, data: CalibrationSet, options: CalibrateOptions, progress: Progress | None = None
) -> ActivationStats:
    """Return the statistics of an open model's activations, as `calibrate_set`; several runs may share the model."""
    if options.max_memory is None or model.weight_bytes <= options.max_memory:
        return calibrate_whole(model, data, options, progress)
    if options.until_stable is not None:
        _LOG.warning("layers run one after the other over all of the data: the run cannot stop when scales settle")
    return calibrate_layerwise(model, data, options, progress)


def load_texts(
    checkpoint: Checkpoint,
    sources: SourceLike | Sequence[SourceLike],
    text: TextOptions = DEFAULT_TEXT,
    *,
    own_text_file: Path | None = None,
    weights: Path | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> CalibrationSet:
    """Return the sequences of all sources, mixed by weight, held-out ones included."""
    tokenizer = _tokenizer(checkpoint, sources)

    def own_text(samples: int) -> CalibrationSet:
        return write_own_text(
            checkpoint,
            tokenizer,
            replace(text, samples=samples),
            file=own_text_file,
            weights=weights,
            device=device,
            progress=progress,
        )

    return load_calibration_data(sources, tokenizer, text, own_text)


def _tokenizer(checkpoint: Checkpoint, sources: SourceLike | Sequence[SourceLike]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, or a stand-in if it has none and writes all of the text itself."""
    if has_tokenizer(checkpoint.path) or as_sources(sources) != [Source(OWN_TEXT)]:
        return load_tokenizer(checkpoint.path)
    return token_id_tokenizer(plain_config(checkpoint).get_text_config(), read_generation_config(checkpoint))


def calibrate(
    model: str | os.PathLike[str],
    sources: SourceLike | Sequence[SourceLike],
    options: CalibrateOptions = DEFAULT_OPTIONS,
    *,
    progress: Progress | None = None,
) -> Calibration:
    """Run text through an unquantized model and return the statistics of its linears and KV caches.

    Args:
        model: An unquantized model: a folder or a model of the hub; with `from_quantized` a quantized one.
        sources: One or several files, folders or data sets, or ``self`` for text that the model itself writes; a string
            is parsed by `Source.parse`.
        options: How text becomes sequences, how the model runs, and what is recorded. Histograms of the held-out text
            are always recorded. With a `work_dir`, the same call continues after an interruption.
        progress: Called after each sequence, and after each step while the model writes the source ``self``.

    Returns:
        What `quantize_checkpoint` takes as `calibration`, and what `Calibration.save` writes.

    Raises:
        DataError: The text is missing, too short, or does not fit the model.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        AlreadyQuantizedError: The model is quantized, and `from_quantized` is False.
        NonFiniteError: An activation holds NaN or Inf; names module and sequence.
        UnknownNameError: There is no such rule.
    """
    rule = parse_rule(options.rule) if isinstance(options.rule, str) else options.rule
    histogram = options.histogram or isinstance(rule, HistogramRule)
    run_kept = replace(options, histogram=histogram, work_dir=_work_dir(options, "calibration"))
    run_held_out = replace(options, histogram=True, until_stable=None, work_dir=_work_dir(options, "held-out"))
    with open_source(model, options) as checkpoint:
        opened = CalibrationModel(checkpoint, options)
        data = load_texts(
            checkpoint,
            sources,
            options,
            own_text_file=options.own_text_file,
            device=options.device,
            progress=progress,
        )
        kept, held_out = data.held_out(options.held_out) if options.held_out else (data, None)
        stats = calibrate_opened(opened, kept, run_kept, progress)
        tests = None if held_out is None else calibrate_opened(opened, held_out, run_held_out, progress)
        return Calibration(stats, rule, tests, options.max_saturation)


def _work_dir(options: CalibrateOptions, part: str) -> Path | None:
    """Return the work folder of the calibration or of the held-out run."""
    return None if options.work_dir is None else options.work_dir.with_name(f"{options.work_dir.name}.{part}")
