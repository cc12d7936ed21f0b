"""How two models behave on prompts with tools or a JSON schema: who answers them well, and how alike the answers are.

Every prompt is answered by both models, so shares are compared prompt by prompt, as the items of a task are. How alike
the answers are is reported, but is no part of the verdict: rounding can swap two answers that are equally good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minifloat.evaluate.compare.intervals import (
    Estimate,
    fraction_interval,
    paired_mean_interval,
    paired_share_interval,
)

#: What of an answer is good or not; the first is all that applies to a prompt.
GOOD = "good answers"
CALLS, FUNCTIONS, ARGUMENTS, SCHEMA = "valid calls", "right functions", "right arguments", "valid JSON"
_PARTS = (CALLS, FUNCTIONS, ARGUMENTS, SCHEMA)
SAME_FUNCTIONS, SAME_ARGUMENTS = "same functions", "same arguments"
#: Pairs of answers that reports show.
_EXAMPLES = 8


@dataclass(frozen=True)
class Answer:
    """What a model answered to a prompt.

    Attributes:
        said: The text and the calls, to be read.
        calls: Name and arguments, as JSON in one order of keys, of each call, sorted.
        marks: What of the answer is good, by the names above; the prompt says which of them apply.
        thinking_tokens: Tokens of the thinking; None: a server did not say.
        cut_off: Whether it ended at the largest number of tokens.
        prompt_tokens: None: a server did not say.
    """

    said: str
    calls: tuple[tuple[str, str], ...]
    marks: Mapping[str, bool]
    thinking_tokens: int | None
    cut_off: bool
    prompt_tokens: int | None = None

    @property
    def is_good(self) -> bool:
        return all(self.marks.values())

    @property
    def functions(self) -> list[str]:
        return [name for name, _ in self.calls]


@dataclass(frozen=True)
class Answers:
    """The answers of one model.

    Attributes:
        tool_format: How it writes calls, by the names of `serve`; empty where a server does not say.
    """

    name: str
    answers: tuple[Answer, ...]
    tool_format: str = ""


@dataclass(frozen=True)
class BehaviorShare:
    """The share of prompts that are answered well, of those to which a quantity applies.

    Attributes:
        better: Prompts that only the candidate answers well.
        worse: Prompts that only the baseline answers well.
        difference: Candidate's share less the baseline's, paired.
    """

    quantity: str
    prompts: int
    baseline: int
    candidate: int
    better: int
    worse: int
    difference: Estimate

    @property
    def name(self) -> str:
        return f"{self.prompts:,} prompts"

    @property
    def tokens(self) -> int:
        return self.prompts

    @property
    def units(self) -> int:
        """Prompts at which something can be lost."""
        return self.baseline


@dataclass(frozen=True)
class BehaviorAgreement:
    """At how many prompts with tools the two models make the same calls."""

    quantity: str
    prompts: int
    same: int
    share: Estimate


@dataclass(frozen=True)
class ThinkingLength:
    """Mean tokens of thinking of both models, and the change with its interval, prompt by prompt."""

    baseline: float
    candidate: float
    change: Estimate


@dataclass(frozen=True)
class AnswerPair:
    prompt: str
    question: str
    baseline: str
    candidate: str
    change: str


@dataclass(frozen=True)
class Behavior:
    """The answers of a candidate and of the baseline to the same prompts.

    Attributes:
        source: Name of the file, or `builtin`.
        shares: `GOOD` first.
        cut_off: Answers of the baseline, and of the candidate, that ended at `new_tokens`.
        tool_formats: Of the baseline and of the candidate.
        thinking: None: neither thinks, or a server does not count it.
    """

    source: str
    sha256: str
    prompts: int
    new_tokens: int
    shares: tuple[BehaviorShare, ...]
    agreement: tuple[BehaviorAgreement, ...]
    thinking: ThinkingLength | None
    cut_off: tuple[int, int]
    tool_formats: tuple[str, str]
    examples: tuple[AnswerPair, ...]

    @property
    def good(self) -> BehaviorShare:
        return self.shares[0]


@dataclass(frozen=True)
class PromptNames:
    """What reports say of the prompts.

    Attributes:
        names: Of each prompt.
        questions: The last text of the user in each.
        with_tools: Whether each has tools.
    """

    source: str
    sha256: str
    new_tokens: int
    names: tuple[str, ...]
    questions: tuple[str, ...]
    with_tools: tuple[bool, ...]


def behavior_of(prompts: PromptNames, baseline: Answers, candidate: Answers) -> Behavior:
    """Compare the answers of two models, which are in the order of the prompts."""
    pairs = list(zip(baseline.answers, candidate.answers, strict=True))
    parts = [_share(quantity, found) for quantity in _PARTS if (found := [p for p in pairs if quantity in p[0].marks])]
    tools = [pair for pair, has in zip(pairs, prompts.with_tools, strict=True) if has]
    return Behavior(
        source=prompts.source,
        sha256=prompts.sha256,
        prompts=len(pairs),
        new_tokens=prompts.new_tokens,
        shares=(_share(GOOD, pairs), *parts),
        agreement=tuple(
            _agreement(quantity, [of(first) == of(second) for first, second in tools])
            for quantity, of in _ALIKE
            if tools
        ),
        thinking=_thinking(pairs),
        cut_off=(sum(a.cut_off for a, _ in pairs), sum(b.cut_off for _, b in pairs)),
        tool_formats=(baseline.tool_format, candidate.tool_format),
        examples=_examples(prompts, pairs),
    )


_Pairs = Sequence[tuple[Answer, Answer]]
_ALIKE: tuple[tuple[str, Callable[[Answer], object]], ...] = (
    (SAME_FUNCTIONS, lambda answer: answer.functions),
    (SAME_ARGUMENTS, lambda answer: answer.calls),
)


def _share(quantity: str, pairs: _Pairs) -> BehaviorShare:
    def is_good(answer: Answer) -> bool:
        return answer.is_good if quantity == GOOD else answer.marks[quantity]

    found = Counter((is_good(first), is_good(second)) for first, second in pairs)
    return BehaviorShare(
        quantity=quantity,
        prompts=len(pairs),
        baseline=found[True, True] + found[True, False],
        candidate=found[True, True] + found[False, True],
        better=found[False, True],
        worse=found[True, False],
        difference=paired_share_interval(found[False, True], found[True, False], len(pairs)),
    )


def _agreement(quantity: str, same: Sequence[bool]) -> BehaviorAgreement:
    return BehaviorAgreement(quantity, len(same), sum(same), fraction_interval(sum(same), len(same)))


def _thinking(pairs: _Pairs) -> ThinkingLength | None:
    lengths = [(first.thinking_tokens, second.thinking_tokens) for first, second in pairs]
    known = np.array([(a, b) for a, b in lengths if a is not None and b is not None], dtype=np.float64)
    if len(known) < len(pairs) or not known.any():
        return None
    change = paired_mean_interval(known[:, 1] - known[:, 0], np.ones(len(known)))
    return ThinkingLength(float(known[:, 0].mean()), float(known[:, 1].mean()), change)


def _examples(prompts: PromptNames, pairs: _Pairs) -> tuple[AnswerPair, ...]:
    """Return answers that differ: first those that the candidate alone gets wrong, then that it alone gets right."""
    ranks = {(True, False): (0, "worse"), (False, True): (1, "better")}
    found = []
    for place, (first, second) in enumerate(pairs):
        rank, change = ranks.get((first.is_good, second.is_good), (2, "other calls"))
        if rank < 2 or first.calls != second.calls:
            pair = AnswerPair(prompts.names[place], prompts.questions[place], first.said, second.said, change)
            found.append((rank, place, pair))
    return tuple(pair for _, _, pair in sorted(found)[:_EXAMPLES])
