"""Invalid arguments of a step, a decoder and a cache: refused by the name of the field, before anything is written."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from decoder_cases import Session, Shape, prompt, random_decoder

from minifloat.errors import ShapeError, TensorError, UnknownNameError, UnsupportedTensorError
from minifloat.kernels.decoder import BLOCK_TOKENS, Activation, Decoder, KVCache, Norm, StepBatch, step


@functools.cache
def decoder() -> Decoder:
    return random_decoder(Shape(windows=(21, 21, 21)), torch.float32)


def session() -> tuple[Session, StepBatch]:
    """Two sequences that have run, and a batch of three and one new tokens."""
    running = Session.start(decoder(), "reference")
    running.run({"a": prompt(20), "b": prompt(5)})
    return running, running.batch({"a": prompt(3), "b": prompt(1)})


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


WRONG = {
    "a token that there is not": ("tokens", int32([0, 97, 1, 1])),
    "a negative token": ("tokens", int32([0, -1, 1, 1])),
    "tokens in 64 bits": ("tokens", torch.zeros(4, dtype=torch.int64)),
    "tokens in two dimensions": ("tokens", int32([[0, 0, 1, 1]])),
    "positions of other tokens": ("positions", int32([20, 21, 23, 5])),
    "too few positions": ("positions", int32([20, 21, 22])),
    "starts that do not begin at zero": ("starts", int32([1, 3, 4])),
    "starts that end early": ("starts", int32([0, 2, 3])),
    "starts that fall": ("starts", int32([0, 5, 4])),
    "a sequence without new tokens": ("starts", int32([0, 4, 4])),
    "a context shorter than its new tokens": ("contexts", int32([2, 6])),
    "too few contexts": ("contexts", int32([23])),
    "a context beyond the block table": ("blocks", int32([[0], [1]])),
    "a block that there is not": ("blocks", int32([[0, 64, -1], [2, -1, -1]])),
    "an unset block within the context": ("blocks", int32([[0, -1, -1], [2, -1, -1]])),
    "a block that two sequences write": ("blocks", int32([[0, 2, -1], [2, -1, -1]])),
    "one block table for two sequences": ("blocks", int32([[0, 2, -1]])),
    "blocks that are not contiguous": ("blocks", int32([[0, 1], [2, 3], [4, 5]]).T),
    "logits of a token that there is not": ("logits", int32([4])),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_batch_names_its_field_and_writes_nothing(case: str) -> None:
    running, batch = session()
    name, value = WRONG[case]
    before = running.cache.data.clone()
    with pytest.raises(TensorError) as error:
        step(running.decoder, running.cache, dataclasses.replace(batch, **{name: value}))
    assert error.value.tensor == name or (case == "one block table for two sequences" and "blocks" in str(error.value))
    assert torch.equal(running.cache.data, before)


def test_blocks_before_every_window_are_ignored() -> None:
    running = Session.start(decoder(), "auto")
    window = running.decoder.layers[0].attention.window
    assert window == 21
    running.run({"a": prompt(70)})
    batch = running.batch({"a": prompt(1)})
    expected = step(running.decoder, running.cache, batch)
    gone = (70 - window + 1) // BLOCK_TOKENS
    assert gone == 3
    blocks = batch.blocks.clone()
    blocks[0, :gone] = -1
    assert torch.equal(step(running.decoder, running.cache, dataclasses.replace(batch, blocks=blocks)), expected)
    blocks[0, gone] = -1
    with pytest.raises(ShapeError, match="entry 3"):
        step(running.decoder, running.cache, dataclasses.replace(batch, blocks=blocks))


def test_a_cache_of_another_decoder_is_refused() -> None:
    running, batch = session()
    with pytest.raises(ShapeError, match="cache"):
        step(running.decoder, KVCache([(2, 8)] * 3, 4, "float32"), batch)


def test_unknown_names_are_refused() -> None:
    running, batch = session()
    with pytest.raises(UnknownNameError, match="impl"):
        step(running.decoder, running.cache, batch, impl="triton")
    with pytest.raises(UnknownNameError, match="float32, bfloat16, E4M3"):
        KVCache([(1, 8)], 1, "E5M2")


@pytest.mark.parametrize("element", ["float32", "bfloat16", "E4M3"])
def test_bytes_per_block_gives_the_size_of_a_cache(element: str) -> None:
    shapes = [(2, 24), (1, 40), (2, 24)]
    cache = KVCache(shapes, 5, element)
    assert cache.nbytes == 5 * KVCache.bytes_per_block(shapes, element) == cache.data.numel()


def test_a_decoder_whose_parts_do_not_fit_names_the_field() -> None:
    good = decoder()
    layer = good.layers[1]

    def with_attention(**fields: Any) -> Decoder:
        attention = dataclasses.replace(layer.attention, **fields)
        return dataclasses.replace(good, layers=(good.layers[0], dataclasses.replace(layer, attention=attention)))

    with pytest.raises(ShapeError, match=r"layers\.1\.attention\.q_norm"):
        with_attention(q_norm=Norm(torch.ones(3), 1e-5))
    with pytest.raises(ShapeError, match=r"layers\.1\.attention\.heads"):
        with_attention(heads=3)
    with pytest.raises(ShapeError, match=r"layers\.1\.attention\.qkv"):
        with_attention(head_dim=32)
    with pytest.raises(ShapeError, match=r"layers\.1\.attention\.sinks"):
        with_attention(sinks=torch.ones(3))
    with pytest.raises(UnsupportedTensorError, match=r"layers\.1\.attention\.score_cap"):
        with_attention(score_cap=-1.0)
    with pytest.raises(ShapeError, match=r"layers\.1\.cache_of"):
        with_attention(values="shared")
    other = dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, activation=Activation("softplus")))
    with pytest.raises(UnknownNameError, match=r"layers\.1\.mlp\.activation"):
        dataclasses.replace(good, layers=(good.layers[0], other))
    with pytest.raises(UnsupportedTensorError, match="norm"):
        dataclasses.replace(good, norm=Norm(good.norm.weight.bfloat16(), 1e-5))
    with pytest.raises(UnsupportedTensorError, match="dtype"):
        dataclasses.replace(good, dtype=torch.float64)
