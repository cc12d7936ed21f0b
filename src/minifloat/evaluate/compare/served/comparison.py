"""The comparison of a running server with the baseline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from minifloat.calibration.data import SourceLike, as_source
from minifloat.calibration.readers import locate
from minifloat.checkpoint.progress import Progress
from minifloat.errors import UsageError
from minifloat.evaluate.compare.assembly import as_sources, assembled, judged, model_record, window_tokens
from minifloat.evaluate.compare.corpus import Corpus, WindowBatch
from minifloat.evaluate.compare.metrics import Distribution, FloatArray, TokenScores, concatenate
from minifloat.evaluate.compare.models import ModelLike, Predictor, common_tokenizer, load_options, longest_window
from minifloat.evaluate.compare.options import ServedOptions
from minifloat.evaluate.compare.result import Comparison, ModelRecord, ServedRecord
from minifloat.evaluate.compare.scoring_pass import BatchTokens, ScoringPass
from minifloat.evaluate.compare.served.answers import ServedModel
from minifloat.evaluate.compare.served.distributions import served_distribution
from minifloat.model.runtime.templates import apply_chat_template
from minifloat.serve.connection import Connection

#: Text that tokenizers cut differently: words, numbers, spaces, another script, an emoji.
_SAMPLE = "The  year 2024 cost 1,234.50 euros;\n\tdéjà vu, 東京 and 🙂 don't_agree."
_CONVERSATION = [{"role": "user", "content": "What is two plus two?"}]


def compare_served(
    baseline: ModelLike,
    url: str,
    data: SourceLike | Sequence[SourceLike] = (),
    options: ServedOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Comparison:
    """Measure how far a server's predictions are from the baseline's, and judge whether they are close enough.

    Perplexity and the first choice are exact. The KL divergence is a lower bound, because servers give the
    probabilities of few tokens only: it can break its bound, but that it keeps it proves less than for loaded models.
    The record of the candidate says how much of the baseline's probability the server left unnamed.

    Args:
        baseline: A folder, a model of the hub, or a model from `minifloat.model.runtime.load.load`.
        url: Address of a server with OpenAI's API whose ``/v1/completions`` has ``echo`` with ``logprobs`` and takes
            token ids: minifloat, vLLM, SGLang.
        data: Text, as for `compare_models`.
        options: How the baseline runs, and the model on the server; None: `ServedOptions()`.
        progress: Called after each batch with tokens done, tokens in total, and the name of the text.

    Raises:
        ServerError: If the server cannot be reached or refuses a request.
        UsageError: If the server gives no log-probabilities of prompts, or has another tokenizer.
        MinifloatError: As `compare_models`.
    """
    settings = options or ServedOptions()
    sources = as_sources(data)
    for source in sources:
        locate(as_source(source))  # report a missing source before loading the model
    connection = Connection(url, settings.api_key)
    listed = connection.listed_model(settings.model)  # reports a missing server before the model is loaded
    predictor = Predictor.of(baseline, load_options(settings), settings.revision)
    tokenizer = common_tokenizer([predictor])
    served = ServedModel(connection, str(listed["id"]), tokenizer)
    _check_tokenizer(served, url, tokenizer)
    window = window_tokens(settings.window, _longest(longest_window([predictor]), listed))
    predictor.check_window(window)
    corpus = Corpus(sources, tokenizer, window, settings.max_tokens, predictor.vocab_size)
    scoring = _ServedPass(predictor, served, corpus)
    started = time.perf_counter()
    try:
        scoring.run(progress)
    except KeyboardInterrupt:
        if scoring.empty:
            raise
    seconds = time.perf_counter() - started
    share = float(np.mean(np.concatenate(scoring.unnamed)))
    record = ModelRecord(
        f"{served.name} at {url}", None, "", served=ServedRecord(url, served.name, served.alternatives, share)
    )
    return assembled(
        scoring,
        model_record(predictor),
        [judged(scoring, 0, record, tokenizer, settings.tolerance)],
        seconds=seconds,
        command=settings.command,
        notes=_template_notes(served, tokenizer),
    )


class _ServedPass(ScoringPass):
    """A pass of the baseline and a server over a corpus.

    Attributes:
        unnamed: For each batch the baseline's probability ``[T]`` of all tokens that the server does not name.
    """

    def __init__(self, baseline: Predictor, served: ServedModel, corpus: Corpus) -> None:
        super().__init__(baseline, 1, corpus)
        self._served = served
        self.unnamed: list[FloatArray] = []

    def _score(self, batch: WindowBatch) -> list[TokenScores]:
        known = [of_token for window in self._served.probabilities(batch.ids.tolist()) for of_token in window]
        tokens, parts = BatchTokens(batch), []
        features = self.baseline.features(batch.ids)[:, :-1].flatten(0, 1)
        rows = self.baseline.head_rows()
        for start in range(0, len(tokens.targets), rows):
            logits = self.baseline.logits(features[start : start + rows])
            for slab in self.slabs(len(logits)):
                where = slice(start + slab.start, start + slab.stop)
                p = Distribution(logits[slab])
                q, unnamed = served_distribution(p, known[where])
                scores = tokens.score(p, q, where)
                self.refuse_nan(self.baseline, scores.baseline_nll)
                self.unnamed.append(unnamed.cpu().numpy())
                self.worst[0].add(scores, p, q, batch, where.start)
                parts.append(scores)
        return [concatenate(parts)]


def _longest(of_model: int | None, listed: Mapping[str, Any]) -> int | None:
    """Return the tokens of the longest window: a server that lists its context must have room for a token behind it."""
    context = listed.get("max_model_len")
    known = [of_model, context - 1 if isinstance(context, int) else None]
    return min((length for length in known if length is not None), default=None)


def _check_tokenizer(served: ServedModel, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compare the server's tokens of a text with the baseline's, where it says them."""
    found = served.tokens(prompt=_SAMPLE, add_special_tokens=False)
    expected = list(tokenizer(_SAMPLE, add_special_tokens=False).input_ids)
    if found is not None and found != expected:
        raise UsageError(
            f"{url}: the server cuts text into other tokens than the baseline: {_difference(expected, found)}; it "
            "serves another model, or another tokenizer"
        )


def _template_notes(served: ServedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a note if a conversation becomes other tokens on the server than with the baseline's chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return []
    found = served.tokens(messages=_CONVERSATION)
    text = apply_chat_template(tokenizer, _CONVERSATION, add_generation_prompt=True)
    expected = list(tokenizer(text, add_special_tokens=False).input_ids)
    if found is None or found == expected:
        return []
    return [
        "conversations: the server's chat template makes other tokens of them than the baseline's: "
        f"{_difference(expected, found)}"
    ]


def _difference(expected: Sequence[int], found: Sequence[int]) -> str:
    """Say where two lists of tokens begin to differ."""
    pairs = zip(expected, found, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
    return f"from token {first} on {list(found[first : first + 4])} instead of {list(expected[first : first + 4])}"
