"""Tests that scales and codes equal those of compressed-tensors bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from minifloat.numerics.cast import decode, encode, pack_nibbles
from minifloat.numerics.formats import E2M1, E4M3, E8M0
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_16, GROUP_32, TENSOR, Granularity
from minifloat.numerics.scale import choose_scales, effective_scale
from minifloat.numerics.scale_rules import expand, global_divisor
from minifloat.numerics.scheme import ScaleRule, WeightSpec

REASON = "compressed-tensors is not installed"
quantization = pytest.importorskip("compressed_tensors.quantization", reason=REASON)
ct_utils = pytest.importorskip("compressed_tensors.quantization.utils", reason=REASON)
lifecycle = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward", reason=REASON)
compressors = pytest.importorskip("compressed_tensors.compressors", reason=REASON)

FP8_ARGS: dict[Granularity, dict[str, Any]] = {
    TENSOR: {"strategy": "tensor"},
    CHANNEL: {"strategy": "channel"},
    BLOCK_128: {"strategy": "block", "block_structure": [128, 128]},
}
MX_ARGS = {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
NVFP4_ARGS = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
MXFP4_EVEN = WeightSpec(E2M1, GROUP_32, E8M0, ScaleRule.EVEN)
NVFP4 = WeightSpec(E2M1, GROUP_16, E4M3, ScaleRule.AMAX)


def weights(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return Gaussian weights with rows that are zero, tiny, huge, exact powers of two, and one with an outlier."""
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(3)) * 0.02
    w[1] = 0.0
    w[2] *= 1e-6
    w[3] *= 1e4
    w[4] = 2.0 ** torch.arange(cols).remainder(9).neg()
    w[5] = 448.0
    w[6, cols // 2] = 77.0
    return w.to(dtype)


def arguments(bits: int, **options: Any) -> Any:
    return quantization.QuantizationArgs(num_bits=bits, type="float", symmetric=True, **options)


def minimum_and_maximum(w: torch.Tensor, granularity: Granularity) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum and maximum of every block, as an observer reports them."""
    rows, cols = granularity.block((w.shape[0], w.shape[1]))
    blocks = [[w[i : i + rows, j : j + cols] for j in range(0, w.shape[1], cols)] for i in range(0, w.shape[0], rows)]
    low = torch.tensor([[float(b.min()) for b in row] for row in blocks])
    high = torch.tensor([[float(b.max()) for b in row] for row in blocks])
    return low, high


def ours(w: torch.Tensor, spec: WeightSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return codes, stored scales and divisor."""
    scale, divisor = choose_scales(w, spec)
    full = expand(effective_scale(scale, spec, divisor), spec.granularity, (w.shape[0], w.shape[1]))
    return encode(w.float() / full, spec.element), scale, divisor


def compress(name: str, state: dict[str, torch.Tensor], args: Any) -> dict[str, torch.Tensor]:
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    result: dict[str, torch.Tensor] = compressors.BaseCompressor.get_value_from_registry(name).compress(state, scheme)
    return result


@pytest.mark.parametrize("granularity", FP8_ARGS, ids=str)
@pytest.mark.parametrize("shape", [(256, 256), (130, 257), (7, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_scales_and_codes_equal_those_of_compressed_tensors(
    granularity: Granularity, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    w, args = weights(*shape, dtype), arguments(8, **FP8_ARGS[granularity])
    expected_scale, _ = ct_utils.calculate_qparams(*minimum_and_maximum(w, granularity), args)
    expected = compress("float-quantized", {"weight": w, "weight_scale": expected_scale}, args)
    codes, scale, _ = ours(w, WeightSpec(E4M3, granularity))
    assert torch.equal(scale, expected_scale)
    assert torch.equal(codes, expected["weight"].view(torch.uint8))
    zero = torch.zeros_like(expected_scale)
    direct = lifecycle.quantize(w.float(), scale, zero, args, dtype=torch.float8_e4m3fn)
    assert torch.equal(codes & 0x7F, direct.view(torch.uint8) & 0x7F)  # adding the zero point turns -0 into 0


def test_fp8_weights_dequantize_as_in_compressed_tensors() -> None:
    w, args = weights(130, 257), arguments(8, **FP8_ARGS[BLOCK_128])
    codes, scale, _ = ours(w, WeightSpec(E4M3, BLOCK_128))
    expected = lifecycle.dequantize(codes.view(torch.float8_e4m3fn), scale, args=args)
    assert torch.equal(decode(codes, E4M3) * expand(scale, BLOCK_128, (130, 257)), expected)


@pytest.mark.parametrize("shape", [(64, 128), (9, 32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_scales_and_packed_codes_equal_those_of_compressed_tensors(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    w, args = weights(*shape, dtype), arguments(4, **MX_ARGS)
    factor, _ = ct_utils.calculate_qparams(*minimum_and_maximum(w, GROUP_32), args)
    expected = compress("mxfp4-pack-quantized", {"weight": w.float(), "weight_scale": factor}, args)
    codes, scale, _ = ours(w, MXFP4_EVEN)
    assert torch.equal(effective_scale(scale, MXFP4_EVEN), factor)
    assert torch.equal(scale, expected["weight_scale"])
    assert torch.equal(pack_nibbles(codes), expected["weight_packed"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp8_codes_equal_those_of_compressed_tensors_for_the_same_scales(dtype: torch.dtype) -> None:
    w, args = weights(64, 128, dtype), arguments(8, **MX_ARGS)
    factor, _ = ct_utils.calculate_qparams(*minimum_and_maximum(w, GROUP_32), args)
    expected = compress("mxfp8-quantized", {"weight": w.float(), "weight_scale": factor}, args)
    spec = WeightSpec(E4M3, GROUP_32, E8M0, ScaleRule.RCEIL)
    scale = effective_scale(expected["weight_scale"], spec)
    assert torch.equal(scale, factor)
    codes = encode(w.float() / expand(scale, GROUP_32, (64, 128)), E4M3)
    assert torch.equal(codes, expected["weight"].view(torch.uint8))


@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-38, 7e-36, 9e-36, 1e-3, 0.1, 3.0, 448.0, 2688.0, 3e38, math.nan])
def test_nvfp4_divisors_of_edge_values_are_the_powers_of_two_below_those_of_compressed_tensors(value: float) -> None:
    amax = torch.tensor([value])
    theirs = float(ct_utils.generate_gparam(-amax, amax))
    assert float(global_divisor(amax)) == 2.0 ** math.floor(math.log2(theirs))


def test_nvfp4_divisors_of_random_values_are_the_powers_of_two_below_those_of_compressed_tensors() -> None:
    values = torch.rand(500, generator=torch.Generator().manual_seed(0)) * 10
    theirs = [float(ct_utils.generate_gparam(-value, value)) for value in values]
    expected = [2.0 ** math.floor(math.log2(divisor)) for divisor in theirs]
    assert [float(global_divisor(value)) for value in values] == expected


@pytest.mark.parametrize("shape", [(64, 128), (9, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_scales_and_packed_codes_equal_those_of_compressed_tensors(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    w, args = weights(*shape, dtype), arguments(4, **NVFP4_ARGS)
    w[2] = w[7]  # replace the tiny row, whose scale rounds to zero: the next test covers it
    low, high = minimum_and_maximum(w, GROUP_16)
    codes, scale, divisor = ours(w, NVFP4)
    assert divisor is not None
    theirs = ct_utils.generate_gparam(low.min(), high.max())
    assert float(divisor) == 2.0 ** math.floor(math.log2(float(theirs)))  # a power of two, whose reciprocal is exact
    divisor = divisor.reshape(1)
    block_scale, _ = ct_utils.calculate_qparams(low, high, args, global_scale=divisor)
    state = {"weight": w.float(), "weight_scale": block_scale, "weight_global_scale": divisor}
    expected = compress("nvfp4-pack-quantized", state, args)
    assert torch.equal(scale, expected["weight_scale"].view(torch.uint8))
    assert torch.equal(pack_nibbles(codes), expected["weight_packed"])


def test_a_tiny_nvfp4_block_is_kept_that_compressed_tensors_flushes_to_zero() -> None:
    w = torch.ones(2, 16)
    w[1] = 2.0**-19
    divisor = ct_utils.generate_gparam(w.min(), w.max())
    args = arguments(4, **NVFP4_ARGS)
    block_scale, _ = ct_utils.calculate_qparams(*minimum_and_maximum(w, GROUP_16), args, global_scale=divisor)
    assert float(block_scale[1, 0]) == 0.125
    codes, scale, _ = ours(w, NVFP4)
    assert decode(scale, E4M3)[1].tolist() == [2.0**-9]
    assert int(codes[1].min()) > 0
