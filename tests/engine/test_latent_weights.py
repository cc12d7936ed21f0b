"""The keys and values of latent attention as weights of each head: the numbers of the stored matrix."""

from __future__ import annotations

import pytest
import torch

from minifloat.engine.latent_weights import HeadWeights, head_formats, head_weights
from minifloat.kernels.pack import pack, why_not
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, GROUP_128, block_granularity
from minifloat.numerics.scheme import SCHEMES, WeightSpec
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor

HEADS, RANK = 3, 160
SIZES = {"DeepSeek": (128, 128), "GLM-4.7-Flash": (192, 256), "blocks of 32": (96, 64), "blocks of 8": (24, 40)}
#: Blocks whose scales are no powers of two.
ANY_BLOCKS = "blocks of any scale"
#: Formats of keys that stay E4M3.
KEPT = {"fp8", "fp8-static", "fp8-block", ANY_BLOCKS}


def matrix(plain: int, value_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand(HEADS * (plain + value_dim), 1, generator=generator) * 3 + 0.01
    return torch.randn(HEADS * (plain + value_dim), RANK, generator=generator) * scales


def restored(found: HeadWeights) -> torch.Tensor:
    """The stored matrix, from the numbers that the kernels multiply."""
    rows = []
    for head, (keys, values) in enumerate(zip(found.keys, found.values, strict=True)):
        numbers = [pack(weight).dequantize() for weight in (keys, values)]
        factors = 1.0 if found.factors is None else found.factors[head][:, None]
        rows += [numbers[0].T * factors, numbers[1]]
    return torch.cat(rows)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("scheme", [ANY_BLOCKS, "fp8", "fp8-static", "fp8-block", "mxfp8", "mxfp4", "nvfp4"])
def test_the_numbers_are_those_of_the_matrix(scheme: str, sizes: str) -> None:
    plain, value_dim = SIZES[sizes]
    spec = WeightSpec(E4M3, BLOCK_128) if scheme == ANY_BLOCKS else SCHEMES[scheme].weight
    weight = quantize_tensor(matrix(plain, value_dim), spec)
    found = head_weights(weight, HEADS, plain, value_dim)
    narrow = scheme in (ANY_BLOCKS, "fp8-block") and sizes == "blocks of 8"  # fewer than 32 columns share no scale
    inexact = narrow and scheme == ANY_BLOCKS
    assert found.is_rounded == inexact
    torch.testing.assert_close(restored(found), weight.dequantize(), rtol=2**-8 if inexact else 1e-6, atol=0)
    formats = head_formats(weight.spec, plain, value_dim, RANK)
    assert formats.has_factors == (found.factors is not None)
    for stated, weights in ((formats.keys, found.keys), (formats.values, found.values)):
        for each in weights:
            assert stated == (each.spec if isinstance(each, QuantizedTensor) else None)
            assert not why_not(stated, tuple(each.shape), "cpu")
    assert (formats.keys is not None) == (scheme in KEPT and not narrow)
    if found.factors is not None:
        assert 1 <= float(found.factors.max()) < 2


def test_a_matrix_that_is_not_quantized_is_divided() -> None:
    weight = matrix(24, 40).bfloat16()
    found = head_weights(weight, HEADS, 24, 40)
    assert torch.equal(restored(found), weight.float())
    assert found.factors is None
    assert [tuple(keys.shape) for keys in found.keys] == [(RANK, 24)] * HEADS


def test_keys_with_scales_along_rows_that_are_no_powers_of_two_are_rounded() -> None:
    spec = WeightSpec(E4M3, GROUP_128, FLOAT32)
    found = head_weights(quantize_tensor(matrix(32, 32), spec), HEADS, 32, 32)
    assert found.is_rounded
    values = found.values[1]
    assert isinstance(values, QuantizedTensor)
    assert values.spec == spec


def test_blocks_are_cut_where_heads_end() -> None:
    formats = head_formats(SCHEMES["fp8-block"].weight, 192, 256, 512)
    assert formats.keys is not None
    assert formats.values is not None
    assert formats.keys.granularity == block_granularity(128, 64)
    assert formats.values.granularity == block_granularity(64, 128)
