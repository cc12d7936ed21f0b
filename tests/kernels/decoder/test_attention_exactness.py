"""Attention alone, in bfloat16, against float64: nothing is rounded before its result."""

from __future__ import annotations

import pytest
import torch
from decoder_cases import VOCAB, Session, prompt
from kernel_cases import ISAS
from torch import Tensor

from minifloat.kernels import native
from minifloat.kernels.decoder import Attention, Decoder, Layer, Mlp, Norm
from minifloat.kernels.pack import FusedWeights, pack

# Linears select or copy columns, so queries, keys and values are known exactly; with so small an embedding the logits
# are the normed result of attention.
SMALL = 2.0**-40


def selecting(hidden: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices of some columns, and the weight that selects them."""
    chosen = torch.randperm(hidden, generator=torch.Generator().manual_seed(seed))[:rows]
    return chosen, torch.eye(hidden)[chosen].bfloat16()


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def normed(x: Tensor) -> Tensor:
    return rounded(x / x.square().mean(-1, keepdim=True).sqrt())


@pytest.mark.skipif(not ISAS, reason="the native library is not built")
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 1, 64), (3, 3, 32), (9, 1, 18), (2, 1, 128)])
def test_results_are_those_of_float64_rounded_once(isa: str, heads: int, kv_heads: int, head_dim: int) -> None:
    hidden, kv = heads * head_dim, kv_heads * head_dim
    columns, weights = zip(*(selecting(hidden, rows, n) for n, rows in enumerate((hidden, kv, kv))), strict=True)
    embedding = (torch.randn(VOCAB, hidden, generator=torch.Generator().manual_seed(5)) * SMALL).bfloat16()
    identity, nothing = torch.eye(hidden).bfloat16(), torch.zeros(8, hidden, dtype=torch.bfloat16)
    norm, scale = Norm(torch.ones(hidden), 1e-30), 2 * head_dim**-0.5
    decoder = Decoder(
        dtype=torch.bfloat16,
        embedding=embedding,
        layers=(
            Layer(
                norm,
                Attention(
                    heads, kv_heads, head_dim, scale, FusedWeights([pack(weight) for weight in weights]), pack(identity)
                ),
                norm,
                Mlp(FusedWeights([pack(nothing), pack(nothing)]), pack(nothing.T.contiguous())),
            ),
        ),
        norm=norm,
        lm_head=pack(identity),
    )
    tokens = prompt(190)
    with native.using(isa):
        session = Session.start(decoder, "cpu", element="bfloat16")
        pieces = [tokens[:161], tokens[161:164], *([token] for token in tokens[164:])]
        found = torch.cat([session.run({"a": piece})["a"] for piece in pieces]).double()

    x = embedding[tokens].double()
    q, k, v = (normed(x)[:, chosen].reshape(len(tokens), -1, head_dim).transpose(0, 1) for chosen in columns)
    k, v = (part.repeat_interleave(heads // kv_heads, dim=0) for part in (k, v))
    hidden_keys = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
    scores = (q @ k.mT * scale).masked_fill(hidden_keys, -torch.inf)
    exact = normed(x + rounded((scores.softmax(-1) @ v).transpose(0, 1).flatten(1)))
    # What lies near the middle of two numbers may be rounded either way; weights of 8 bits change a quarter.
    assert (found == exact).double().mean() > 0.97
    torch.testing.assert_close(found, exact, atol=1e-2, rtol=2.0**-6)
