"""A comparison in words and numbers, once for the page, the model card and the terminal.

Everything here is plain text that is safe to show (`visible`); each place adds its own markup.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from minifloat.compare.attribution import Attribution, Suggestion
from minifloat.compare.generation import GreedyDivergence
from minifloat.compare.intervals import CONFIDENCE, FEWEST_UNITS
from minifloat.compare.pages.numbers import NO_INTERVAL, change, number, percent, short, with_interval
from minifloat.compare.result import CandidateResult, Comparison
from minifloat.compare.verdict import Check, Outcome, Tolerance
from minifloat.report.text import short_names, size_text, visible

OUTCOMES = {Outcome.PASSED: "PASSED", Outcome.FAILED: "FAILED", Outcome.UNDECIDED: "NOT ENOUGH DATA"}
_INCREASE, _AGREEMENT = "perplexity increase", "agreement"


# ------------------------------------------------------------------------------------------------- verdicts


def tolerance_text(tolerance: Tolerance) -> str:
    """The bounds."""
    return (
        f"perplexity increase at most {percent(tolerance.max_ppl_increase)}, mean KL at most "
        f"{short(tolerance.max_kl)} nats per token, agreement on the first choice at least "
        f"{percent(tolerance.min_agreement)}, ties apart"
    )


def confidence_text() -> str:
    """What the brackets are."""
    return (
        f"Brackets are {CONFIDENCE:.0%} intervals; {NO_INTERVAL}: fewer than {FEWEST_UNITS} documents or windows, "
        "too little for one."
    )


def verdict_line(candidate: CandidateResult) -> str:
    """The verdict and its first reason, one line, without the name of the candidate."""
    verdict = candidate.verdict
    if verdict.outcome is Outcome.PASSED:
        measured = ", ".join(_measured(check) for check in verdict.checks if check.text == candidate.overall.name)
        if len(candidate.texts) == 1:
            return f"PASSED: every bound is kept on {visible(candidate.overall.name)}: {measured}"
        return f"PASSED: every bound is kept on every text; on {visible(candidate.overall.name)}: {measured}"
    first, *others = _ranked(verdict.unmet)
    more = f"; and {len(others)} more" if others else ""
    return f"{OUTCOMES[verdict.outcome]}: {check_text(first)}{more}"


def verdict_count(candidate: CandidateResult) -> str:
    """The verdict, and how many checks made it what it is."""
    verdict = candidate.verdict
    found = {Outcome.PASSED: "kept", Outcome.FAILED: "broken", Outcome.UNDECIDED: "undecided"}[verdict.outcome]
    count = len(verdict.unmet) or len(verdict.checks)
    return f"{OUTCOMES[verdict.outcome]}: {count} of {len(verdict.checks)} bounds are {found}"


def unmet_lines(candidate: CandidateResult) -> list[str]:
    """Every check that made the verdict what it is, the clearest first."""
    return [check_text(check) for check in _ranked(candidate.verdict.unmet)]


def check_text(check: Check) -> str:
    """One bound on one text, and what came of it."""
    asked = (
        f"at least {_bound(check)} is wanted" if check.quantity == _AGREEMENT else f"at most {_bound(check)} is allowed"
    )
    text = f"{_measured(check)} on {visible(check.text)} ({asked})"
    if check.outcome is not Outcome.UNDECIDED:
        return text
    if check.tokens_needed is not None:
        return f"{text}: the bound lies in the interval; about {_rounded(check.tokens_needed):,} tokens would decide"
    if not check.estimate.known:
        return f"{text}: too few documents or windows for an interval"
    return f"{text}: it lies on the bound"


def _rounded(count: int) -> int:
    """Up, to two digits."""
    unit = int(10 ** max(len(str(count)) - 2, 0))
    return -(-count // unit) * unit


def _measured(check: Check) -> str:
    signed = check.quantity == _INCREASE
    as_percent = signed or check.quantity == _AGREEMENT
    return f"{check.quantity} {with_interval(check.estimate, as_percent=as_percent, signed=signed)}"


def _bound(check: Check) -> str:
    return percent(check.bound) if check.quantity in (_INCREASE, _AGREEMENT) else short(check.bound)


def _ranked(checks: Sequence[Check]) -> list[Check]:
    """By how far they are from the bound, measured in what the interval reaches; without an interval last."""

    def clearness(check: Check) -> float:
        estimate = check.estimate
        if math.isinf(estimate.value):
            return -math.inf
        reach = (estimate.high - estimate.low) / 2 + 1e-12
        return -abs(estimate.value - check.bound) / reach if estimate.known else math.inf

    return sorted(checks, key=clearness)


def partial_text(comparison: Comparison) -> str:
    """That a run was interrupted, and how far it had come; empty of one that was not."""
    if not comparison.partial:
        return ""
    share = comparison.tokens_done / comparison.tokens_total
    return (
        f"PARTIAL: the run was interrupted after {comparison.tokens_done:,} of {comparison.tokens_total:,} tokens "
        f"({share:.0%}); everything here is of those."
    )


def note_lines(comparison: Comparison) -> list[str]:
    """What was asked for and could not be measured."""
    return [visible(note) for note in comparison.notes]


# ------------------------------------------------------------------------------------------------- the rest


def candidate_names(comparison: Comparison) -> list[str]:
    """Short names of the candidates, which differ from each other."""
    return short_names([comparison.baseline.name, *(one.model.name for one in comparison.candidates)])[1:]


def baseline_name(comparison: Comparison) -> str:
    """A short name that differs from those of the candidates."""
    return short_names([comparison.baseline.name, *(one.model.name for one in comparison.candidates)])[0]


def size_lines(comparison: Comparison, candidate: CandidateResult) -> str:
    """Bytes before and after."""
    before, after = comparison.baseline.nbytes, candidate.model.nbytes
    return f"{size_text(before)} -> {size_text(after)} ({smaller(comparison, candidate)} smaller)"


def smaller(comparison: Comparison, candidate: CandidateResult) -> str:
    """How many times."""
    return f"{comparison.baseline.nbytes / max(candidate.model.nbytes, 1):.2f}x"


def generation_text(found: GreedyDivergence) -> str:
    """When greedy continuations part, in a sentence."""
    same = with_interval(found.identical_fraction, as_percent=True)
    match = with_interval(found.mean_prefix_match, as_percent=True)
    half = f"half of them had parted by token {found.median:g}" if found.median is not None else "most never parted"
    return (
        f"{found.prompts - found.parted} of {found.prompts} prompts ({same}) were continued by the same "
        f"{found.new_tokens} tokens; {half}; on average the first {match} of a continuation were the same"
    )


def attribution_text(found: Attribution) -> str:
    """How the table of modules was made."""
    return (
        f"{found.measured} of {found.of} modules were measured alone, on {found.tokens:,} tokens, "
        f"in {number(found.seconds, 2)} s"
    )


def suggestion_text(found: Suggestion) -> str:
    """What leaving modules unquantized would do."""
    if found.everything:
        return "Only with every module unquantized it is inside the tolerance: another scheme is the better answer"
    end = "which is inside the tolerance" if found.reaches else "which is not yet inside the tolerance"
    count = len(found.modules)
    modules = f"{count} {'module' if count == 1 else 'modules'}"
    return (
        f"Leaving {modules} unquantized costs {size_text(found.extra_bytes)} and brings the mean KL "
        f"from {number(found.kl_before, 3)} to {number(found.kl_after, 3)} and the perplexity increase to "
        f"{change(found.ppl_increase_after)} (measured on {found.tokens:,} tokens), {end}"
    )


def override_options(found: Suggestion | None) -> list[str]:
    """What to tell ``minifloat quantize``; nothing where that is no advice."""
    if found is None or found.everything:
        return []
    return [f"--override {shlex.quote(visible(override))}" for override in found.overrides]


def machine_facts(machine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and values, whatever was written down; what is not known is left out."""
    for key, value in machine.items():
        if value is not None:
            yield visible(key.replace("_", " ")), _brief(value)


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_brief(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_brief, value))
    return number(value) if isinstance(value, float) else visible(str(value))
