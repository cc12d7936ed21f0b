"""The walk that stores the Hessians of a model: layer by layer through the original model, without any rounding.

It takes the same sums over the same rows as `minifloat.quantize.rounding.walk` with the method gptq, so that codes from
stored Hessians are those of a run with the text.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minifloat.calibration.calibrate import open_source
from minifloat.calibration.data import CalibrationSet, SourceLike
from minifloat.calibration.layerwise.calls import layers_required
from minifloat.calibration.layerwise.layer_stack import LayerStack, run_fingerprint
from minifloat.calibration.layerwise.storage import TensorFile
from minifloat.calibration.layerwise.walk import ORIGINAL, LayerWalk, LayerWork, OpenLayer
from minifloat.calibration.model import CalibrationModel, check_data
from minifloat.calibration.options import DEFAULT_OPTIONS, CalibrateOptions
from minifloat.calibration.stats import ModelIdentity
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent
from minifloat.checkpoint.files import storage_errors, sync_folder
from minifloat.checkpoint.progress import Progress
from minifloat.errors import DestinationError, StatsError
from minifloat.model.runtime.load import Loader
from minifloat.quantize.amount import require_enough, require_tokens
from minifloat.quantize.own_text import prepare_texts
from minifloat.quantize.rounding.layer_fold import FoldSample
from minifloat.quantize.rounding.saved import (
    HESSIANS_FORMAT,
    SavedHessians,
    fold_sample_name,
    layer_hessians,
    layer_path,
    pack_symmetric,
)
from minifloat.quantize.rounding.stage_inputs import StageReader, StoredStageInputs, largest_inputs, pair
from minifloat.quantize.rounding.stages import Stage, find_stages
from minifloat.quantize.rounding.statistics import (
    HELD_OUT_ROWS,
    Accumulator,
    ExpertRows,
    Rows,
    Sample,
    Statistics,
    divide,
    own_statistics,
)
from minifloat.quantize.rounding.texts import SplitText

_WORK_SUFFIX = ".minifloat-work"
#: What to do with a model whose layers do not run one at a time.
_WITHOUT = "calibrate without --hessians"


def save_hessians(
    model: str | os.PathLike[str],
    sources: SourceLike | Sequence[SourceLike],
    folder: Path,
    options: CalibrateOptions,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SavedHessians:
    """Run text through an unquantized model, and store the Hessians of its linears."""
    with open_source(model, options) as checkpoint, layers_required(checkpoint, _WITHOUT):
        opened = _Opened.of(checkpoint, options)
        require_enough(options, opened.width, "(--samples)")
        data = prepare_texts(
            checkpoint, sources, options, options.own_text_file, device=options.device, progress=progress
        )
        texts = SplitText.of(data, options.held_out)
        return _collected(opened, texts, folder, data, overwrite=overwrite, progress=progress)


def collect_hessians(
    checkpoint: Checkpoint,
    texts: SplitText,
    folder: Path,
    run: CalibrateOptions = DEFAULT_OPTIONS,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SavedHessians:
    """Store the Hessians of an open model, as `save_hessians` does with text that is tokens already."""
    with layers_required(checkpoint, _WITHOUT):
        return _collected(_Opened.of(checkpoint, run), texts, folder, overwrite=overwrite, progress=progress)


@dataclass(frozen=True)
class _Opened:
    """A model without weights."""

    loader: Loader
    stack: LayerStack

    @classmethod
    def of(cls, checkpoint: Checkpoint, run: CalibrateOptions) -> _Opened:
        model = CalibrationModel(checkpoint, run)
        loader = model.loader()
        return cls(loader, LayerStack(model, loader, run.max_memory))

    @property
    def width(self) -> int:
        """The largest number of input channels of a linear."""
        widths = [site.width for site in self.stack.sites.linears]
        widths += [max(site.inner_width, site.outer_width) for site in self.stack.sites.experts]
        return max(widths, default=0)


def _collected(
    model: _Opened,
    texts: SplitText,
    folder: Path,
    data: CalibrationSet | None = None,
    *,
    overwrite: bool,
    progress: Progress | None,
) -> SavedHessians:
    loader, stack = model.loader, model.stack
    check_data(loader.model, texts.kept, texts.choosing)
    used = CalibrationSet(texts.sequences[: texts.first_reported])
    fingerprint = run_fingerprint(loader, used, "hessians", texts.first_chosen_on)
    if (done := _finished(folder, fingerprint, overwrite=overwrite)) is not None:
        return done
    require_tokens(texts.kept.tokens, model.width)
    work = folder.with_name(folder.name + _WORK_SUFFIX)
    _take_back(folder, work)
    with LayerWork(work, fingerprint, HESSIANS_FORMAT) as opened:
        if len(opened.finished) < len(stack):
            with LayerWalk(stack, used.sequences, opened) as walk:
                walk.run(_Collection(walk, texts, progress).run_layer)
        layers = tuple(layer.digest for layer in opened.finished)
        _move_layers(opened, folder, len(layers))
        record, identity = dict((data or used).record), ModelIdentity.of(loader.checkpoint)
        saved = SavedHessians(folder, identity, fingerprint, record, texts.kept.tokens, layers)
        saved.save()
        opened.remove()
    return saved


def _finished(folder: Path, fingerprint: str, *, overwrite: bool) -> SavedHessians | None:
    """Return the Hessians that the same run stored before; None if they are to be collected."""
    if not SavedHessians.exist(folder):
        return None
    try:
        saved = SavedHessians.load(folder)
        if saved.run == fingerprint:
            for index in range(len(saved.layers)):
                saved.layer(index)
            return saved
    except StatsError:
        if not overwrite:
            raise
    if not overwrite:
        raise DestinationError(
            f"{folder}: holds the Hessians of another model, text or version; choose another name or use --overwrite"
        )
    SavedHessians.discard(folder)
    return None


def _take_back(folder: Path, work: Path) -> None:
    """Move the layers of a run that was killed while it completed the folder back to its work."""
    for file in sorted(folder.glob("layer-*.safetensors")):
        with storage_errors(file, "move"):
            if work.is_dir() and not work.is_symlink() and not (work / file.name).exists():
                file.replace(work / file.name)
            else:
                file.unlink()


def _move_layers(work: LayerWork, folder: Path, layers: int) -> None:
    with storage_errors(folder, "create it"):
        folder.mkdir(exist_ok=True)
    for index in range(layers):
        with storage_errors(work.results(index), "move"):
            work.results(index).replace(layer_path(folder, index))
    sync_folder(folder)


class _Collection:
    """Takes the Hessians of each layer of a walk through the original model."""

    def __init__(self, walk: LayerWalk, texts: SplitText, progress: Progress | None) -> None:
        self.walk, self.texts, self.progress = walk, texts, progress
        self.sequences, self.chosen_on = walk.sequences, texts.first_chosen_on

    def run_layer(self, layer: OpenLayer) -> ArrayContent:
        """Run one layer, write the hidden states behind it, and return what is stored of it."""
        model, places = self.walk.stack.model, self.walk.places[ORIGINAL]
        stage_inputs = StoredStageInputs(layer.scratch("reference"))
        stages = find_stages(model, layer.path, layer.module, layer.sites, layer.call(0), layer.hidden(places[0]))
        reader = StageReader(model, layer.module, stages)
        for number, place in places.items():
            output, found = reader.read_all(layer.call(number), layer.hidden(place))
            layer.write(place, output)
            stage_inputs.keep(number, found)
            self._report(layer.index, number)
        return self._store(stages, stage_inputs, layer.scratch("rows"))

    def _store(self, stages: Sequence[Stage], stage_inputs: StoredStageInputs, rows: TensorFile) -> ArrayContent:
        tensors: dict[str, Tensor] = {}
        all_tokens: list[list[int]] = []
        sample = FoldSample(stage_inputs, stages, self.texts)
        for number, stage in enumerate(stages):
            samples = [Sample(HELD_OUT_ROWS, len(self.texts.choosing.sequences)) for _ in stage.experts]
            all_tokens.append([])
            for expert, own in self._moments(number, stage, stage_inputs, rows, samples):
                tensors[f"hessian.{number}.{expert}"] = pack_symmetric(own.hessian)
                all_tokens[-1].append(own.tokens)
            for expert, kept in enumerate(samples):
                if (held_out := kept.rows()) is not None:
                    tensors[f"held_out.{number}.{expert}"] = _compact(held_out.inputs, self.walk.stack.model.dtype)
            for expert in range(len(stage.experts)) if stage.outer else [0]:
                for part in (False, True):
                    if (chosen := sample(number, expert, part)) is not None:
                        tensors[fold_sample_name(number, expert, part)] = _compact(chosen, self.walk.stack.model.dtype)
            tensors |= self._largest(number, stage, stage_inputs)
        return layer_hessians(stages, all_tokens, tensors)

    def _moments(
        self, number: int, stage: Stage, stage_inputs: StoredStageInputs, file: TensorFile, samples: Sequence[Sample]
    ) -> Iterator[tuple[int, Statistics]]:
        """Yield the statistics of each expert of a stage, and fill the held-out samples."""
        paired = (self._row(sequence, number, stage, stage_inputs) for sequence in range(len(self.sequences)))
        if stage.outer is None:
            accumulator = Accumulator(stage.width)
            divide(paired, accumulator, samples, self.chosen_on)
            yield 0, accumulator.finish()
        else:
            experts = ExpertRows(file, len(stage.experts))
            divide(paired, experts, samples, self.chosen_on)
            yield from own_statistics(experts, stage.width, drift=False)

    def _row(
        self, sequence: int, number: int, stage: Stage, stage_inputs: StoredStageInputs
    ) -> tuple[int, Rows, Tensor | None]:
        own = stage_inputs.read(sequence, number)
        return sequence, *pair(own, stage_inputs.read_routed(sequence, number, stage), stage, sequence)

    def _largest(self, number: int, stage: Stage, stage_inputs: StoredStageInputs) -> dict[str, Tensor]:
        """Return the largest input of each channel of each expert in the text that is not held out."""
        tensors: dict[str, Tensor] = {}
        for sequence in range(self.chosen_on):
            for expert, largest, _ in largest_inputs(stage_inputs.read_routed(sequence, number, stage)):
                name = f"amax.{number}.{expert}"
                tensors[name] = torch.maximum(tensors[name], largest) if name in tensors else largest
        return tensors

    def _report(self, index: int, number: int) -> None:
        if self.progress is not None:
            count = len(self.sequences)
            done, total = index * count + number + 1, count * len(self.walk.stack)
            self.progress(done, total, f"layer {index + 1} of {len(self.walk.stack)}, Hessians")


def _compact(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 rows in the model's dtype if that holds the same values."""
    small = rows.to(dtype)
    return small if torch.equal(small.float(), rows) else rows
