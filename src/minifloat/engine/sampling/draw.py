"""Draws of a token from logits, by an inverted distribution or by a race."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from minifloat.engine.sampling.params import SamplingParams

#: For top_p, tokens with at least these weights are tried in turn, so that few are sorted; then all are.
_LEAST_WEIGHTS = (1e-2, 1e-4, 1e-6)
#: A sum of weights is only known to be larger than another if it is so by more than their rounding.
_MARGIN = 1 + 1e-9
_LOW_31_BITS = 0x7FFFFFFF
#: Tokens of a group in the search for the largest logits.
_GROUP = 64

Logits = NDArray[np.float32]
Weights = NDArray[np.float64]
Tokens = NDArray[np.int64]


def draw(logits: Logits, params: SamplingParams, uniform: float) -> int:
    """Draw a token."""
    tokens, weights = _distribution(logits, params)
    index = _invert(weights, uniform)
    return index if tokens is None else int(tokens[index])


def race(logits: Logits, params: SamplingParams, times: Weights) -> int:
    """Draw a token by a race."""
    tokens, weights = _distribution(logits, params)
    if tokens is None:
        return int((weights / times).argmax())
    return int(tokens[(weights / times[tokens]).argmax()])


def _distribution(logits: Logits, params: SamplingParams) -> tuple[Tokens | None, Weights]:
    """Return the tokens that can be drawn, None for all, and numbers in proportion to their probabilities."""
    if not params.limits:
        return None, _weights(logits, logits.max(), params.temperature)
    tokens, total = _candidates(logits, params)
    tokens = _most_probable_first(logits, tokens)[: params.top_k or None]
    weights = _weights(logits[tokens], logits[tokens[0]], params.temperature)
    weights = weights[weights >= params.min_p]
    if params.top_p < 1.0:
        total = weights.sum() if total is None else total
        weights = weights[weights.cumsum() - weights < params.top_p * total]
    return tokens[: len(weights)], weights


def _weights(logits: Logits, largest: np.float32, temperature: float) -> Weights:
    """Return the probabilities of tokens, divided by that of the most probable token."""
    scaled = logits.astype(np.float64)
    scaled -= np.float64(largest)  # before the division, by which both may become infinite
    with np.errstate(over="ignore"):
        scaled /= temperature
    return np.exp(scaled, out=scaled)


def _candidates(logits: Logits, params: SamplingParams) -> tuple[Tokens, np.float64 | None]:
    """Return tokens that contain all that can be drawn, as few as are found quickly."""
    if params.top_k:
        return np.flatnonzero(logits >= _lower_bound(logits, params.top_k)), None
    weights = _weights(logits, logits.max(), params.temperature)
    if params.min_p:
        return np.flatnonzero(weights >= params.min_p), None
    total = weights.sum()
    for least in _LEAST_WEIGHTS:
        found = np.flatnonzero(weights >= least)
        if weights[found].sum() > params.top_p * total * _MARGIN:
            return found, total
    return np.arange(len(logits)), total


def _lower_bound(logits: Logits, count: int) -> float:
    """Return a number that at least `count` logits reach, and few more if `count` is small.

    It is the `count`-th largest of the maxima of groups of tokens; that of all logits takes longer to find.
    """
    width = len(logits) // _GROUP
    if count >= len(logits):
        return -math.inf
    if count > width:
        return float(np.partition(logits, -count)[-count])
    maxima = logits[: width * _GROUP].reshape(_GROUP, width).max(axis=0)
    return float(np.partition(maxima, -count)[-count])


def _most_probable_first(logits: Logits, tokens: Tokens) -> Tokens:
    """Return tokens by their logits, the largest first, and by their ids where logits are equal.

    numpy sorts integers faster than it finds the order of floats, so the keys contain logit and token.
    """
    bits = (logits[tokens] + np.float32(0)).view(np.int32).astype(np.int64)  # the sum makes -0 and 0 equal
    keys = (np.where(bits < 0, bits ^ _LOW_31_BITS, bits) << 32) | (_LOW_31_BITS - tokens)
    keys.sort()
    return _LOW_31_BITS - (keys[::-1] & _LOW_31_BITS)


def _invert(weights: Weights, uniform: float) -> int:
    """Return the first index whose cumulative weight is above `uniform` times the total."""
    sums = weights.cumsum()
    index = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(index, len(weights) - 1)
