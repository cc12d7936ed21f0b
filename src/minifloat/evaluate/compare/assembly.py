"""What every kind of comparison shares: its text and windows, and the result from the scores of a pass."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from minifloat._version import __version__
from minifloat.calibration.data import SourceLike
from minifloat.errors import UsageError
from minifloat.evaluate.compare.corpus import DEFAULT_WINDOW
from minifloat.evaluate.compare.metrics import concatenate
from minifloat.evaluate.compare.models import Predictor
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import CandidateResult, Comparison, ModelRecord, TextRecord
from minifloat.evaluate.compare.scoring_pass import ScoringPass
from minifloat.evaluate.compare.summary import summarize
from minifloat.evaluate.compare.verdict import LEAST_KL, MEAN_KL, judge
from minifloat.evaluate.compare.worst import to_worst_token
from minifloat.kernels import native, processors
from minifloat.numerics.formats import E4M3


def as_sources(data: SourceLike | Sequence[SourceLike]) -> list[SourceLike]:
    """Return one or several sources of text as a list."""
    if isinstance(data, Sequence) and not isinstance(data, str):
        return list(data)
    return [data]


def window_tokens(requested: int | None, longest: int | None) -> int:
    """Return the tokens per window, BOS included."""
    if requested is None:
        return DEFAULT_WINDOW if longest is None else min(DEFAULT_WINDOW, longest)
    if longest is not None and requested > longest:
        raise UsageError(f"a window of {requested} tokens is longer than the {longest} that the models attend to")
    return requested


def judged(
    scoring: ScoringPass, index: int, record: ModelRecord, tokenizer: PreTrainedTokenizerBase, tolerance: Tolerance
) -> CandidateResult:
    """Summarize and judge the scores of one candidate."""
    corpus, vocab_size = scoring.corpus, scoring.baseline.vocab_size
    scores_by_text = [scoring.scores(index, text) for text in range(len(corpus.texts))]
    summaries = tuple(
        summarize(text.name, scores, len(scores) * text.bytes_per_token, text.unit, vocab_size)
        for text, scores in zip(corpus.texts, scores_by_text, strict=True)
    )
    overall = summaries[0]
    if len(summaries) > 1:
        unit = " or ".join(sorted({text.unit for text in corpus.texts}))
        nbytes = sum(summary.nbytes for summary in summaries)
        overall = summarize("all texts", concatenate(scores_by_text), nbytes, unit, vocab_size)
    return CandidateResult(
        model=record,
        texts=summaries,
        overall=overall,
        verdict=judge(
            (*summaries, overall) if len(summaries) > 1 else summaries,
            tolerance,
            kl=MEAN_KL if record.served is None else LEAST_KL,
        ),
        worst=tuple(to_worst_token(position, corpus, tokenizer) for position in scoring.worst[index].ranked()),
    )


def assembled(
    scoring: ScoringPass,
    baseline: ModelRecord,
    candidates: Sequence[CandidateResult],
    *,
    seconds: float,
    command: str,
    notes: Sequence[str],
) -> Comparison:
    """Return the result of a comparison; arguments as the attributes of `Comparison`."""
    return Comparison(
        baseline=baseline,
        candidates=tuple(candidates),
        window=scoring.corpus.window,
        dtype=scoring.baseline.dtype,
        texts=tuple(TextRecord(t.name, t.documents, t.tokens, t.sha256) for t in scoring.corpus.texts),
        tokens_done=scoring.done,
        tokens_total=scoring.total,
        seconds=seconds,
        machine=_machine(),
        command=command,
        notes=tuple(notes),
    )


def model_record(model: Predictor) -> ModelRecord:
    """Return the record of a loaded model."""
    cache = None if model.new_cache is None else E4M3.name
    return ModelRecord(model.name, model.nbytes, model.activations, cache, model.lm_head)


def _machine() -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "minifloat": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processors": processors.available(),
        "threads": torch.get_num_threads(),
        "instruction_set": native.isa() if native.load() is not None else None,
    }
