"""KL divergence by position: planted late losses are found, others are not."""

from dataclasses import replace

import numpy as np
import pytest
from comparisons import full_candidate, make_comparison

from minifloat.evaluate.compare.document import document
from minifloat.evaluate.compare.metrics import TokenScores
from minifloat.evaluate.compare.result import CandidateResult
from minifloat.evaluate.compare.summary import Positions, Units
from minifloat.evaluate.compare.summary import by_position as positions_of
from minifloat.evaluate.compare.words import late_text
from minifloat.report import html, markdown


def scores_of(late_factor: float, windows: int = 24, width: int = 2048, seed: int = 0, short: int = 0) -> TokenScores:
    """Skewed KL divergences of windows, each of its own level, multiplied by a factor after 3/4 of the window."""
    rng = np.random.default_rng(seed)
    widths = [width] * windows + [100] * short
    position = np.concatenate([np.arange(1, w) for w in widths]).astype(np.int32)
    unit = np.repeat(np.arange(len(widths)), [w - 1 for w in widths])
    level = np.exp(rng.normal(0, 0.5, len(widths))) * np.where(np.array(widths) < width, 10, 1)
    kl = level[unit] * rng.lognormal(-6, 1.2, len(unit))
    kl[position >= width * 3 // 4] *= late_factor
    zeros = np.zeros(len(unit))
    return TokenScores(unit, zeros, zeros, kl, zeros == 0, zeros.astype(np.uint8), zeros.astype(np.float32), position)


def by_position(scores: TokenScores) -> Positions | None:
    return positions_of(scores, Units.of(scores, [(len(scores), "document")]))


def test_ranges_double_and_hold_every_token_once() -> None:
    scores = scores_of(1.0, width=3000)
    positions = by_position(scores)
    assert positions is not None
    ends = [(found.low, found.high) for found in positions.ranges]
    assert ends == [(0, 127), (128, 511), (512, 1023), (1024, 2047), (2048, 2999)]
    assert sum(found.tokens for found in positions.ranges) == len(scores)
    for found in positions.ranges:
        inside = (scores.position >= found.low) & (scores.position <= found.high)
        assert found.kl_mean.value == pytest.approx(scores.kl[inside].mean())
        assert (found.tokens, found.units) == (inside.sum(), 24)
        assert found.kl_mean.low < found.kl_mean.value < found.kl_mean.high


def test_a_loss_at_late_positions_is_found() -> None:
    positions = by_position(scores_of(1.5))
    assert positions is not None
    assert positions.late is not None
    assert (positions.late.early_end, positions.late.late_start) == (512, 1024)
    assert positions.late.worse
    assert late_text(positions.late).startswith("Late positions are worse: the models differ more at positions from")


def test_an_even_loss_is_seldom_called_a_late_one() -> None:
    late = [by_position(scores_of(1.0, seed=seed, width=600)) for seed in range(60)]
    worse = [found.late.worse for found in late if found is not None and found.late is not None]
    assert len(worse) == 60
    assert sum(worse) <= 5  # 2.5% of 60 are expected
    text = [late_text(found.late) for found in late if found is not None and found.late is not None]
    assert sum(line.startswith("Late positions are not significantly worse") for line in text) == 60 - sum(worse)


def test_windows_without_late_tokens_do_not_hide_a_late_loss() -> None:
    """The short windows are ten times as bad, so that the mean of all early tokens is above that of the late ones."""
    scores = scores_of(1.5, short=300)
    positions = by_position(scores)
    assert positions is not None
    assert positions.late is not None
    assert scores.kl[scores.position < 512].mean() > scores.kl[scores.position >= 1024].mean()
    assert positions.late.worse


def test_few_windows_are_too_few_to_say() -> None:
    positions = by_position(scores_of(3.0, windows=7))
    assert positions is not None
    assert positions.late is not None
    assert not positions.late.worse
    assert late_text(positions.late).startswith("Too few documents or windows to say whether positions from 1,024 on")
    assert not positions.ranges[0].kl_mean.known


def test_short_windows_have_no_positions() -> None:
    assert by_position(scores_of(1.0, width=512)) is None
    assert by_position(scores_of(1.0, width=513)) is not None


def with_positions(factor: float) -> CandidateResult:
    candidate = full_candidate()
    return replace(candidate, overall=replace(candidate.overall, positions=by_position(scores_of(factor))))


def test_page_card_and_json_show_positions() -> None:
    comparison = make_comparison(with_positions(1.5))
    page, card = html.write(document(comparison)), markdown.write(document(comparison))
    for text in (page, card):
        assert "Late positions are worse" in text
    assert "KL divergence by position" in page
    assert "1,024 to 2,047 (24,576 tokens)" in page
    values = comparison.to_dict()["candidates"][0]["overall"]["positions"]
    assert [found["low"] for found in values["ranges"]] == [0, 128, 512, 1024]
    assert values["late"]["change"]["low"] > 0
    assert "KL divergence by position" not in html.write(document(make_comparison()))
