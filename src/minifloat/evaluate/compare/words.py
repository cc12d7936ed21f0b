"""Sentences about a comparison. They quote names as they are: the writers of a document show controls as symbols."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from minifloat.evaluate.compare.behavior import Behavior, BehaviorShare
from minifloat.evaluate.compare.generation import GreedyDivergence
from minifloat.evaluate.compare.intervals import CONFIDENCE, FEWEST_UNITS, Estimate
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import Attribution, CandidateResult, Comparison, ModelRecord, Suggestion
from minifloat.evaluate.compare.summary import LateChange, PositionRange, Summary
from minifloat.evaluate.compare.tasks import TaskDifference, TaskScore
from minifloat.evaluate.compare.verdict import (
    FEWEST_EFFECTIVE,
    INCREASE,
    SAME_TOP1,
    Check,
    Outcome,
    Verdict,
)
from minifloat.evaluate.compare.verdict import FEWEST_UNITS as FEWEST_TO_PASS
from minifloat.report.document import Pair
from minifloat.report.text import NO_INTERVAL, change, interval, number, percent, short, short_names, size_text

#: From here on a number of units is written without decimals.
_ROUND = 10
OUTCOMES = {Outcome.PASSED: "PASSED", Outcome.FAILED: "FAILED", Outcome.UNDECIDED: "NOT ENOUGH DATA"}


def shown(estimate: Estimate, *, as_percent: bool = False, signed: bool = False, digits: int = 2) -> Pair:
    ends = (estimate.value, estimate.low, estimate.high)
    return interval(*ends, as_percent=as_percent, signed=signed, digits=digits)


def increase(summary: Summary) -> Estimate:
    return summary.perplexity_ratio.mapped(lambda ratio: ratio - 1)


def recovery(task: TaskDifference) -> str:
    return f"{task.recovery:.1f}%" if math.isfinite(task.recovery) else "-"


def task_score(task: TaskDifference, score: TaskScore) -> str:
    """Return a score with its standard error; in percent where items are right or wrong."""
    as_percent = task.mcnemar_p is not None
    text = f"{score.score:.1%}" if as_percent else number(score.score)
    if not math.isfinite(score.stderr):
        return text
    return f"{text} ± {100 * score.stderr:.1f}" if as_percent else f"{text} ± {number(score.stderr, 2)}"


def task_difference(task: TaskDifference) -> Pair:
    """Return candidate - baseline with its interval; in percentage points where items are right or wrong."""
    value, ends = shown(task.difference, as_percent=task.mcnemar_p is not None, signed=True)
    return Pair(value.replace("%", " pp"), ends)


def tolerance_text(tolerance: Tolerance, *, behavior: bool = False) -> str:
    lost = f", good answers lost at most {percent(tolerance.max_behavior_loss)} of the prompts" if behavior else ""
    return (
        f"perplexity increase at most {percent(tolerance.max_ppl_increase)}, mean KL at most "
        f"{short(tolerance.max_kl)} nats per token, same top-1 (the share of tokens at which both models "
        f"have the same most probable token) at least {percent(tolerance.min_same_top1)}{lost}; where a bound lies in "
        f"the interval, the interval may end beyond it by at most {percent(tolerance.margin)} of the loss that it "
        "allows"
    )


def confidence_text() -> str:
    return (
        f"Brackets are {CONFIDENCE:.0%} intervals; {NO_INTERVAL}: no interval, because there are fewer than "
        f"{FEWEST_UNITS} documents or windows."
    )


def verdict_line(candidate: CandidateResult) -> str:
    """Return the verdict and its first reason in one line, without the name of the candidate."""
    verdict = candidate.verdict
    if verdict.outcome is Outcome.PASSED:
        measured = ", ".join(_measured(check) for check in verdict.checks if check.text == candidate.overall.name)
        lost = "".join(
            f"; {_measured(check)} on {check.text}" for check in verdict.checks if check.counted == "prompts"
        )
        name, several = candidate.overall.name, len(candidate.texts) > 1
        kept = f"every bound is kept on {'every text' if several else name}{_within_margin_text(verdict)}"
        return f"PASSED: {kept}{f'; on {name}' if several else ''}: {measured}{lost}"
    first, *others = _ranked(verdict.unmet)
    more = f"; and {len(others)} more" if others else ""
    return f"{OUTCOMES[verdict.outcome]}: {check_text(first)}{more}"


def _within_margin_text(verdict: Verdict) -> str:
    """Say which bounds are kept only within the margin; empty if none."""
    within = verdict.within_margin
    if not within:
        return ""
    first, more = check_text(_ranked(within)[0]), f", and {len(within) - 1} more" if len(within) > 1 else ""
    margin = f"a margin of {percent(verdict.tolerance.margin)} of the allowed loss"
    return f", {len(within)} of {len(verdict.checks)} within {margin}: {first}{more}"


#: Nobody scores more tokens to decide: hours on a processor with small models.
_MOST_TOKENS = 1_000_000


#: What a check's intervals are of, and what would decide it.
_UNITS = {"tokens": "documents or windows", "prompts": "prompts"}
_FRESH = {"tokens": "tokens of fresh text", "prompts": "prompts"}


def verdict_count(candidate: CandidateResult) -> str:
    """Return the verdict and the number of checks with the same outcome."""
    verdict = candidate.verdict
    word = {Outcome.PASSED: "kept", Outcome.FAILED: "broken", Outcome.UNDECIDED: "undecided"}[verdict.outcome]
    count = len(verdict.unmet) or len(verdict.checks)
    return f"{OUTCOMES[verdict.outcome]}: {count} of {len(verdict.checks)} bounds are {word}"


def unmet_lines(candidate: CandidateResult) -> list[str]:
    """Return a line for each check with the outcome of the verdict, the clearest first."""
    return [check_text(check) for check in _ranked(candidate.verdict.unmet)]


def check_text(check: Check) -> str:
    bound = (
        f"at least {_limit(check, check.bound)} is wanted"
        if check.quantity == SAME_TOP1
        else f"at most {_limit(check, check.bound)} is allowed"
    )
    undecided = check.outcome is Outcome.UNDECIDED
    if check.within_margin or (undecided and check.estimate.known):
        bound += f", {_limit(check, check.limit)} with the margin"
    text = f"{_measured(check)} on {check.text} ({bound})"
    if not undecided:
        return text
    if not check.estimate.known:
        return f"{text}: too few {_UNITS[check.counted]} for an interval"
    if check.tokens_needed is None:
        return f"{text}: {_nearness(check)}; without a margin no number of tokens would decide"
    more = _rounded(max(check.tokens_needed - check.tokens, 1))
    if more > _MOST_TOKENS:
        return (
            f"{text}: {_nearness(check)}; no practical amount of text would decide, because it would take more than "
            f"{_MOST_TOKENS:,} {check.counted}"
        )
    return f"{text}: {_nearness(check)}; about {more:,} more {_FRESH[check.counted]} would decide"


def _nearness(check: Check) -> str:
    """Say why a check is undecided: how far the value is from the bound, beside half the width of the interval."""
    estimate, as_percent = check.estimate, _is_fraction(check)
    if check.few_units and check.counted == "prompts":
        return f"the bound is kept, but a pass needs {FEWEST_TO_PASS} prompts that the baseline answers well"
    if check.few_units:
        return (
            f"the bound is kept, but a pass needs {FEWEST_TO_PASS} documents or windows that are worth "
            f"{FEWEST_EFFECTIVE:.0f} independent ones, and these are worth {_effective(estimate.effective_units)}"
        )
    if not min(estimate.low, estimate.high) <= check.bound <= max(estimate.low, estimate.high):
        return "the bound is broken, but among so many checks that may be chance (Holm)"
    scale, unit = (100, " percentage points") if as_percent else (1, "")
    distance, reach = scale * (estimate.value - check.bound), scale * (estimate.high - estimate.low) / 2
    side = "above" if distance > 0 else "below"
    where = f"{number(abs(distance), 2)}{unit} {side} it" if distance else "on it"
    return f"the bound lies in the interval; the value lies {where}, half the interval is {number(reach, 2)} wide"


def _effective(units: float | None) -> str:
    return "?" if units is None else f"{units:.1f}" if units < _ROUND else f"{units:,.0f}"


def effective_text(summaries: Sequence[Summary]) -> str:
    """Say how many independent units the units of each text are worth; empty where they were not counted."""
    counted = [summary for summary in summaries if summary.effective_units is not None]
    texts = (
        f"{summary.name} {_effective(summary.effective_units)} of {summary.units:,} {units_name(summary)}"
        for summary in counted
    )
    return f"independent units, of neighbours that are alike: {', '.join(texts)}" if counted else ""


def units_name(summary: Summary) -> str:
    return f"{summary.unit.replace(' or ', 's or ')}s"


def _rounded(count: int) -> int:
    unit = int(10 ** max(len(str(count)) - 2, 0))
    return -(-count // unit) * unit


def _measured(check: Check) -> str:
    signed = check.quantity == INCREASE
    return f"{check.quantity} {shown(check.estimate, as_percent=_is_fraction(check), signed=signed)}"


def _is_fraction(check: Check) -> bool:
    return check.quantity in (INCREASE, SAME_TOP1) or check.counted == "prompts"


def _limit(check: Check, value: float) -> str:
    return percent(value) if _is_fraction(check) else short(value)


def _ranked(checks: Sequence[Check]) -> list[Check]:
    """Sort checks by their distance from the bound in half widths of the interval; those without interval are last."""

    def sort_key(check: Check) -> float:
        estimate = check.estimate
        if math.isinf(estimate.value):
            return -math.inf
        reach = (estimate.high - estimate.low) / 2 + 1e-12
        return -abs(estimate.value - check.bound) / reach if estimate.known else math.inf

    return sorted(checks, key=sort_key)


def partial_text(comparison: Comparison) -> str:
    if not comparison.partial:
        return ""
    share = comparison.tokens_done / comparison.tokens_total
    return (
        f"PARTIAL: the run was interrupted after {comparison.tokens_done:,} of {comparison.tokens_total:,} tokens "
        f"({share:.0%}); everything here is of those."
    )


def model_names(comparison: Comparison) -> list[str]:
    """Return distinct short names of the baseline and the candidates."""
    return short_names([comparison.baseline.name, *(candidate.model.name for candidate in comparison.candidates)])


def weights_text(model: ModelRecord) -> str:
    return "unknown" if model.nbytes is None else size_text(model.nbytes)


def formats_text(model: ModelRecord) -> str:
    """Return the formats that a model computed in besides that of its weights."""
    if (served := model.served) is not None:
        return (
            f"every KL divergence is a lower bound: the server gives the probabilities of {served.alternatives} "
            f"tokens, and those that it does not name have {served.unnamed_share:.2%} of the baseline's probability "
            "on average; perplexity and same top-1 are exact"
        )
    lm_head = f", output layer in {model.lm_head}" if model.lm_head else ""
    cache = f", keys and values in {model.kv_cache}" if model.kv_cache else ""
    code = "transformers' code" if model.runner == "transformers" else "minifloat's engine, as it is served"
    return f"run by {code}: inputs of the linears in {model.activations}{lm_head}{cache}"


def smaller(comparison: Comparison, candidate: CandidateResult) -> str:
    """Say how many times smaller than the baseline the candidate is; empty if the size is unknown."""
    before, after = comparison.baseline.nbytes, candidate.model.nbytes
    return "" if before is None or after is None else f"{before / max(after, 1):.2f}x smaller"


def position_label(positions: PositionRange) -> str:
    return f"{positions.low:,} to {positions.high:,}"


def late_text(late: LateChange) -> str:
    """Say whether the models differ more late in the windows than early in them."""
    where = f"positions from {late.late_start:,} on"
    change = shown(late.change, signed=True)
    found = (
        f"mean KL {number(late.late_kl, 3)} there and {number(late.early_kl, 3)} at positions below "
        f"{late.early_end:,}, change {change} nats per token"
    )
    if not late.change.known:
        return f"Too few documents or windows to say whether {where} are worse: {found}"
    if late.worse:
        return f"Late positions are worse: the models differ more at {where}: {found}"
    return f"Late positions are not significantly worse: at {where}: {found}"


def generation_text(generation: GreedyDivergence) -> str:
    same = shown(generation.identical_fraction, as_percent=True)
    match = shown(generation.mean_prefix_match, as_percent=True)
    half = (
        f"half of them had parted by token {generation.median:g}"
        if generation.median is not None
        else "most never parted"
    )
    return (
        f"{generation.prompts - generation.parted} of {generation.prompts} prompts ({same}) were continued by the same "
        f"{generation.new_tokens} tokens; {half}; on average the first {match} of a continuation were the same"
    )


def behavior_lines(behavior: Behavior) -> list[str]:
    """Say how the models behave: each share, how alike the answers are, their thinking, and what hides behind it."""
    lines = [
        f"{share.quantity} {share.baseline} -> {share.candidate} of {share.prompts:,}, difference "
        f"{share_difference(share)}; better : worse {share.better} : {share.worse}"
        for share in behavior.shares
    ]
    lines += [
        f"{row.quantity} of both models at {row.same} of {row.prompts:,} prompts with tools "
        f"({shown(row.share, as_percent=True)})"
        for row in behavior.agreement
    ]
    if (thinking := behavior.thinking) is not None:
        lines.append(
            f"thinking {number(thinking.baseline, 3)} -> {number(thinking.candidate, 3)} tokens on average, change "
            f"{shown(thinking.change, signed=True)}"
        )
    if any(behavior.cut_off):
        lines.append(
            f"cut off at {behavior.new_tokens:,} tokens: {behavior.cut_off[0]} -> {behavior.cut_off[1]} answers "
            "(--behavior-tokens)"
        )
    if "generic" in behavior.tool_formats:
        lines.append(
            "the chat template has no tools: they are told in the system message, in the generic form of `serve`"
        )
    return lines


def share_difference(share: BehaviorShare) -> Pair:
    """Return candidate - baseline with its interval, in percentage points."""
    value, ends = shown(share.difference, as_percent=True, signed=True)
    return Pair(value.replace("%", " pp"), ends)


def attribution_text(attribution: Attribution) -> str:
    return (
        f"{attribution.measured} of {attribution.of} modules were measured alone, on {attribution.tokens:,} tokens, "
        f"in {number(attribution.seconds, 2)} s"
    )


def suggestion_text(suggestion: Suggestion) -> str:
    """Describe the effect of leaving the suggested modules unquantized, with the verdict on all texts if it has one."""
    sample = f"the {suggestion.tokens:,} tokens of the sample"
    more_time = "" if suggestion.finished else "; the time was up before fewer modules were tried (--attribute-seconds)"
    if suggestion.everything and not suggestion.reaches:
        return (
            f"On {sample}, it is outside of the tolerance even with every module unquantized: the models differ by "
            "more than the modules that an override of quantize keeps"
        )
    if suggestion.everything:
        only = "only " if suggestion.finished else ""
        return (
            f"On {sample}, {only}with every module unquantized it is inside the tolerance"
            f"{more_time or ': another scheme is the better answer'}"
        )
    count = len(suggestion.modules)
    modules = f"{count} {'module' if count == 1 else 'modules'}"
    effect = (
        f"Leaving {modules} unquantized costs {size_text(suggestion.extra_bytes)} and brings the mean KL "
        f"from {number(suggestion.kl_before, 3)} to {number(suggestion.kl_after, 3)} and the perplexity increase to "
        f"{change(suggestion.ppl_increase_after)} on {sample}{more_time}"
    )
    if suggestion.verdict is not None:
        return f"{effect}. {_confirmed_text(suggestion.verdict)}"
    end = f"{'inside' if suggestion.reaches else 'not yet inside'} the tolerance there, without an interval"
    return f"{effect}: {end}. It is no verdict on all texts: quantize with these options and compare"


def _confirmed_text(verdict: Verdict) -> str:
    if verdict.outcome is Outcome.PASSED:
        last = verdict.checks[-1].text
        measured = ", ".join(_measured(check) for check in verdict.checks if check.text == last)
        within = _within_margin_text(verdict)
        return f"Measured on every text, it is inside the tolerance{within}; on {last}: {measured}"
    first, *others = _ranked(verdict.unmet)
    more = f"; and {len(others)} more" if others else ""
    said = "outside of the tolerance" if verdict.outcome is Outcome.FAILED else "not decided"
    return f"Measured on every text, it is {said}: {check_text(first)}{more}"


def override_options(suggestion: Suggestion | None) -> list[str]:
    """Return options for ``minifloat quantize``; none if there is no suggestion, or if it keeps every module."""
    if suggestion is None or suggestion.everything:
        return []
    return [f"--override {shlex.quote(override)}" for override in suggestion.overrides]
