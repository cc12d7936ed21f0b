"""The frontier has the choice with the least damage for every cost, as trying all choices finds it."""

from __future__ import annotations

import itertools
import random

import pytest

from minifloat.quantize.rounding.budget import Frontier


def random_options(seed: int, unit: int) -> tuple[list[list[int]], list[list[float]]]:
    """Costs and damages of 5 groups with 1 to 4 options; costs are multiples of `unit`."""
    generator = random.Random(seed)
    counts = [generator.randint(1, 4) for _ in range(5)]
    costs = [sorted(unit * generator.randint(1, 40) for _ in range(count)) for count in counts]
    return costs, [[generator.random() for _ in range(count)] for count in counts]


def all_choices(costs: list[list[int]], damages: list[list[float]]) -> list[tuple[int, float]]:
    choices = itertools.product(*(range(len(of_group)) for of_group in costs))
    return [
        (
            sum(of_group[option] for of_group, option in zip(costs, choice, strict=True)),
            sum(of_group[option] for of_group, option in zip(damages, choice, strict=True)),
        )
        for choice in choices
    ]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_within_a_cost_does_less_damage(seed: int) -> None:
    costs, damages = random_options(seed, unit=32)
    frontier, everything = Frontier(costs, damages), all_choices(costs, damages)
    for limit in range(frontier.cheapest, 32 * 40 * 5, 200):
        choice = frontier.within(limit)
        assert choice is not None
        assert frontier.cost(choice) <= limit
        assert frontier.damage(choice) == pytest.approx(min(damage for cost, damage in everything if cost <= limit))


@pytest.mark.parametrize("seed", range(20))
def test_no_cheaper_choice_reaches_a_damage(seed: int) -> None:
    costs, damages = random_options(seed, unit=32)
    frontier, everything = Frontier(costs, damages), all_choices(costs, damages)
    least = min(damage for _, damage in everything)
    for limit in (least + 1e-9, least + 0.5, least + 1.0, least + 5.0):
        choice = frontier.reaching(limit)
        assert choice is not None
        assert frontier.damage(choice) <= limit + 1e-9
        assert frontier.cost(choice) == min(cost for cost, damage in everything if damage <= limit)


def test_a_cost_below_the_cheapest_and_a_damage_below_the_least_have_no_choice() -> None:
    frontier = Frontier([[10, 20], [5, 9]], [[1.0, 0.5], [1.0, 0.25]])
    assert frontier.cheapest == 15
    assert frontier.within(14) is None
    assert frontier.reaching(0.7) is None


def test_costs_without_a_common_divisor_are_rounded_up_and_never_exceed_the_limit() -> None:
    costs = [[1_000_003, 7_368_787], [999_983, 15_485_863], [2_750_159, 32_452_843]]
    damages = [[3.0, 1.0], [2.0, 0.5], [1.0, 0.1]]
    frontier = Frontier(costs, damages)
    for limit in range(frontier.cheapest, 60_000_000, 1_234_567):
        choice = frontier.within(limit)
        assert choice is not None
        assert frontier.cost(choice) <= limit
        slack = limit - len(costs) * frontier.unit
        possible = [damage for cost, damage in all_choices(costs, damages) if cost <= slack]
        assert not possible or frontier.damage(choice) <= min(possible)


def test_the_points_fall_from_the_cheapest_choice_to_the_least_damage() -> None:
    costs, damages = random_options(1, unit=32)
    points = Frontier(costs, damages).points()
    assert points == sorted(points)
    assert [damage for _, damage in points] == sorted((damage for _, damage in points), reverse=True)
    assert points[-1][1] == pytest.approx(sum(min(of_group) for of_group in damages))
