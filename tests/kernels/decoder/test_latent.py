"""Latent attention: what a cache holds of it, what is refused, and that its values are those of heads of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from decoder_cases import Session, Shape, prompt, random_decoder

from minifloat.errors import ShapeError, TensorError, UnsupportedTensorError
from minifloat.kernels.decoder import CacheShape, Decoder, KVCache, Norm, Rotary, Router, StepBatch, cpu, step
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import pack

SHAPE = Shape(heads=3, kv_heads=1, head_dim=56, rotary=16, latent=(40, 24, 20, 32), norms=True, windows=(None,))
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "E4M3": 1}


@pytest.mark.parametrize("element", ELEMENT_BYTES)
def test_a_cache_holds_the_latent_and_the_turned_key_once(element: str) -> None:
    cache = KVCache([CacheShape(1, 576, 512)] * 2, 3, element)
    assert cache.nbytes == 2 * 3 * 16 * 576 * ELEMENT_BYTES[element]
    assert KVCache.bytes_per_block(cache.shapes, element) * 3 == cache.nbytes


def test_values_are_the_first_dimensions_of_keys() -> None:
    cache = KVCache([CacheShape(1, 6, 4)], 2, "float32")
    keys = torch.arange(3 * 6.0).view(3, 1, 6)
    cache.write(0, torch.tensor([16, 17, 18]), keys, None, (1.0, 1.0))
    found, values = cache.read(0, torch.tensor([1]), (1.0, 1.0))
    assert torch.equal(found[:3], keys)
    assert torch.equal(values[:3], keys[..., :4])


@pytest.mark.skipif(bool(cpu.why_not()), reason=cpu.why_not())
@pytest.mark.parametrize("element", ELEMENT_BYTES)
def test_the_cache_holds_what_the_reference_writes(element: str) -> None:
    caches = []
    for impl in ("cpu", "reference"):
        session = Session.start(random_decoder(SHAPE, torch.float32, (0.004, 1.0)), impl, 4, element)
        session.run({"a": prompt(37)})
        caches.append(session.cache.read(0, torch.tensor(session.blocks["a"]), (0.004, 1.0))[0][:37])
    torch.testing.assert_close(*caches, rtol=2**-3 if element == "E4M3" else 2**-8, atol=1e-6)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_keys_and_values_of_heads_give_the_same_result(impl: str) -> None:
    """Softmax attention with the keys and values that each head would have, in float64."""
    if impl == "cpu" and cpu.why_not():
        pytest.skip(cpu.why_not())
    decoder = random_decoder(SHAPE, torch.float32)
    attention = decoder.layers[0].attention
    latent, rotary = attention.latent, attention.rotary
    assert latent is not None
    assert rotary is not None
    assert latent.q_up is not None
    assert latent.q_norm is not None
    assert latent.kv_norm is not None
    assert latent.key_factors is not None
    tokens = prompt(33)
    normed = decoder.layers[0].input_norm(decoder.embedding[tokens].float())  # type: ignore[misc]
    product = normed @ torch.cat([weight.dequantize() for weight in attention.qkv]).T
    q = latent.q_norm(product[:, :32]) @ latent.q_up.dequantize().T
    q = q.view(33, 3, 40)
    c, r = latent.kv_norm(product[:, 32:72]), product[:, None, 72:]
    turns = rotary.turns(torch.arange(33))
    turned, r = rotary.rotate(q[..., 24:], turns), rotary.rotate(r, turns).double()[:, 0]
    results = []
    for head in range(3):
        keys = c.double() @ (latent.keys[head].dequantize() * latent.key_factors[head]).double()
        scores = q[:, head, :24].double() @ keys.T + turned[:, head].double() @ r.T
        hidden = torch.ones(33, 33).triu(1).bool()
        weights = (scores * attention.scale).masked_fill(hidden, -torch.inf).softmax(dim=-1)
        results.append(weights @ (c.double() @ latent.values[head].dequantize().double().T))
    expected = torch.cat(results, dim=-1) @ attention.out.dequantize().double().T
    # The decoder's only layer, with an MLP of zeros and an output layer that is the identity.
    found = attended(decoder, tokens, impl) - decoder.embedding[tokens].float()
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def attended(decoder: Decoder, tokens: list[int], impl: str) -> torch.Tensor:
    """The residual stream behind the attention of a decoder's only layer."""
    hidden = decoder.hidden
    layer = decoder.layers[0]
    no_mlp = dataclasses.replace(layer.mlp, down=pack(torch.zeros(hidden, layer.mlp.down.shape[1]).bfloat16()))
    plain = dataclasses.replace(
        decoder,
        layers=(dataclasses.replace(layer, mlp=no_mlp),),
        norm=Norm(torch.ones(hidden), 1e-12),
        lm_head=pack(torch.eye(hidden).bfloat16()),
    )
    logits = Session.start(plain, impl).run({"a": tokens})["a"]
    length = reference_length(plain, tokens)
    return logits * length[:, None]


