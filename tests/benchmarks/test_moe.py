"""`benchmarks/moe.py`: the routing."""

from __future__ import annotations

from pathlib import Path

import pytest

from minifloat.kernels import native

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())
def test_both_sides_multiply_the_same_tokens_with_the_same_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import moe

    routing = moe.routings(3)[0]
    assert sum(len(tokens) for _, tokens in routing.groups) == 3 * moe.CHOSEN
    for expert, tokens in routing.groups:
        first, last = routing.offsets[expert], routing.offsets[expert + 1]
        assert routing.x_rows[first:last].tolist() == tokens.tolist()
