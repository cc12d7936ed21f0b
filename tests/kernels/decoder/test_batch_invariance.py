"""Batch-invariant decoders: a sequence has the same bits of logits however it is divided and whatever else runs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

import pytest
import torch
from decoder_cases import Session, Shape, prompt, random_decoder
from delta_cases import decoder_of as delta_decoder

from minifloat.errors import KernelUnavailable, UnsupportedTensorError
from minifloat.kernels import threads
from minifloat.kernels.decoder import Decoder

#: Tokens of a sequence: more than the keys of a range of `csrc/decoder/attention.cpp` and not a multiple of anything.
LENGTH = 537

SHAPES = {
    "groups of four": (Shape(heads=8, kv_heads=2, head_dim=64, windows=(None, 70), hidden=512), "bfloat16", "fp8"),
    "groups of one": (Shape(heads=3, kv_heads=3, head_dim=32, windows=(19, None)), "E4M3", "mxfp4"),
    "groups of seven": (Shape(heads=7, kv_heads=1, head_dim=24, norms=True), "float32", "nvfp4"),
    "experts": (Shape(experts=6, shared=True), "bfloat16", "mxfp4"),
    "latents": (Shape(heads=4, kv_heads=1, head_dim=48, rotary=16, latent=(32, 32, 32, 64)), "bfloat16", None),
    "a delta rule": ("groups of three", "bfloat16", None),
}


@functools.cache
def invariant(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Decoder, str]:
    shape, element, scheme = SHAPES[name]
    if isinstance(shape, str):
        decoder = delta_decoder(shape, dtype)
    else:
        sized = dataclasses.replace(shape, hidden=max(96, shape.hidden), intermediate=160)
        decoder = random_decoder(sized, dtype, (0.7, 0.3), scheme)
    return dataclasses.replace(decoder, batch_invariant=True), element


def divided(decoder: Decoder, element: str, sizes: Sequence[int], others: Sequence[int] = ()) -> torch.Tensor:
    """Return the logits of a sequence in pieces of `sizes`, each beside other sequences with `others` new tokens."""
    session = Session.start(decoder, "cpu", blocks=256, element=element)
    tokens, parts, begin = prompt(LENGTH, 1), [], 0
    for number, size in enumerate(sizes):
        new = {f"other {i}": prompt(count, 7 * number + i) for i, count in enumerate(others)}
        names = sorted(new)
        before, after = names[: number % (len(names) + 1)], names[number % (len(names) + 1) :]
        batch = {n: new[n] for n in before} | {"a": tokens[begin : begin + size]} | {n: new[n] for n in after}
        parts.append(session.run(batch)["a"])
        begin += size
    assert begin == LENGTH
    return torch.cat(parts)


def pieces(first: int, size: int) -> list[int]:
    whole = [first, *itertools.repeat(size, (LENGTH - first) // size)]
    return whole if sum(whole) == LENGTH else [*whole, LENGTH - sum(whole)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # BF16 hides most differences of sums
@pytest.mark.parametrize("name", SHAPES)
def test_logits_do_not_depend_on_the_batch(isa: str, name: str, dtype: torch.dtype) -> None:
    decoder, element = invariant(name, dtype)
    expected = divided(decoder, element, [LENGTH])
    assert expected.isfinite().all()
    # A prompt in chunks, then token by token, alone and among others: as prefix, chunk, draft and decoded token.
    for sizes, others in (
        (pieces(400, 137), (1, 1, 5)),
        (pieces(33, 64), (20, 1, 1, 1)),
        ([507, *[1] * 30], ()),
        ([500, 3, 13, 17, 1, 1, 1, 1], (1, 1, 1)),
    ):
        assert torch.equal(divided(decoder, element, sizes, others), expected), (sizes, others)


def test_logits_do_not_depend_on_threads(isa: str) -> None:
    decoder, element = invariant("groups of four")
    before = threads.count()
    found = []
    for count in (1, 2):
        threads.set_threads(count)
        try:
            found.append(divided(decoder, element, [500, 1, 36], (3, 1)))
        finally:
            threads.set_threads(before)
    assert torch.equal(*found)


def test_the_reference_refuses_to_be_batch_invariant() -> None:
    decoder, element = invariant("groups of four")
    with pytest.raises(KernelUnavailable, match="the reference is not batch-invariant"):
        Session.start(decoder, "reference", element=element).run({"a": [1]})


def test_inputs_in_int8_are_not_batch_invariant() -> None:
    decoder, _ = invariant("groups of four")
    with pytest.raises(UnsupportedTensorError, match="batch_invariant: excludes int8_inputs"):
        dataclasses.replace(decoder, int8_inputs=True)
