"""The gated delta rule: C++ against the reference, and states that are lost or not there."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder_cases import Session, prompt
from delta_cases import SIZES, decoder_of
from kernel_cases import ISAS

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels import native
from minifloat.kernels.decoder import Attention, Decoder, DeltaNet, SequenceStates, StepBatch, cpu, step

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


PIECES = ({"a": 5}, {"a": 1, "b": 3}, {"b": 40, "a": 1}, {"c": 70}, {"a": 1, "b": 1, "c": 1}, {"c": 2, "a": 33})
TOKENS = {name: prompt(100, seed) for seed, name in enumerate("abc")}


def logits_of(decoder: Decoder, impl: str) -> dict[str, torch.Tensor]:
    """Logits of three sequences that begin at different times, with pieces of all sizes."""
    session = Session.start(decoder, impl)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in TOKENS}
    for piece in PIECES:
        new = {}
        for name, count in piece.items():
            begin = session.contexts.get(name, 0)
            new[name] = TOKENS[name][begin : begin + count]
        for name, logits in session.run(new).items():
            parts[name].append(logits)
    return {name: torch.cat(logits) for name, logits in parts.items()}


@functools.cache
def expected(size: str, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    return logits_of(decoder_of(size, dtype), "reference")


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    assert exact.isfinite().all()
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_the_reference(isa: str, size: str, dtype: torch.dtype) -> None:
    found = logits_of(decoder_of(size, dtype), "cpu")
    for name, exact in expected(size, dtype).items():
        assert distance(found[name], exact) < CLOSE[dtype]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_pieces_and_neighbours_change_nothing(impl: str) -> None:
    if impl == "cpu" and not ISAS:
        pytest.skip(native.why_unavailable())
    found = logits_of(decoder_of("groups of three"), impl)
    for name, logits in found.items():
        alone = Session.start(decoder_of("groups of three"), impl).run({name: TOKENS[name][: len(logits)]})[name]
        assert distance(logits, alone) < CLOSE[torch.float32]


def test_states_of_one_implementation_continue_in_the_other() -> None:
    if not ISAS:
        pytest.skip(native.why_unavailable())
    session = Session.start(decoder_of("ragged heads"), "reference")
    exact = Session.start(decoder_of("ragged heads"), "reference").run({"a": TOKENS["a"][:40]})["a"]
    parts = []
    for begin, end, impl in ((0, 2, "cpu"), (2, 20, "reference"), (20, 40, "cpu")):
        session.impl = impl
        parts.append(session.run({"a": TOKENS["a"][begin:end]})["a"])
    assert distance(torch.cat(parts), exact) < CLOSE[torch.float32]


# ------------------------------------------------------------------------------------- states that cannot go on


def running() -> Session:
    session = Session.start(decoder_of("one head"), "auto")
    session.run({"a": TOKENS["a"][:4], "b": TOKENS["b"][:3]})
    return session


def attempt(session: Session, batch: StepBatch) -> None:
    step(session.decoder, session.cache, batch, "auto", session.states)


def test_a_state_is_needed() -> None:
    session = running()
    batch = session.batch({"a": [1]})
    with pytest.raises(ShapeError, match=r"states: expected 448 numbers of each sequence, got None"):
        step(session.decoder, session.cache, batch)
    with pytest.raises(ShapeError, match="slots: expected a slot for each sequence, got None"):
        attempt(session, replace(batch, slots=None))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([7, 7], "expected a slot for each sequence"),
        ([7, 8], "expected a slot 0 to 7 for sequence 1, got 8"),
        ([-1, 6], "expected a slot 0 to 7 for sequence 0, got -1"),
        ([7], "expected .2., got .1."),
        ([6, 7], "the state in slot 6 is that of 3 tokens, and sequence 0 continues after 4"),
        ([7, 0], "the state in slot 0 is undefined, and sequence 1 continues after 3"),
    ],
)
def test_slots_of_other_sequences_are_refused(slots: list[int], message: str) -> None:
    session = running()
    batch = session.batch({"a": [1], "b": [2]})
    assert session.states is not None
    before = session.states.data.clone()
    with pytest.raises(ShapeError, match=message):
        attempt(session, replace(batch, slots=torch.tensor(slots, dtype=torch.int32)))
    assert torch.equal(session.states.data.nan_to_num(7.0), before.nan_to_num(7.0))
    attempt(session, batch)


def test_a_step_that_fails_while_it_runs_loses_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    session = running()

    def fails(*arguments: Any, **more: Any) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(cpu, "why_not", lambda: "")
        patched.setattr(cpu, "step", fails)
        with pytest.raises(MemoryError):
            attempt(session, session.batch({"a": [1]}))
    session.contexts["a"] = 4
    with pytest.raises(ShapeError, match="undefined"):
        attempt(session, session.batch({"a": [1]}))
    session.run({"b": [1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v_heads": 4}, "v_heads: expected a multiple of 3"),
        ({"k_dim": 0}, "k_dim: expected at least 1"),
        ({"dt_bias": torch.zeros(5)}, r"dt_bias: expected \[6\], got \[5\]"),
        ({"conv": torch.zeros(4, 12)}, r"conv: expected \[4, 432\], got \[4, 12\]"),
        ({"conv": torch.zeros(4)}, "conv: expected .width, 432., got .4."),
        ({"v_dim": 40}, "qkvz: expected"),
    ],
)
def test_sizes_that_make_no_delta_rule_are_refused(change: dict[str, Any], message: str) -> None:
    decoder = decoder_of("groups of two")
    attention = decoder.layers[0].attention
    assert isinstance(attention, DeltaNet)
    with pytest.raises(ShapeError, match=message):
        replace(decoder, layers=(replace(decoder.layers[0], attention=replace(attention, **change)),))


def test_gates_with_norms_over_all_heads_are_refused() -> None:
    decoder = decoder_of("groups of two")
    attention = decoder.layers[1].attention
    assert isinstance(attention, Attention)
    layer = replace(decoder.layers[1], attention=replace(attention, clip=1.0))
    with pytest.raises(UnsupportedTensorError, match="gated: expected neither"):
        replace(decoder, layers=(layer,))


def test_states_of_no_size_are_refused() -> None:
    with pytest.raises(ShapeError, match="slots: expected at least 1"):
        SequenceStates(4, 0)
    with pytest.raises(ShapeError, match="floats: expected at least 1"):
        SequenceStates(0, 4)
