"""`benchmarks/moe.py`: the routing."""

from __future__ import annotations

from types import ModuleType

import pytest

from minifloat.kernels import native


@pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())
def test_both_sides_multiply_the_same_tokens_with_the_same_experts(moe: ModuleType) -> None:
    routing = moe.routings(3)[0]
    assert sum(len(tokens) for _, tokens in routing.groups) == 3 * moe.CHOSEN
    for expert, tokens in routing.groups:
        first, last = routing.offsets[expert], routing.offsets[expert + 1]
        assert routing.x_rows[first:last].tolist() == tokens.tolist()
