"""Random decoders with gated delta rules."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from decoder_cases import Shape, random_decoder

from minifloat.kernels.decoder import Attention, Decoder, DeltaNet, Norm
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack

HIDDEN = 72

#: Sizes of a delta rule: k_heads, v_heads, k_dim, v_dim, width, grouped.
SIZES = {
    "one head": (1, 1, 8, 16, 4, False),
    "ragged heads": (2, 2, 13, 21, 4, False),
    "groups of three": (2, 6, 16, 40, 4, True),
    "groups of two": (3, 6, 24, 48, 4, False),
    "whole vectors": (2, 4, 128, 128, 4, True),
    "no convolution": (2, 2, 8, 8, 1, True),
    "a wide convolution": (1, 2, 9, 7, 6, False),
}


def delta_of(size: str) -> DeltaNet:
    k_heads, v_heads, k_dim, v_dim, width, grouped = SIZES[size]
    random = torch.Generator().manual_seed(5)
    keys, values = k_heads * k_dim, v_heads * v_dim

    def weight(rows: int, cols: int) -> PackedWeight:
        return pack((torch.randn(rows, cols, generator=random) * 2.0 / cols**0.5).bfloat16())

    rows = [2 * keys + 2 * values] if grouped else [2 * keys + values, values]
    gates = [2 * v_heads] if grouped else [v_heads, v_heads]
    return DeltaNet(
        k_heads,
        v_heads,
        k_dim,
        v_dim,
        qkvz=FusedWeights([weight(count, HIDDEN) for count in rows]),
        ba=FusedWeights([weight(count, HIDDEN) for count in gates]),
        out=weight(HIDDEN, values),
        conv=torch.randn(width, 2 * keys + values, generator=random) * 0.5,
        decay=torch.rand(v_heads, generator=random) * 0.3,
        dt_bias=torch.randn(v_heads, generator=random),
        norm=Norm(torch.randn(v_dim, generator=random) * 0.2 + 1.0, 1e-6),
        grouped=grouped,
    )


@functools.cache
def decoder_of(size: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Three layers, of which the first and the last have a delta rule, and the other attention with a gate."""
    decoder = random_decoder(Shape(windows=(None, None, None), hidden=HIDDEN), dtype)
    first, middle, last = decoder.layers
    delta = delta_of(size)
    assert isinstance(middle.attention, Attention)
    return replace(
        decoder,
        layers=(
            replace(first, attention=delta),
            replace(middle, attention=gated(middle.attention)),
            replace(last, attention=delta),
        ),
    )


def gated(attention: Attention) -> Attention:
    """Attention with rows for gates."""
    query, *others = attention.qkv
    random = torch.Generator().manual_seed(6)
    rows = torch.randn(query.shape[0] * 2, query.shape[1], generator=random) * 2.0 / HIDDEN**0.5
    return replace(attention, qkv=FusedWeights([pack(rows.bfloat16()), *others]), gated=True)
