"""A calibration from sources of text to a file: what `minifloat calibrate` and `quantize --calibration` run.

A part of the sequences is held out: the scales are made from the others, and the histograms of the held-out ones tell
how much those scales would have saturated. The two are files beside each other, ``NAME.safetensors`` and
``NAME.held-out.safetensors``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from minifloat.calibration.calibrate import calibrate
from minifloat.calibration.data import DEFAULT_SAMPLES, DEFAULT_SEQ_LEN, SourceLike, load_calibration_data
from minifloat.calibration.stats import ActivationStats
from minifloat.calibration.stats_file import read_stats, write_stats
from minifloat.errors import DestinationError, UsageError
from minifloat.hub import model_folder
from minifloat.report.progress import Progress
from minifloat.runtime.tokenizer import load_tokenizer

DEFAULT_HELD_OUT = 0.1


@dataclass(frozen=True)
class Collected:
    """What a calibration saw.

    Attributes:
        stats: Of the text that scales are made from.
        held_out: Of the text that they are tried on, with histograms; None where nothing was held out.
    """

    stats: ActivationStats
    held_out: ActivationStats | None

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write the statistics, and those of the held-out text beside them.

        Raises:
            DestinationError: A file exists and is not to be replaced, or the folder does not exist.
            StorageError: The system refuses.
        """
        target = Path(path)
        pairs = [(target, self.stats)] + ([(held_out_path(target), self.held_out)] if self.held_out else [])
        require_free([file for file, _ in pairs], overwrite=overwrite)
        for file, stats in pairs:
            write_stats(stats, file)
        return tuple(file for file, _ in pairs)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Collected:
        """Read what `save` wrote; the held-out file may be missing.

        Raises:
            StatsError: A file is damaged, or of another version.
        """
        beside = held_out_path(Path(path))
        return cls(read_stats(path), read_stats(beside) if beside.exists() else None)


def held_out_path(path: Path) -> Path:
    """The file of the held-out statistics beside a file of statistics."""
    return path.with_name(f"{path.stem}.held-out{path.suffix}")


def require_free(files: Sequence[Path], *, overwrite: bool) -> None:
    """Raise before an hour of work, not after it, where its result cannot be written.

    Raises:
        DestinationError: A file exists and is not to be replaced, or its folder does not exist.
    """
    for file in files:
        if not file.parent.is_dir():
            raise DestinationError(f"{file}: the folder to write it in does not exist; create that one first")
        if file.is_dir() or (file.exists() and not overwrite):
            raise DestinationError(f"{file}: exists already; choose another name or use --overwrite")


def collect(
    model: str | os.PathLike[str],
    sources: SourceLike | Sequence[SourceLike],
    *,
    samples: int = DEFAULT_SAMPLES,
    seq_len: int = DEFAULT_SEQ_LEN,
    seed: int = 0,
    packing: bool = True,
    held_out: float = DEFAULT_HELD_OUT,
    histogram: bool = False,
    per_channel: bool = False,
    until_stable: float | None = None,
    max_memory: int | None = None,
    work_dir: Path | None = None,
    device: str = "cpu",
    progress: Progress | None = None,
    revision: str | None = None,
) -> Collected:
    """Run text through a BF16 model and record what its linears and caches see.

    Args:
        model: A folder or a model of the hub that is not quantized.
        sources: One or several files, folders or data sets; a string is parsed by `Source.parse`.
        samples: Sequences in all, held-out ones included.
        seq_len: Tokens of a sequence.
        seed: Of the choice of documents.
        packing: Documents one after the other in sequences of exactly `seq_len`; False: one document each.
        held_out: Fraction of the sequences that scales are tried on and not made from; 0: none.
        histogram: Count magnitudes of the calibration text too: the rules percentile and mse need it.
        per_channel: Record the amax of each input channel too.
        until_stable: Stop when all scales moved by less than this fraction for a while.
        max_memory: Bytes of weights to hold at a time; None: the whole model.
        work_dir: With `max_memory`, the same call continues from here after an interruption: its folder must exist.
        device: Where the model runs.
        progress: Called after each sequence.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Raises:
        DataError: The text is missing, too short, or does not fit the model.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        AlreadyQuantizedError: The model is quantized.
        NonFiniteError: NaN or Inf in an activation; names module and sequence.
        UsageError: An option out of range.
    """
    if not 0 <= held_out < 1:
        raise UsageError(f"expected a held-out fraction from 0 to below 1, got {held_out}")
    folder = model_folder(model, revision=revision)
    tokenizer = load_tokenizer(folder)
    data = load_calibration_data(sources, tokenizer, samples=samples, seq_len=seq_len, seed=seed, packing=packing)
    kept, tried = data.held_out(held_out) if held_out else (data, None)
    run = partial(calibrate, folder, per_channel=per_channel, max_memory=max_memory, device=device, progress=progress)
    stats = run(kept, histogram=histogram, until_stable=until_stable, work_dir=_beside(work_dir, "calibration"))
    if tried is None:
        return Collected(stats, None)
    return Collected(stats, run(tried, histogram=True, work_dir=_beside(work_dir, "held-out")))


def _beside(work_dir: Path | None, name: str) -> Path | None:
    """The work folder of one of the two runs."""
    return None if work_dir is None else work_dir.with_name(f"{work_dir.name}.{name}")
