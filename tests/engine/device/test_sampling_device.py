"""The sampler on a device chooses what the host's chooses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from engines import devices

from minifloat.engine.device_sampling import _most_probable, draw, sample
from minifloat.engine.sampling import NonFiniteLogits, SamplingParams, SamplingState, TokenChoice
from minifloat.engine.sampling import draw as draw_on_host
from minifloat.engine.sampling import sample as sample_on_host

SETTINGS = list(
    itertools.product((0.3, 1.0, 1.7), (0, 1, 7, 40), (1.0, 0.9, 0.3), (0.0, 0.05))
)  # temperature, top_k, top_p, min_p


@devices
@pytest.mark.parametrize("rounded", [False, True])
def test_thousands_of_draws_are_those_of_the_host(device: str, rounded: bool) -> None:
    """`rounded`: to bfloat16, so that many tokens are equally probable and their order counts."""
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 500, generator=random) * 3
    logits = logits.bfloat16().float() if rounded else logits
    uniform = torch.rand(len(SETTINGS), 40, generator=random, dtype=torch.float64)
    uniform[:, 0], uniform[:, 1] = 0.0, 1.0 - 2.0**-53
    for settings, numbers in zip(SETTINGS, uniform, strict=True):
        temperature, top_k, top_p, min_p = settings
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        table = torch.cat([torch.tensor([settings], dtype=torch.float64).expand(40, 4), numbers[:, None]], dim=1)
        most = (top_k or logits.shape[1]) if params.limits else 0
        found = draw(logits.to(device), table.to(device), most=most).tolist()
        expected = [draw_on_host(row.numpy(), params, float(u)) for row, u in zip(logits, numbers, strict=True)]
        assert found == expected, settings


@devices
def test_the_most_probable_tokens_are_in_the_order_of_a_stable_sort(device: str) -> None:
    random = torch.Generator().manual_seed(4)
    logits = (torch.randn(20, 700, generator=random) * 2).round()  # many are equal
    logits[:, ::7] *= -0.0
    logits[3] = -torch.inf
    logits[4, 10:] = -torch.inf
    logits[5] = 1e-42 * torch.arange(700.0)  # subnormal numbers
    for count in (1, 5, 64, 699):
        expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(_most_probable(logits.to(device), count).cpu(), expected)


@devices
def test_rows_of_every_kind_get_the_choice_of_the_host(device: str) -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.7, seed=2, top_k=5),
        SamplingParams(temperature=1.3, seed=3, top_p=0.8, min_p=0.01),
        SamplingParams(temperature=0.0, logprobs=4),
        SamplingParams(temperature=0.9, seed=4, presence_penalty=1.0, logprobs=0),
        SamplingParams(temperature=0.9, seed=5, logit_bias={3: 5.0}),
        SamplingParams(temperature=0.0, min_tokens=2, max_tokens=9),
        SamplingParams(temperature=1.0, seed=6),
    ]
    states = [SamplingState(kinds[i % len(kinds)], [1, 2], [7]) for i in range(50)]
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, 0] = 9.0
    logits[11:13, 5], logits[22, 0] = math.nan, math.inf
    for _ in range(3):
        found, expected = sample(logits.to(device), states).wait(), sample_on_host(logits, states)
        for row, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if row in (11, 12, 22):
                assert isinstance(mine, NonFiniteLogits)
                assert str(mine) == str(theirs)
            else:
                assert isinstance(theirs, TokenChoice)
                assert mine == theirs
                states[row].add(theirs.token)


def test_the_numbers_of_a_seed_are_those_of_the_host() -> None:
    """A row that is drawn takes one number, at its own position."""
    logits = torch.zeros(1, 1000)
    state = SamplingState(SamplingParams(temperature=1.0, seed=9), [1])
    for _ in range(20):
        (choice,) = sample(logits, [state]).wait()
        assert isinstance(choice, TokenChoice)
        assert choice.token == int(np.float64(state.uniform()) * 1000)
        state.add(choice.token)
