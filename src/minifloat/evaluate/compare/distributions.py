"""Student's t distribution and the interval of C. J. Clopper, E. S. Pearson, Biometrika 26 (1934), without scipy."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from statistics import NormalDist

_TINY = 1e-300
_MOST_TERMS = 20_000


def beta_cdf(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function."""
    if x <= 0 or x >= 1:
        return float(x > 0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - beta_cdf(1 - x, b, a)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _continued_fraction(x, a, b) / a


def _continued_fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function by Lentz's method."""
    d = 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    c, value = 1.0, d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def solved(function: Callable[[float], float], target: float) -> float:
    """Return where an increasing function on 0 to 1 has a value."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return (low + high) / 2


def student_cdf(t: float, degrees: float) -> float:
    """Return the probability of values up to t; with infinite degrees of freedom the normal distribution's."""
    if math.isinf(degrees) or math.isinf(t):
        return NormalDist().cdf(t)
    tail = beta_cdf(degrees / (degrees + t * t), degrees / 2, 0.5) / 2
    return 1 - tail if t > 0 else tail


@functools.lru_cache(maxsize=256)
def student_quantile(probability: float, degrees: float) -> float:
    """Return the value below which a probability of more than one half lies."""
    if math.isinf(degrees):
        return NormalDist().inv_cdf(probability)
    x = solved(lambda x: beta_cdf(x, degrees / 2, 0.5) / 2, 1 - probability)
    return math.sqrt(degrees * (1 - x) / x)


def binomial_ends(hits: float, total: float, tail: float) -> tuple[float, float]:
    """Return the fractions below and above which so many or few hits have a probability of `tail`.

    `hits` and `total` need not be integers. Without any hit the upper end is about 3.7 / total for a tail of 2.5%
    ("rule of three": 3 / total for 5%).
    """
    misses = total - hits
    low = 0.0 if hits <= 0 else solved(lambda x: beta_cdf(x, hits, misses + 1), tail)
    high = 1.0 if misses <= 0 else solved(lambda x: beta_cdf(x, hits + 1, misses), 1 - tail)
    return low, high
