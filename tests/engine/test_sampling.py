"""Parameters are checked, logits are changed and tokens drawn as others do it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import is_full
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minifloat.engine.sampling import NonFiniteLogits, SamplingParams, SamplingState, TokenChoice, draw, sample
from minifloat.errors import UsageError


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [-0.1, math.nan, math.inf, 1e9],
        "top_p": [0.0, 1.1, -1.0, math.nan],
        "min_p": [-0.1, 1.5, math.nan],
        "top_k": [-1, 2**31],
        "repetition_penalty": [0.0, -1.0, 1e-30, 0.0099, 101.0, math.inf],
        "presence_penalty": [2.1, -2.1, math.nan],
        "frequency_penalty": [2.1, -2.1, math.nan],
        "seed": [2**64, -(2**63) - 1],
        "max_tokens": [-1],
        "min_tokens": [-1],
        "stop": [("",), ("a",) * 17, ("a" * 1001,)],
        "stop_token_ids": [tuple(range(17))],
        "logprobs": [-1, 21],
        "prompt_logprobs": [-1, 21],
        "forbidden": [((),), (tuple(range(65_537)),)],
        "logit_bias": [{1: 101.0}, {1: math.nan}, dict.fromkeys(range(1025), 1.0)],
    }.items(),
)
def test_values_out_of_range_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"^{name}: expected"):
            SamplingParams(**{name: value})
    with pytest.raises(UsageError, match=r"^min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_tokens_that_would_end_a_forbidden_sequence_are_forbidden(words: list[list[int]], output: list[int]) -> None:
    state = SamplingState(SamplingParams(forbidden=tuple(map(tuple, words))), [0, 1, 2, 3])
    for token in output:
        state.add(token)
    found = np.flatnonzero(np.isinf(state.change(np.zeros(5, np.float32)))).tolist()
    assert found == [token for token in range(5) if any([*output, token][-len(word) :] == word for word in words)]


def test_a_text_whose_every_token_is_forbidden_is_an_error_of_the_request() -> None:
    state = SamplingState(SamplingParams(temperature=0.0, forbidden=((0,), (1,))), [])
    (choice,) = sample(torch.zeros(1, 2), [state])
    assert isinstance(choice, UsageError)


def logits_of(seed: int, vocab: int) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities by transformers' processors, in the order of ours."""
    scores = (
        TemperatureLogitsWarper(params.temperature)(None, logits[None]) if params.temperature != 1 else logits[None]
    )
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores[0].double().softmax(-1)


@settings(max_examples=60 if is_full() else 12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([50, 3000]),
    st.sampled_from([0.5, 1.0, 2.5]),
    st.sampled_from([0, 1, 7, 2000]),
    st.sampled_from([0.1, 0.7, 0.99, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(seed, vocab)
    steps = 4000
    drawn = torch.zeros(vocab, dtype=torch.float64)
    for index in range(steps):
        drawn[draw(logits.numpy(), params, (index + 0.5) / steps)] += 1 / steps
    # The inverse of the cumulative distribution on an even grid: each probability is met to within two cells.
    assert float((drawn - kept(logits, params)).abs().max()) <= 2 / steps


def test_the_whole_range_of_numbers_gives_tokens() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf])
    for uniform in (0.0, 0.3, 1 - 2**-53):
        assert draw(logits.numpy(), SamplingParams(), uniform) in (0, 2)
        assert draw(logits.numpy(), SamplingParams(top_p=0.5), uniform) == 2


def test_penalties_are_those_of_transformers_and_openai() -> None:
    logits = logits_of(5, 40)
    prompt, output = [1, 2, 3, 3], [7, 7, 2]
    state = SamplingState(SamplingParams(repetition_penalty=1.3), prompt)
    for token in output:
        state.add(token)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits[None].clone())[0]
    assert np.allclose(state.change(logits.numpy()), expected.numpy(), rtol=1e-6)
    state = SamplingState(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), prompt)
    for token in output:
        state.add(token)
    expected = logits.clone()
    expected[7] -= 0.5 + 0.25 * 2
    expected[2] -= 0.5 + 0.25
    assert np.allclose(state.change(logits.numpy()), expected.numpy(), rtol=1e-6)


