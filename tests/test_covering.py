"""The cases that stand for a whole matrix of parameters in the everyday run."""

from __future__ import annotations

import itertools

import pytest
from covering import covering_pairs
from modes import each_pair, each_value


def cases_of(*sizes: int) -> list[dict[str, int]]:
    """The full cross product of parameters with that many values each."""
    return [dict(zip("abcdef", values, strict=False)) for values in itertools.product(*map(range, sizes))]


def pairs(case: dict[str, int]) -> set[tuple[tuple[str, int], ...]]:
    return set(itertools.combinations(sorted(case.items()), 2))


@pytest.mark.parametrize("sizes", [(3, 4), (11, 3, 2), (11, 3, 4, 2), (2, 2, 2, 2, 2), (5, 1, 1)], ids=str)
def test_every_pair_of_values_is_in_a_chosen_case(sizes: tuple[int, ...]) -> None:
    cases = cases_of(*sizes)
    chosen = covering_pairs(cases)
    assert set().union(*(pairs(cases[index]) for index in chosen)) == set().union(*map(pairs, cases))


def test_a_matrix_of_many_parameters_needs_little_more_than_its_two_largest() -> None:
    assert len(covering_pairs(cases_of(11, 3, 2))) == 33
    assert len(covering_pairs(cases_of(11, 3, 4, 2))) <= 50


def test_two_parameters_need_every_case_and_one_parameter_each_of_its_values_once() -> None:
    assert covering_pairs(cases_of(3, 4)) == list(range(12))
    assert covering_pairs([{"a": 0}, {"a": 1}, {"a": 0}]) == [0, 1]
    assert covering_pairs([]) == []
    assert covering_pairs([{}, {}]) == [0]


def test_pairs_that_occur_in_no_case_are_not_asked_for() -> None:
    cases = [{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 0}, {"a": 1, "b": 1, "c": 1}]
    assert covering_pairs(cases) == [0, 1, 2]


def test_equal_cases_give_an_equal_choice() -> None:
    assert covering_pairs(cases_of(7, 5, 3)) == covering_pairs(cases_of(7, 5, 3))


def test_the_everyday_run_has_each_value_of_each_list_and_the_full_run_every_case() -> None:
    cases = each_value(["a", "b", "c"], [1, 2])
    assert sorted(case.values for case in cases) == list(itertools.product("abc", (1, 2)))
    everyday = [case.values for case in cases if not case.marks]
    assert len(everyday) == 3
    assert {letter for letter, _ in everyday} == {"a", "b", "c"}
    assert {number for _, number in everyday} == {1, 2}


def test_the_everyday_run_has_each_pair_of_values_and_the_full_run_every_case() -> None:
    cases = each_pair(["a", "b", "c"], [1, 2], ["x", "y", "z"])
    assert [case.values for case in cases] == list(itertools.product("abc", (1, 2), "xyz"))
    everyday = [case.values for case in cases if not case.marks]
    assert len(everyday) < len(cases)
    for first, second in itertools.combinations(range(3), 2):
        assert {(case[first], case[second]) for case in everyday} == {
            (case.values[first], case.values[second]) for case in cases
        }
