"""A step gives the logits of transformers' own modelling code, in float32, for any division of tokens into steps."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decoder_cases import CONFIGS, Session, decoder_of, model_of, prompt

from minifloat.kernels.decoder import IMPLEMENTATIONS, Decoder

LENGTH = 75
CLOSE = 1e-4

models = pytest.mark.parametrize("name", CONFIGS)
implementations = pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "auto"])


@functools.cache
def model(name: str) -> Any:
    return model_of(name)


@functools.cache
def decoder(name: str, apart: bool = True) -> Decoder:
    return decoder_of(model(name), apart=apart)


@functools.cache
def expected(name: str, seed: int = 0) -> torch.Tensor:
    """float32 ``[LENGTH, vocab]``."""
    with torch.no_grad():
        logits: torch.Tensor = model(name)(torch.tensor([prompt(LENGTH, seed)])).logits[0]
    return logits


def assert_same(found: torch.Tensor, exact: torch.Tensor) -> None:
    scale = float(exact.abs().max())
    assert scale > 1, "a model whose logits hardly differ tests nothing"
    torch.testing.assert_close(found, exact, atol=CLOSE * scale, rtol=0)
    assert torch.equal(found.argmax(-1), exact.argmax(-1))


@models
@implementations
def test_a_prompt_at_once(name: str, impl: str) -> None:
    assert_same(Session.start(decoder(name), impl).run({"a": prompt(LENGTH)})["a"], expected(name))


@models
@implementations
def test_a_prompt_in_pieces_then_token_by_token(name: str, impl: str) -> None:
    session, tokens, parts = Session.start(decoder(name), impl), prompt(LENGTH), []
    for begin, end in ((0, 7), (7, 16), (16, 33), (33, 34), (34, 60), *((i, i + 1) for i in range(60, LENGTH))):
        parts.append(session.run({"a": tokens[begin:end]})["a"])
    assert_same(torch.cat(parts), expected(name))


@models
@implementations
def test_several_sequences_of_different_lengths(name: str, impl: str) -> None:
    session, seeds = Session.start(decoder(name), impl), {"a": 0, "b": 1, "c": 2}
    found: dict[str, list[torch.Tensor]] = {sequence: [] for sequence in seeds}
    ends = {"a": (50, 51, 52, 53, LENGTH), "b": (1, 16, 17, 18, 19), "c": (0, 32, 33, 40, 41)}
    at = dict.fromkeys(seeds, 0)
    for number in range(5):
        new = {s: prompt(LENGTH, seeds[s])[at[s] : ends[s][number]] for s in seeds if ends[s][number] > at[s]}
        for sequence, logits in session.run(new).items():
            found[sequence].append(logits)
            at[sequence] = ends[sequence][number]
    for sequence, seed in seeds.items():
        assert_same(torch.cat(found[sequence]), expected(name, seed)[: at[sequence]])


@implementations
def test_gate_and_up_of_experts_in_one_weight(impl: str) -> None:
    session = Session.start(decoder("qwen3-moe", apart=False), impl)
    assert_same(session.run({"a": prompt(LENGTH)})["a"], expected("qwen3-moe"))
