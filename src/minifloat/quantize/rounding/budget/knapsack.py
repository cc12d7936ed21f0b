"""`Frontier`: for every cost the choice of formats with the least damage, by dynamic programming.

Costs are bytes above those of the cheapest choice, in units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

#: Largest number of units of the table.
_LARGEST_TABLE = 1 << 16


class Frontier:
    """The choices with the least damage."""

    def __init__(self, costs: Sequence[Sequence[int]], damages: Sequence[Sequence[float]]) -> None:
        self._lowest = [min(of_group) for of_group in costs]
        extra = [[cost - low for cost in of_group] for of_group, low in zip(costs, self._lowest, strict=True)]
        total = sum(max(of_group) for of_group in extra)
        unit = math.gcd(*(cost for of_group in extra for cost in of_group)) or 1
        self.unit = max(unit, -(-total // _LARGEST_TABLE))
        self._costs, self._damages = costs, damages
        self._units = [[-(-cost // self.unit) for cost in of_group] for of_group in extra]
        size = sum(max(of_group) for of_group in self._units) + 1
        self._least: npt.NDArray[np.float64] = np.zeros(size)
        self._choices: list[npt.NDArray[np.uint8]] = []
        for units, damage in zip(self._units, damages, strict=True):
            self._add(units, damage)

    def _add(self, units: Sequence[int], damages: Sequence[float]) -> None:
        """Add a group: for every cost take the option that gives the least damage with the groups before it."""
        best = np.full(len(self._least), np.inf)
        choice = np.zeros(len(self._least), np.uint8)
        for option in sorted(range(len(units)), key=lambda index: units[index]):
            candidate = np.full(len(best), np.inf)
            candidate[units[option] :] = self._least[: len(best) - units[option]] + damages[option]
            better = candidate < best
            best[better], choice[better] = candidate[better], option
        self._least = best
        self._choices.append(choice)

    @property
    def cheapest(self) -> int:
        """Cost of the cheapest choice."""
        return sum(self._lowest)

    def within(self, cost: int) -> list[int] | None:
        """Return the option of each group with the least damage at no more than `cost` bytes; None: all cost more."""
        if cost < self.cheapest:
            return None
        return self._choice(min((cost - self.cheapest) // self.unit, len(self._least) - 1))

    def reaching(self, damage: float) -> list[int] | None:
        """Return the cheapest choice with no more than `damage`; None: there is none."""
        reached = np.flatnonzero(self._least <= damage)
        return self._choice(int(reached[0])) if len(reached) else None

    def points(self, count: int = 200) -> list[tuple[int, float]]:
        """Return about `count` costs in bytes, spread evenly, and the least damage at each of them."""
        steps = sorted({round(step) for step in np.linspace(0, len(self._least) - 1, min(count, len(self._least)))})
        return [(self.cheapest + step * self.unit, float(self._least[step])) for step in steps]

    def cost(self, choice: Sequence[int]) -> int:
        """Return the bytes of a choice."""
        return sum(costs[option] for costs, option in zip(self._costs, choice, strict=True))

    def damage(self, choice: Sequence[int]) -> float:
        """Return the damage of a choice."""
        return sum(damages[option] for damages, option in zip(self._damages, choice, strict=True))

    def _choice(self, at: int) -> list[int]:
        chosen: list[int] = []
        for units, choices in zip(reversed(self._units), reversed(self._choices), strict=True):
            option = int(choices[at])
            chosen.append(option)
            at -= units[option]
        return chosen[::-1]
