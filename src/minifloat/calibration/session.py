"""A calibration from text sources to files: what `minifloat calibrate` and `quantize --calibration` run.

A fraction of the sequences is held out: the scales come from the other sequences, and the histograms of the held-out
ones show how much those scales would saturate (`calibration.result`). Text that the model itself wrote is kept in
``NAME.self.safetensors``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from minifloat.calibration.calibrate import calibrate_opened
from minifloat.calibration.data import (
    DEFAULT_SAMPLES,
    DEFAULT_SEQ_LEN,
    OWN_TEXT,
    CalibrationSet,
    Source,
    SourceLike,
    as_sources,
    load_calibration_data,
)
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import DEFAULT_RUN, RunOptions
from minifloat.calibration.own_text import WriteCopy, write_own_text
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import HistogramRule, Rule, parse_rule
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.model.layouts.plain_view import plain_view
from minifloat.model.runtime.config import plain_config, read_generation_config
from minifloat.model.runtime.tokenizer import has_tokenizer, load_tokenizer, token_id_tokenizer

DEFAULT_HELD_OUT = 0.1


@dataclass(frozen=True)
class TextOptions:
    """How text becomes sequences of tokens.

    Attributes:
        samples: Number of sequences, including held-out ones.
        seq_len: Tokens of a sequence.
        seed: Of the choice of documents, and of text that the model itself writes.
        packing: Join documents into sequences of exactly `seq_len` tokens; False: one document per sequence.
        held_out: Fraction of the sequences that only test the scales; 0: none.

    Raises:
        UsageError: The held-out fraction is out of range.
    """

    samples: int = DEFAULT_SAMPLES
    seq_len: int = DEFAULT_SEQ_LEN
    seed: int = 0
    packing: bool = True
    held_out: float = DEFAULT_HELD_OUT

    def __post_init__(self) -> None:
        if not 0 <= self.held_out < 1:
            raise UsageError(f"expected a held-out fraction from 0 to below 1, got {self.held_out}")


_DEFAULT_TEXT = TextOptions()


def own_text_path(path: Path) -> Path:
    """Return the file that keeps the text that the model wrote, beside a file of statistics."""
    return path.with_name(f"{path.stem}.self{path.suffix}")


def load_texts(
    checkpoint: Checkpoint,
    sources: SourceLike | Sequence[SourceLike],
    text: TextOptions = _DEFAULT_TEXT,
    *,
    own_text_file: Path | None = None,
    write_copy: WriteCopy | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> CalibrationSet:
    """Return the sequences of all sources, mixed by weight, held-out ones included."""
    tokenizer = _tokenizer(checkpoint, sources)

    def own_text(samples: int) -> CalibrationSet:
        return write_own_text(
            checkpoint,
            tokenizer,
            samples=samples,
            seq_len=text.seq_len,
            seed=text.seed,
            file=own_text_file,
            write_copy=write_copy,
            device=device,
            progress=progress,
        )

    return load_calibration_data(
        sources,
        tokenizer,
        samples=text.samples,
        seq_len=text.seq_len,
        seed=text.seed,
        packing=text.packing,
        own_text=own_text,
    )


def _tokenizer(checkpoint: Checkpoint, sources: SourceLike | Sequence[SourceLike]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model, or a stand-in if it has none and writes all of the text itself."""
    if has_tokenizer(checkpoint.path) or as_sources(sources) != [Source(OWN_TEXT)]:
        return load_tokenizer(checkpoint.path)
    return token_id_tokenizer(plain_config(checkpoint).get_text_config(), read_generation_config(checkpoint))


def calibrate(
    model: str | os.PathLike[str],
    sources: SourceLike | Sequence[SourceLike],
    text: TextOptions = _DEFAULT_TEXT,
    run: RunOptions = DEFAULT_RUN,
    *,
    rule: str | Rule = "max",
    max_saturation: float | None = None,
    own_text_file: Path | None = None,
    write_copy: WriteCopy | None = None,
    from_quantized: bool = False,
    progress: Progress | None = None,
    revision: str | None = None,
) -> Calibration:
    """Run text through an unquantized model and return the statistics of its linears and KV caches.

    Args:
        model: An unquantized model: a folder or a model of the hub; with `from_quantized` a quantized one.
        sources: One or several files, folders or data sets, or ``self`` for text that the model itself writes; a string
            is parsed by `Source.parse`.
        text: How text becomes sequences of tokens.
        run: How to run the model and what to record. Histograms of the held-out text are always recorded, and those of
            the other text where the rule needs them. With a `work_dir`, the same call continues after an interruption.
        rule: How scales follow from the statistics: a `Rule`, or the text of one, such as ``percentile``.
        max_saturation: As in `Calibration`.
        own_text_file: Where the source ``self`` keeps its tokens, as `write_own_text`'s `file`.
        write_copy: Writes a smaller copy of the model where memory is short, as in `write_own_text`.
        from_quantized: The model is quantized: it runs with its dequantized weights and 16-bit inputs.
        progress: Called after each sequence, and after each step while the model writes the source ``self``.
        revision: Of a model of the hub, as in `minifloat.checkpoint.hub.model_folder`.

    Returns:
        What `quantize_checkpoint` takes as `calibration`, and what `Calibration.save` writes.

    Raises:
        DataError: The text is missing, too short, or does not fit the model.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        AlreadyQuantizedError: The model is quantized, and `from_quantized` is False.
        NonFiniteError: An activation holds NaN or Inf; names module and sequence.
        UnknownNameError: There is no such rule.
    """
    scale_rule = parse_rule(rule) if isinstance(rule, str) else rule
    histogram = run.histogram or isinstance(scale_rule, HistogramRule)
    run_kept = replace(run, histogram=histogram, work_dir=_work_dir(run, "calibration"))
    run_held_out = replace(run, histogram=True, until_stable=None, work_dir=_work_dir(run, "held-out"))
    with Checkpoint.open(model_folder(model, revision=revision)) as stored:
        checkpoint = plain_view(stored) if from_quantized else stored
        opened = CalibrationModel(checkpoint, run)
        data = load_texts(
            checkpoint,
            sources,
            text,
            own_text_file=own_text_file,
            write_copy=write_copy,
            device=run.device,
            progress=progress,
        )
        kept, held_out = data.held_out(text.held_out) if text.held_out else (data, None)
        stats = calibrate_opened(opened, kept, run_kept, progress)
        tests = None if held_out is None else calibrate_opened(opened, held_out, run_held_out, progress)
        return Calibration(stats, scale_rule, tests, max_saturation)


def _work_dir(run: RunOptions, part: str) -> Path | None:
    """Return the work folder of the calibration or of the held-out run."""
    return None if run.work_dir is None else run.work_dir.with_name(f"{run.work_dir.name}.{part}")
