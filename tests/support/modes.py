"""The everyday run and the full one (--full), for tests that do less in the everyday run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest
from covering import covering_pairs

#: Set to 1 by --full, before any test is collected; the processes that tests start inherit it.
FULL_VARIABLE = "MINIFLOAT_TESTS_FULL"


def is_full() -> bool:
    """Return whether --full was given."""
    return os.environ.get(FULL_VARIABLE) == "1"


def full(*values: Any) -> Any:
    """Return a parameter set that runs only with --full."""
    return pytest.param(*values, marks=pytest.mark.full)


def each_value(*lists: Sequence[Any]) -> list[Any]:
    """Return the cross product of lists as parameter sets, of which the everyday run has each value of each list."""
    everyday = {tuple(index % len(values) for values in lists) for index in range(max(map(len, lists)))}
    return [
        (pytest.param if indices in everyday else full)(*(values[i] for values, i in zip(lists, indices, strict=True)))
        for indices in itertools.product(*(range(len(values)) for values in lists))
    ]


def each_pair(*lists: Sequence[Any]) -> list[Any]:
    """Return the cross product of lists as parameter sets, of which the everyday run has each pair of values."""
    products = list(itertools.product(*(range(len(values)) for values in lists)))
    everyday = set(covering_pairs([{str(place): index for place, index in enumerate(case)} for case in products]))
    return [
        (pytest.param if number in everyday else full)(*(values[i] for values, i in zip(lists, case, strict=True)))
        for number, case in enumerate(products)
    ]
