"""A deterministic choice of cases in which each pair of parameter values still occurs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence


def covering_pairs(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Return the positions of few cases that hold every pair of values that occurs in any case.

    The choice is greedy: each time the case with the most pairs that no chosen case has, the first of equals.
    """
    pairs_by_case = [_pairs(case) for case in cases]
    uncovered = set().union(*pairs_by_case)
    chosen: list[int] = []
    candidates = list(range(len(cases)))
    while uncovered:
        best = max(candidates, key=lambda index: len(pairs_by_case[index] & uncovered))
        chosen.append(best)
        uncovered -= pairs_by_case[best]
        candidates = [index for index in candidates if pairs_by_case[index] & uncovered]
    return sorted(chosen)


def _pairs(case: Mapping[str, Hashable]) -> set[tuple[tuple[str, Hashable], ...]]:
    values = sorted(case.items(), key=lambda item: item[0])
    return set(itertools.combinations(values, min(2, len(values))))
