"""Steps: a runner computes the work, tokens are chosen, prompts are scored; a sequence that fails ends alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minifloat.engine.device_sampling import PendingChoices
from minifloat.engine.device_sampling import sample as sample_on_device
from minifloat.engine.sampling import Choices, NonFiniteLogits, TokenChoice, sample, verify
from minifloat.engine.scheduler import Runner, WorkItem
from minifloat.engine.sequence import Sequence, State
from minifloat.engine.text import TokenTexts
from minifloat.engine.transfer import send

_LOG = logging.getLogger(__name__)
#: Rows of logits that are converted to float64 at a time, which takes twice their memory.
_ROWS = 32


@dataclass(frozen=True)
class Step:
    """A step that the model computes, or has computed."""

    items: list[WorkItem]
    sequences: list[Sequence]
    choices: list[Choices] | PendingChoices
    failures: dict[str, Exception]

    @property
    def is_stale(self) -> bool:
        """Whether all its sequences have ended meanwhile."""
        return all(item.sequence.state is not State.RUNNING for item in self.items)

    def wait(self) -> list[Choices]:
        if isinstance(self.choices, PendingChoices):
            return [[choice] for choice in self.choices.wait()]
        return self.choices


def launch(runner: Runner, items: Sequences[WorkItem], texts: TokenTexts) -> Step:
    """Compute the work of a step, and note the log-probabilities of prompts where they are asked for."""
    logits, failures = _run(runner, items)
    items = _without(items, failures)
    if any(item.sequence.pooled is not None for item in items):  # then all are
        for item, rows in zip(items, torch.split_with_sizes(logits, [item.logits for item in items]), strict=True):
            item.sequence.pooled.add(rows.numpy())  # type: ignore[union-attr]
        return Step(items, [], [], failures)
    logits, unscored = _score_prompts(items, logits, texts)
    items = _without(items, unscored)
    sampling = [item for item in items if item.samples]
    sequences = [item.sequence for item in sampling]
    states = [sequence.sampling for sequence in sequences]
    choices: list[Choices] | PendingChoices = []
    if states and runner.on_device:
        choices = sample_on_device(logits, states)
    elif any(item.drafts for item in sampling):
        choices = verify(logits, states, [item.drafts for item in sampling])
    elif states:
        choices = [[choice] for choice in sample(logits, states)]
    return Step(items, sequences, choices, failures | unscored)


def launch_next(
    runner: Runner, before: Step, schedule: Callable[[list[WorkItem]], list[WorkItem] | None]
) -> Step | None:
    """Compute the step after one whose tokens the device has not chosen yet, if the device needs no host for it."""
    choices = before.choices
    if not isinstance(choices, PendingChoices) or choices.tokens is None:
        return None
    items = schedule(before.items)
    if not items:
        return None
    sequences, tokens = [item.sequence for item in items], choices.tokens
    if len(sequences) < len(before.sequences):
        rows = {sequence.request_id: row for row, sequence in enumerate(before.sequences)}
        kept = np.array([rows[sequence.request_id] for sequence in sequences])
        tokens = tokens[send(kept, tokens.device)]
    try:
        logits = runner.run_ahead(items, tokens)
    except Exception:  # the same work is computed again in the next step, one sequence at a time if need be
        _LOG.exception("a step of %d sequences failed", len(items))
        return None
    states = [sequence.sampling for sequence in sequences]
    return Step(items, sequences, sample_on_device(logits, states, ahead=1), {})


def _without(items: Sequences[WorkItem], failures: Collection[str]) -> list[WorkItem]:
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
    """Note the log-probabilities of the tokens of prompts, where they are asked for."""
    if not any(item.scored for item in items):
        return logits, {}
    kept: list[Tensor] = []
    failures: dict[str, Exception] = {}
    for item, rows in zip(items, torch.split_with_sizes(logits, [item.logits for item in items]), strict=True):
        sequence, first = item.sequence, item.sequence.next_scored
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


def score(logits: Tensor, tokens: Sequences[int], alternatives: int) -> list[TokenChoice]:
    count = min(max(alternatives, 1), logits.shape[1])
    choices: list[TokenChoice] = []
    for start in range(0, len(tokens), _ROWS):
        rows = logits[start : start + _ROWS]
        taken = torch.tensor(tokens[start : start + _ROWS], device=logits.device)
        largest, ids = rows.topk(count)
        logs = torch.cat([rows.gather(1, taken[:, None]), largest], dim=1).double()
        logs -= rows.double().logsumexp(dim=1, keepdim=True)
        for token, (own, *top), best in zip(taken.tolist(), logs.tolist(), ids.tolist(), strict=True):
            if not math.isfinite(top[0]):
                raise NonFiniteLogits("the model's logits for the prompt are not finite")
            choices.append(TokenChoice(token, own, tuple(zip(best, top, strict=True))[:alternatives]))
    return choices
