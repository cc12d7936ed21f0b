"""Hand-made results of `compare_models` with plausible numbers, for tests that need no model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from minifloat.evaluate.compare.attribution import Attribution, ModuleDamage, Suggestion
from minifloat.evaluate.compare.behavior import Answer, AnswerPair, Answers, Behavior, PromptNames, behavior_of
from minifloat.evaluate.compare.generation import ContinuationPair, GreedyDivergence
from minifloat.evaluate.compare.intervals import Estimate
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.result import (
    CandidateResult,
    Comparison,
    LikelyToken,
    ModelRecord,
    TextRecord,
    WorstToken,
)
from minifloat.evaluate.compare.summary import CURVE_FRACTIONS, MARGIN_EDGES, MarginBin, Summary
from minifloat.evaluate.compare.tasks import TaskDifference, TaskScore
from minifloat.evaluate.compare.verdict import judge

MIB = 1 << 20
#: Hostile text: markup, a pipe, an escape sequence, a mark of direction, half of a surrogate pair, card markers.
HOSTILE = "<script>|`*_[x](y)\x1b[31m\u202e\ud800\x00</td> --> | \n# https://evil.example www.evil.example @all ]]>"


def around(value: float, reach: float) -> Estimate:
    return Estimate(value, value - reach, value + reach)


def make_summary(name: str = "prose.txt", damage: float = 1.0, tokens: int = 12_345, **changes: Any) -> Summary:
    """Return the summary of a text; a `damage` of 1 keeps all bounds, 10 breaks all, and 0 is the baseline itself."""
    kl, size = 0.004 * damage, 0.0004 * damage
    margins = tuple(
        MarginBin(low, high, tokens // 8, 1 - 0.2 * min(damage, 4) / (4 + 10 * low), kl)
        for low, high in zip(MARGIN_EDGES, (*MARGIN_EDGES[1:], math.inf), strict=True)
    )
    summary = Summary(
        name=name,
        unit="document",
        units=64,
        tokens=tokens,
        nbytes=4.2 * tokens,
        baseline_perplexity=8.375,
        candidate_perplexity=8.375 * (1 + 0.0027 * damage),
        perplexity_ratio=around(1 + 0.0027 * damage, 0.001 * damage),
        baseline_bits_per_byte=0.9123,
        candidate_bits_per_byte=0.9123 + 0.001 * damage,
        kl_mean=around(kl, size),
        kl_median=around(kl / 3, size / 4),
        kl_p99=around(15 * kl, 20 * size),
        kl_p999=around(60 * kl, 100 * size),
        kl_max=200 * kl,
        same_top1=around(1 - 0.02 * damage, 0.001 * damage),
        topk_overlap=around(1 - 0.012 * damage, 0.001 * damage),
        margins=margins,
        kl_curve=tuple((fraction, kl * 0.4 * (fraction / (1 - fraction)) ** 0.75) for fraction in CURVE_FRACTIONS),
    )
    return replace(summary, **changes)


def make_candidate(
    name: str = "models/storybook-fp8-block", damage: float = 1.0, texts: tuple[str, ...] = ("prose.txt", "code.txt")
) -> CandidateResult:
    """Return a candidate with scores on some texts, without generation, attribution and tasks."""
    summaries = tuple(make_summary(text, damage * (1 + index / 4)) for index, text in enumerate(texts))
    overall = make_summary("all texts", damage * 1.1, 12_345 * len(texts)) if len(texts) > 1 else summaries[0]
    judged = (*summaries, overall) if len(texts) > 1 else summaries
    return CandidateResult(
        ModelRecord(name, 9 * MIB, "E4M3 per token (dynamic)"),
        summaries,
        overall,
        judge(judged, Tolerance()),
        worst=tuple(make_worst(kl=3.2 / (1 + index)) for index in range(3)),
    )


def judged_candidate(summary: Summary, candidate: CandidateResult | None = None) -> CandidateResult:
    """Return a candidate that was measured on one text."""
    verdict = judge([summary], Tolerance())
    return replace(candidate or make_candidate(), texts=(summary,), overall=summary, verdict=verdict)


def make_worst(token: str = " dragon", context: str = "Once upon a time there was a", kl: float = 3.2) -> WorstToken:
    return WorstToken(
        text="prose.txt",
        document=3,
        position=512,
        context=context,
        token=token,
        kl=kl,
        baseline=tuple(LikelyToken(word, share) for word, share in zip((token, " cat", " dog", "\n", "!"), _SHARES)),  # noqa: B905
        candidate=tuple(LikelyToken(word, share) for word, share in zip((" cat", " dog", "\n", token, "?"), _SHARES)),  # noqa: B905
    )


_SHARES = (0.61, 0.2, 0.1, 0.03, 0.002)


def make_generation() -> GreedyDivergence:
    first = (None, 3, 12, 17, None, 40, 41, 64, None, 90)
    same = "there was a little girl named Lily. She loved to play outside"
    samples = (
        ContinuationPair(
            "Once upon a time", f"{same} in the park.\n\nOne day, she saw", f"{same} with her toys.\nOne day,", 3
        ),
        ContinuationPair("Tom and Sam were", f" best friends. {same}.", f" best friends. {same} all day long.", 40),
        ContinuationPair("The end", same, same, None),
    )
    return GreedyDivergence(10, 128, 7, first, 41.0, around(0.3, 0.24), around(0.51, 0.2), samples)


def make_attribution(layers: int = 4, *, measured: bool = True) -> Attribution:
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    rows = [
        ModuleDamage(
            f"model.layers.{layer}.{name}",
            30.0 - 2 * index + layer,
            0.001 * (index + 1) / (layer + 1) if measured else None,
            0.004 if measured and layer == 0 else None,
            65_536 * (index + 1),
        )
        for layer in range(layers)
        for index, name in enumerate(names)
    ]
    rows.sort(key=lambda row: (-(row.kl_alone or 0.0), row.sqnr_db))
    overrides = (r"model\.layers\.0\.mlp\.down_proj=bf16",)
    suggestion = Suggestion(
        overrides,
        ("model.layers.0.mlp.down_proj",),
        extra_bytes=262_144,
        kl_before=0.04,
        kl_after=0.012,
        ppl_increase_before=0.03,
        ppl_increase_after=0.008,
        same_top1_before=0.95,
        same_top1_after=0.98,
        reaches=True,
        everything=False,
        tokens=4096,
    )
    return Attribution(tuple(rows), 4096, 31.4, len(rows), len(rows), suggestion if measured else None)


def make_tasks() -> tuple[TaskDifference, ...]:
    scores = TaskScore(0.624, 0.0134), TaskScore(0.611, 0.0136)
    strict = "exact_match,strict-match"
    ppl = TaskScore(12.1, math.nan), TaskScore(12.2, math.nan), Estimate(0.1, math.nan, math.nan)
    return (
        TaskDifference("gsm8k", strict, 1319, *scores, around(-0.013, 0.011), 97.9, 40, 57, 0.1, True, 5),
        TaskDifference("hellaswag", "acc_norm", 500, *scores[::-1], around(0.013, 0.02), 102.1, 21, 14, 0.31, True, 0),
        TaskDifference("wikitext", "word_perplexity", 62, *ppl, 99.2, 20, 42, None, False, 0),
    )


def make_behavior(good: Sequence[tuple[bool, bool]] = ((True, True),) * 39 + ((True, False),)) -> Behavior:
    """Return the behavior of two models, of which each prompt says whether they call the right function."""

    def answers(model: str, marks: Iterable[bool]) -> Answers:
        return Answers(
            model,
            tuple(
                Answer(f"{model} {mark}", (("add" if mark else "sub", "{}"),), {"right functions": mark}, None, False)
                for mark in marks
            ),
            "generic",
        )

    count = len(good)
    names = tuple(f"prompt {number}" for number in range(count))
    prompts = PromptNames("agent.jsonl", "ab" * 32, 512, names, ("1 + 2?",) * count, (True,) * count)
    baseline, candidate = zip(*good, strict=True)
    return behavior_of(prompts, answers("baseline", baseline), answers("candidate", candidate))


def make_comparison(*candidates: CandidateResult, **changes: Any) -> Comparison:
    """Return a comparison of these candidates; by default of one candidate that passes."""
    candidates = candidates or (make_candidate(),)
    comparison = Comparison(
        baseline=ModelRecord("models/storybook", 18 * MIB, "BF16"),
        candidates=candidates,
        window=256,
        dtype="bfloat16",
        texts=tuple(TextRecord(text.name, 64, text.tokens, "ab" * 32) for text in candidates[0].texts),
        tokens_done=24_690,
        tokens_total=24_690,
        seconds=12.34,
        machine={"date": "2025-11-22", "minifloat": "0.1.0", "torch": "2.13.0", "threads": 2, "instruction_set": None},
        command="minifloat compare models/storybook models/storybook-fp8-block",
    )
    return replace(comparison, **changes)


def full_candidate(name: str = "models/storybook-fp8-block", damage: float = 1.0) -> CandidateResult:
    """Return a candidate with scores, generation, attribution and tasks."""
    return replace(
        make_candidate(name, damage),
        generation=make_generation(),
        attribution=make_attribution(),
        tasks=make_tasks(),
        behavior=make_behavior(),
    )


def hostile_comparison() -> Comparison:
    """Return a comparison in which every text from a model or a file name is `HOSTILE`."""
    candidate = full_candidate(f"models/{HOSTILE}")
    sample = ContinuationPair(HOSTILE, f"a{HOSTILE}", f"b{HOSTILE}", 0)
    task = replace(make_tasks()[0], task=HOSTILE, metric=HOSTILE)
    assert candidate.generation is not None
    assert candidate.attribution is not None
    candidate = replace(
        candidate,
        texts=tuple(replace(text, name=HOSTILE) for text in candidate.texts),
        worst=(replace(make_worst(HOSTILE, HOSTILE), text=HOSTILE),),
        generation=replace(candidate.generation, samples=(sample,)),
        attribution=replace(candidate.attribution, rows=(replace(candidate.attribution.rows[0], module=HOSTILE),)),
        tasks=(task,),
        behavior=replace(make_behavior(), source=HOSTILE, examples=(AnswerPair(*[HOSTILE] * 5),)),
    )
    candidate = replace(candidate, verdict=judge(candidate.summaries, Tolerance(0, 0, 1)))
    return make_comparison(
        candidate, command=f"minifloat compare {HOSTILE}", machine={HOSTILE: HOSTILE}, notes=(HOSTILE,)
    )