def reference_length(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    """What the last norm divides rows by."""
    from minifloat.kernels.decoder import reference

    rows: list[torch.Tensor] = []

    class Noting(Norm):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            rows.append(x)
            return super().__call__(x)

    noting = dataclasses.replace(decoder, norm=Noting(decoder.norm.weight, decoder.norm.eps))
    session = Session.start(noting, "reference")
    reference.step(noting, session.cache, session.batch({"a": tokens}))
    return rows[0].square().mean(dim=-1).sqrt()


def test_parts_that_do_not_fit_are_named() -> None:
    good = random_decoder(SHAPE, torch.float32)
    attention = good.layers[0].attention
    latent = attention.latent
    assert latent is not None

    def with_latent(**fields: Any) -> None:
        with_attention(latent=dataclasses.replace(latent, **fields))

    def with_attention(**fields: Any) -> None:
        layer = dataclasses.replace(good.layers[0], attention=dataclasses.replace(attention, **fields))
        dataclasses.replace(good, layers=(layer,))

    wide = PackedExperts([pack(torch.zeros(20, 42).bfloat16())] * 3)
    cases: dict[str, tuple[type[TensorError], dict[str, Any]]] = {
        "latent.keys": (ShapeError, {"keys": PackedExperts([latent.keys[0]] * 2)}),
        "latent.values": (ShapeError, {"values": wide}),
        "latent.key_factors": (ShapeError, {"key_factors": torch.ones(3, 23)}),
        "latent.kv_norm": (ShapeError, {"kv_norm": Norm(torch.ones(39), 1e-6)}),
        "latent.q_up": (ShapeError, {"q_up": pack(torch.zeros(119, 32).bfloat16())}),
        "latent.q_norm": (ShapeError, {"q_norm": Norm(torch.ones(31), 1e-6)}),
    }
    for field, (error, fields) in cases.items():
        with pytest.raises(error, match=rf"layers\.0\.attention\.{field}"):
            with_latent(**fields)
    with pytest.raises(UnsupportedTensorError, match="no norms of heads"):
        with_attention(k_norm=Norm(torch.ones(56), 1e-6))
    with pytest.raises(UnsupportedTensorError, match='with values="latent"'):
        with_attention(values="own")
    with pytest.raises(ShapeError, match=r"rotary\.inv_freq"):
        with_attention(rotary=Rotary(torch.ones(9)))


def test_a_cache_of_another_latent_is_refused() -> None:
    decoder = random_decoder(SHAPE, torch.float32)
    batch = StepBatch(*(torch.tensor(x, dtype=torch.int32) for x in ([1], [0], [0, 1], [1], [[0]], [0])))
    with pytest.raises(ShapeError, match=r"1 of \[\(1, 56, 40\)\], got 1 of \[\(1, 56\)\]"):
        step(decoder, KVCache([(1, 56)], 1, "float32"), batch)


def test_groups_may_count_as_their_best_expert() -> None:
    weight = torch.tensor([[3.0], [2.9], [4.0], [0.0]])
    x = torch.ones(1, 1)
    by_two = Router(weight, top_k=1, groups=2, groups_kept=1)(x)[1]
    by_one = Router(weight, top_k=1, groups=2, groups_kept=1, group_best=1)(x)[1]
    assert (by_two.tolist(), by_one.tolist()) == ([[2]], [[2]])  # scores are a softmax: 0.2, 0.18, 0.55, 0.01
    kinds = {"kind": "softmax_of_chosen", "groups": 2, "groups_kept": 1}
    assert Router(weight, top_k=1, **kinds)(x)[1].tolist() == [[0]]  # type: ignore[arg-type]
    assert Router(weight, top_k=1, group_best=1, **kinds)(x)[1].tolist() == [[2]]  # type: ignore[arg-type]