def test_bias_and_the_least_number_of_tokens() -> None:
    logits = logits_of(6, 20)
    state = SamplingState(SamplingParams(logit_bias={3: 5.0, 4: -5.0}, min_tokens=1), [], end_tokens=[9])
    changed = state.change(logits.numpy())
    expected = logits.clone()
    expected[3] += 5
    expected[4] -= 5
    expected[9] = -torch.inf
    assert np.array_equal(changed, expected.numpy())
    state.add(1)
    assert state.change(logits.numpy())[9] == logits[9]


def test_logprobs_are_those_of_the_model_before_temperature_and_penalties() -> None:
    logits = logits_of(7, 30)
    params = SamplingParams(temperature=0.0, logprobs=4, logit_bias={11: 100.0})
    (choice,) = sample(logits[None], [SamplingState(params, [])])
    assert isinstance(choice, TokenChoice)
    logprobs = logits.log_softmax(-1)
    assert choice.token == 11
    assert choice.logprob == pytest.approx(float(logprobs[11]))
    values, indices = logprobs.topk(4)
    assert [token for token, _ in choice.top] == indices.tolist()
    assert [value for _, value in choice.top] == pytest.approx(values.tolist())


def test_logits_that_are_not_finite_are_an_error_of_their_own_row() -> None:
    logits = torch.stack([logits_of(seed, 10) for seed in range(4)])
    logits[1, 4] = torch.nan
    logits[2, 4] = torch.inf
    logits[3, 4] = -torch.inf
    choices = sample(logits, [SamplingState(SamplingParams(temperature=0.0), [])] * 4)
    assert [type(choice) for choice in choices] == [TokenChoice, NonFiniteLogits, NonFiniteLogits, TokenChoice]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-40, 1e-3, 100.0])
@pytest.mark.parametrize(
    "limits", [{}, {"top_k": 3}, {"top_p": 1e-300}, {"min_p": 0.5}, {"top_p": 0.9, "min_p": 1e-320}]
)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e38])
def test_no_temperature_makes_weights_that_are_no_numbers(
    temperature: float, limits: dict[str, Any], size: float
) -> None:
    logits = torch.tensor([-3.0, 1.0, 0.5, -torch.inf, 0.0]) * size
    params = SamplingParams(temperature=temperature, **limits)
    state = SamplingState(params, [], races=True)
    with np.errstate(all="raise", under="ignore"):
        tokens = {draw(logits.numpy(), params, uniform) for uniform in (0.0, 0.5, 1 - 2**-53)} | {
            state.draw(logits.numpy())
        }
    assert 3 not in tokens
    if temperature * 100 < size:
        assert tokens == {1}


def test_logits_that_penalties_make_infinite_are_an_error_of_their_own_row() -> None:
    logits = torch.full((2, 4), 3e38)
    states = [SamplingState(SamplingParams(repetition_penalty=penalty), [1]) for penalty in (0.01, 2.0)]
    with np.errstate(over="ignore"):
        choices = sample(logits, states)
    assert [type(choice) for choice in choices] == [NonFiniteLogits, TokenChoice]
    assert "after penalties" in str(choices[0])


def test_numbers_of_draws_are_those_of_philox_at_each_position_in_any_order() -> None:
    state = SamplingState(SamplingParams(seed=11), [1])

    def expected(position: int) -> float:
        return float(np.random.Generator(np.random.Philox(key=11, counter=position)).random())

    for position in range(150):
        assert state.uniform(1) == expected(position + 1)
        assert state.uniform() == expected(position)
        state.add(0)
    assert state.uniform(1000) == expected(1150)
    assert state.uniform() == expected(150)


def test_rows_that_are_drawn_together_get_the_tokens_that_they_get_alone() -> None:
    """Among them rows that are limited, biased, greedy or not finite, which are chosen one by one."""
    params = [
        SamplingParams(seed=1),
        SamplingParams(seed=2, temperature=0.5, logprobs=2),
        SamplingParams(seed=3, top_k=5),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=4, logit_bias={7: 50.0}),
        SamplingParams(seed=5),
        SamplingParams(seed=6),
    ]
    logits = torch.stack([logits_of(seed, 500) for seed in range(len(params))])
    logits[5, 3] = math.nan
    states = [SamplingState(each, ()) for each in params]
    together = sample(logits, states)
    for row, state, choice in zip(logits, states, together, strict=True):
        [alone] = sample(row[None], [state])
        assert isinstance(choice, NonFiniteLogits) if isinstance(alone, NonFiniteLogits) else choice == alone
    assert isinstance(together[5], NonFiniteLogits)
    assert together[6] == TokenChoice(draw(logits[6].numpy(), params[6], states[6].uniform()))
