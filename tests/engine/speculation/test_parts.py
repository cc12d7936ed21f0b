"""The parts of speculation: races, verification, lengths of drafts, look-up."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from minifloat.engine.drafters import PromptLookup
from minifloat.engine.sampling import NonFiniteLogits, SamplingParams, SamplingState, TokenChoice, race, verify
from minifloat.engine.speculation import DraftLength, SpeculationStats

VOCAB = 40
DRAWS = 20_000


def expected_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Temperature, min_p, top_k, top_p in float64, by their definitions."""
    p = np.exp(logits.astype(np.float64) / params.temperature)
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = p[order].cumsum() - p[order]
    p[order[before >= params.top_p]] = 0
    result: np.ndarray = p / p.sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.5),
        SamplingParams(seed=3, top_k=7),
        SamplingParams(seed=4, top_p=0.8),
        SamplingParams(seed=5, min_p=0.1, temperature=1.5),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p"],
)
def test_races_draw_from_the_distribution(params: SamplingParams) -> None:
    logits = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
    state = SamplingState(params, [], races=True)
    drawn = np.zeros(VOCAB)
    for _ in range(DRAWS):
        drawn[state.draw(logits)] += 1
        state.add(0)
    expected = expected_distribution(logits, params) * DRAWS
    assert drawn[expected == 0].sum() == 0
    often = expected >= 5
    chi_squared = ((drawn - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum() - 1
    assert chi_squared < degrees + 4 * math.sqrt(2 * degrees)  # 4 standard deviations


def test_races_of_near_distributions_agree_nearly_as_often_as_their_probabilities_allow() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(0, 2, 1000).astype(np.float32)
    near = (logits + generator.normal(0, 0.1, 1000)).astype(np.float32)
    params = SamplingParams(seed=9)
    p, q = expected_distribution(logits, params), expected_distribution(near, params)
    most = np.minimum(p, q).sum()
    state = SamplingState(params, [], races=True)
    agreed = 0
    for _ in range(2000):
        times = state.times(1000)
        agreed += race(logits, params, times) == race(near, params, times)
        state.add(0)
    assert agreed / 2000 > (2 * most / (2 - most)) - 0.15 or agreed / 2000 > most - 0.05
    assert agreed / 2000 > most - 0.05


def test_times_depend_on_seed_and_position_only() -> None:
    params = SamplingParams(seed=3)
    first, second = SamplingState(params, [], races=True), SamplingState(params, [1, 2], races=True)
    ahead = first.times(VOCAB, 2).copy()
    second.add(5)
    second.add(6)
    assert np.array_equal(second.times(VOCAB), ahead)
    assert not np.array_equal(second.times(VOCAB, 1), ahead)
    other = SamplingState(SamplingParams(seed=4), [], races=True)
    assert not np.array_equal(other.times(VOCAB, 2), ahead)


def rows_for(*tokens: int) -> torch.Tensor:
    """Logits whose largest is at each of some tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float()


def chosen(choices: list[Any]) -> list[int]:
    return [choice.token for choice in choices]


def test_drafts_are_accepted_up_to_the_first_that_the_model_does_not_choose() -> None:
    params = SamplingParams(temperature=0.0)
    states = [SamplingState(params, []) for _ in range(4)]
    logits = torch.cat([rows_for(4, 5, 6), rows_for(4, 5, 6), rows_for(7), rows_for(1, 2, 3)])
    found = verify(logits, states, [(4, 5), (4, 9), (), (9, 2)])
    assert [chosen(choices) for choices in found] == [[4, 5, 6], [4, 5], [7], [1]]


def test_logits_that_are_not_finite_end_their_own_sequence_only() -> None:
    params = SamplingParams(temperature=0.0)
    logits = torch.cat([rows_for(4, 5, 6), rows_for(4, 5)])
    logits[1, 3] = math.nan
    first, second = verify(logits, [SamplingState(params, []) for _ in range(2)], [(4, 5), (4,)])
    assert first[0] == TokenChoice(4)
    assert isinstance(first[1], NonFiniteLogits)
    assert len(first) == 2
    assert chosen(second) == [4, 5]


@pytest.mark.parametrize("acceptance", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("cost", [0.1, 0.55, 2.0])
def test_the_length_gives_the_most_tokens_per_second(acceptance: float, cost: float) -> None:
    length = DraftLength(7, cost)
    steps = [1.0 + 0.05 * tokens for tokens in range(9)]
    generator = np.random.default_rng(0)
    for _ in range(300):
        for tokens in range(1, 9):
            length.computed(tokens, steps[tokens])
        length.drafted(1, cost)
        accepted = int((generator.random(7) < acceptance).cumprod().sum())
        length.verified(7, accepted)
    a = length.acceptance
    assert a == pytest.approx(acceptance, abs=0.2)
    rates = [sum(a**i for i in range(k + 1)) / (k * cost + steps[k + 1]) for k in range(8)]
    assert length.choose(1) == int(np.argmax(rates))


def test_drafts_stop_where_a_step_costs_more_for_each_token_and_begin_again() -> None:
    length = DraftLength(4, 0.5)
    assert length.choose(1) > 0
    for batch in (1, 32) * 3:
        for tokens in range(1, 6):
            length.computed(batch * tokens, 1.0 if batch == 1 else 1.0 * tokens)
        length.drafted(batch, 0.5)
    assert length.choose(32) == 0
    assert length.choose(1) > 0
    tried = [length.choose(32) for _ in range(100)]
    assert set(tried) == {0, 1}  # now and then one draft is tried
    assert tried.count(1) <= 4


def test_single_slow_steps_do_not_change_the_length() -> None:
    length = DraftLength(7, 0.25)
    generator = np.random.default_rng(0)
    chosen: list[int] = []
    for _ in range(1000):
        count = length.choose(1)
        chosen.append(count)
        slow = 4.0 if generator.random() < 0.1 else 1.0
        length.computed(1 + count, slow * (1.0 + 0.02 * count))
        if count:
            length.drafted(1, 0.25)
            length.verified(count, int((generator.random(count) < 0.8).cumprod().sum()))
    a = 0.8
    rates = [sum(a**i for i in range(k + 1)) / (0.25 * k + 1.0 + 0.02 * k) for k in range(8)]
    gained = sum(rates[count] for count in chosen) / len(chosen)
    assert gained >= 0.97 * max(rates)


@pytest.mark.parametrize("measured", [1, 5, 8])
def test_a_draft_that_is_never_right_is_given_up(measured: int) -> None:
    length = DraftLength(7, 0.3)
    for _ in range(3):
        length.computed(measured, 0.02)
        length.drafted(1, 0.006)
    for _ in range(200):
        length.verified(7, 0)
    assert length.acceptance < 0.05
    assert length.choose(1) == 0


@pytest.mark.parametrize(
    ("tokens", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], 3, (3, 4, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], 1, (4,)),  # the last occurrence counts
        ([9, 1, 2, 3, 5, 8, 1, 2, 3], 2, (5, 8)),
        ([1, 2, 3, 4, 5], 3, ()),
        ([7], 3, ()),
        ([7, 7, 7, 7], 3, (7,)),
        ([0x01020304, 0x02030405, 5, 0x01020304, 0x02030405], 2, (5, 0x01020304)),
        ([0x0101, 0x0101_0101, 3, 0x01010101, 0x0101], 2, ()),  # the same bytes at other places are no match
    ],
)
def test_look_up_proposes_what_followed_the_same_ending(
    tokens: list[int], count: int, expected: tuple[int, ...]
) -> None:
    sequence: Any = SimpleNamespace(tokens=tokens)
    assert PromptLookup().propose([sequence], [count]) == [expected]


def test_look_up_equals_a_search_token_by_token() -> None:
    generator = np.random.default_rng(3)
    for _ in range(200):
        tokens = generator.integers(0, 3, 30).tolist()
        expected: tuple[int, ...] = ()
        for length in (4, 3, 2):
            places = [i for i in range(len(tokens) - length) if tokens[i : i + length] == tokens[-length:]]
            if places:
                expected = tuple(tokens[places[-1] + length :][:5])
                break
        sequence: Any = SimpleNamespace(tokens=tokens)
        assert PromptLookup().propose([sequence], [5]) == [expected]


def test_counts_add_up() -> None:
    first = SpeculationStats(accepted_per_position=[0, 0, 0])
    first.verified(3, 2)
    first.verified(3, 0)
    second = SpeculationStats(accepted_per_position=[0, 0, 0])
    second.verified(1, 1)
    total = first + second
    assert (total.drafts, total.draft_tokens, total.accepted_tokens) == (3, 7, 3)
    assert total.accepted_per_position == [2, 1, 0]
    assert total.acceptance == pytest.approx(3 / 7)
    assert total.tokens_per_step == 2.0
    assert total.to_dict()["num_accepted_tokens_per_pos"] == [2, 1, 0]
