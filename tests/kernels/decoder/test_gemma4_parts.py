"""Inputs of layers, scalars of the residual stream, and experts beside an MLP: C++ against the reference."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from decoder_cases import VOCAB, Session, Shape, prompt, random_decoder

from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.kernels.decoder import Activation, Decoder, ExpertNorms, Experts, LayerInput, LayerInputs, Norm, step
from minifloat.kernels.pack import PackedWeight, pack

SIZE, HIDDEN = 37, 72
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DECODERS = ["inputs", "experts", "both"]


def decoder_of(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    random = torch.Generator().manual_seed(12)

    def weight(rows: int, cols: int) -> PackedWeight:
        return pack((torch.randn(rows, cols, generator=random) / cols**0.5).bfloat16())

    def norm(size: int) -> Norm:
        return Norm(torch.randn(size, generator=random) * 0.2 + 1.0, 1e-5)

    has_experts = name != "inputs"
    decoder = random_decoder(Shape(hidden=HIDDEN, experts=6 if has_experts else 0, shared=has_experts), dtype)
    layers = []
    for layer in decoder.layers:
        mlp = layer.mlp
        if isinstance(mlp, Experts):
            norms = ExpertNorms(norm(HIDDEN), norm(HIDDEN), norm(HIDDEN), norm(HIDDEN))
            router = replace(mlp.router, scales=torch.rand(6, generator=random) + 0.5)
            mlp = replace(mlp, shared_gate=None, norms=norms, router=router)
        part = None
        if name != "experts":
            part = LayerInput(weight(SIZE, HIDDEN), weight(HIDDEN, SIZE), norm(HIDDEN), Activation("gelu_tanh"))
        layers.append(replace(layer, mlp=mlp, result_norm=norm(HIDDEN), input=part, scalar=0.7 + 0.2 * len(layers)))
    inputs = None
    if name != "experts":
        table = torch.randn(VOCAB, len(layers) * SIZE, generator=random).to(dtype)
        inputs = LayerInputs(table, weight(len(layers) * SIZE, HIDDEN), norm(SIZE), table_factor=3.0, factor=0.6)
    return replace(decoder, layers=tuple(layers), inputs=inputs)


def in_pieces(decoder: Decoder, impl: str) -> torch.Tensor:
    session, parts = Session.start(decoder, impl), []
    for new in ({"a": prompt(40, 1)}, {"a": prompt(1, 2), "b": prompt(21, 3)}, {"a": [3], "b": [4], "c": [5]}):
        parts += session.run(new).values()
    return torch.cat(parts)


@functools.cache
def expected(name: str, dtype: torch.dtype) -> torch.Tensor:
    return in_pieces(decoder_of(name, dtype), "reference")


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_the_reference(isa: str, name: str, dtype: torch.dtype) -> None:
    exact = expected(name, dtype)
    found = in_pieces(decoder_of(name, dtype), "cpu")
    assert float((found - exact).norm() / exact.norm()) < CLOSE[dtype]


@pytest.mark.parametrize("name", DECODERS)
def test_logits_of_some_tokens_in_any_order(isa: str, name: str) -> None:
    decoder = decoder_of(name)
    whole = torch.cat([*Session.start(decoder, "cpu").run({"a": prompt(20), "b": prompt(9, 1)}).values()])
    for rows in ([28], [5, 28, 5, 0], []):
        session = Session.start(decoder, "cpu")
        found = step(decoder, session.cache, session.batch({"a": prompt(20), "b": prompt(9, 1)}, rows), "cpu")
        torch.testing.assert_close(found, whole[rows], atol=1e-4, rtol=1e-4)


def test_sizes_that_contradict_each_other_are_refused() -> None:
    decoder = decoder_of("both")
    assert decoder.inputs is not None
    with pytest.raises(ShapeError, match=r"layers\.0\.input\.gate: expected the None rows of inputs"):
        replace(decoder, inputs=None)
    with pytest.raises(ShapeError, match=r"inputs\.table"):
        replace(decoder, inputs=replace(decoder.inputs, table=decoder.inputs.table[1:]))
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, Experts)
    with pytest.raises(UnsupportedTensorError, match=r"mlp\.norms: expected None without a shared MLP"):
        replace(decoder, layers=(replace(layer, mlp=replace(layer.mlp, shared=None)), *decoder.layers[1:]))
    with pytest.raises(UnsupportedTensorError, match=r"result_norm: expected None for experts without norms"):
        replace(decoder, layers=(replace(layer, mlp=replace(layer.mlp, norms=None)), *decoder.layers[1:]))
    router = replace(layer.mlp.router, scales=torch.ones(5))
    with pytest.raises(ShapeError, match=r"router\.scales"):
        replace(decoder, layers=(replace(layer, mlp=replace(layer.mlp, router=router)), *decoder.layers[1:]))
