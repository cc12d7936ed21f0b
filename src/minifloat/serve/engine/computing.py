"""Computes the work of one step; a sequence that fails does not end the others."""

from __future__ import annotations

import logging
from collections.abc import Collection
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import torch
from torch import Tensor

from minifloat.serve.engine.runner import Runner
from minifloat.serve.engine.sampling import NonFiniteLogits
from minifloat.serve.engine.scheduler import WorkItem
from minifloat.serve.engine.scoring import score
from minifloat.serve.engine.sequence import Sequence
from minifloat.serve.engine.token_texts import TokenTexts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What the work of a step came to.

    Attributes:
        items: The work that was computed.
        logits: float32 ``[n, vocab]``: a row for each of `sampled`.
        failures: Errors by request id.
    """

    items: list[WorkItem]
    logits: Tensor
    failures: dict[str, Exception]

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences whose next token can be chosen now."""
        return [sequence for sequence, _, end, _ in self.items if end == len(sequence.tokens)]


def compute(runner: Runner, items: Sequences[WorkItem], texts: TokenTexts) -> StepResult:
    """Compute the work of a step, and note the log-probabilities of prompts where they are asked for.

    Args:
        runner: Computes the logits.
        items: The work.
        texts: Adds texts to log-probabilities.
    """
    logits, failures = _run(runner, items)
    items = _without(items, failures)
    logits, unscored = _score_prompts(items, logits, texts)
    return StepResult(_without(items, unscored), logits, failures | unscored)


def _without(items: Sequences[WorkItem], failures: Collection[str]) -> list[WorkItem]:
    """Return the work of the requests that have not failed."""
    return [item for item in items if item.sequence.request_id not in failures] if failures else list(items)


def _run(runner: Runner, items: Sequences[WorkItem]) -> tuple[Tensor, dict[str, Exception]]:
    """Return the logits of the work that does not fail, and the errors of the rest by request id."""
    if not items:
        return torch.empty(0, runner.vocab), {}
    try:
        return runner.run(items), {}
    except Exception as error:  # one request must not end the others
        _LOG.exception("a step of %d sequences failed", len(items))
        if len(items) == 1:
            return torch.empty(0, runner.vocab), {items[0].sequence.request_id: error}
    rows = []
    failures: dict[str, Exception] = {}
    for item in items:
        logits, failure = _run(runner, [item])
        rows.append(logits.clone())  # the next run may overwrite them
        failures |= failure
    rows = [logits for logits in rows if len(logits)] or rows[:1]
    return torch.cat(rows), failures


def _score_prompts(
    items: Sequences[WorkItem], logits: Tensor, texts: TokenTexts
) -> tuple[Tensor, dict[str, Exception]]:
    """Note the log-probabilities of the tokens of prompts, where they are asked for.

    Returns:
        The logits that tokens are chosen by, and by request id the errors of prompts that cannot be scored.
    """
    if not any(item.scored for item in items):
        return logits, {}
    kept: list[Tensor] = []
    failures: dict[str, Exception] = {}
    for item, rows in zip(items, torch.split_with_sizes(logits, [item.logits for item in items]), strict=True):
        sequence, first = item.sequence, len(item.sequence.prompt_logprobs) + 1
        alternatives = sequence.request.params.prompt_logprobs or 0
        try:
            scores = score(rows[: item.scored], sequence.tokens[first : first + item.scored], alternatives)
        except NonFiniteLogits as error:
            _LOG.error("request %s: %s", sequence.request_id, error)
            failures[sequence.request_id] = error
            continue
        sequence.prompt_logprobs += [texts.logprob(choice) for choice in scores]
        kept.append(rows[item.scored :])
    return torch.cat(kept) if kept else logits[:0], failures
