"""The kernel classes on layers as vLLM's loaders fill them, against the dequantized weights."""

from __future__ import annotations

import logging
import types
from typing import Any

import pytest
import torch
from stub_vllm import Stub

from minifloat.errors import ShapeError
from minifloat.kernels import native
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.serve import vllm_plugin as plugin

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())

ROWS, COLS = 160, 256
WEIGHT = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(0))
X = torch.randn(5, COLS, generator=torch.Generator().manual_seed(1)).bfloat16()


def layer_of(**parameters: torch.Tensor) -> Any:
    layer = torch.nn.Module()
    for name, value in parameters.items():
        layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    return layer


def is_product(y: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> bool:
    expected = torch.nn.functional.linear(
        X.double(), weight.dequantize().double(), None if bias is None else bias.double()
    )
    return y.dtype == torch.bfloat16 and torch.allclose(y.double(), expected, rtol=2**-7, atol=2e-2)


def fp8(vllm: Stub) -> Any:
    plugin.register()
    return vllm.kernel("MinifloatFp8LinearKernel")()


@pytest.mark.parametrize("scheme", ["fp8", "fp8-static"])
def test_fp8_per_row_and_per_tensor_is_transposed_by_vllm(vllm: Stub, scheme: str) -> None:
    weight = quantize_tensor(WEIGHT, SCHEMES[scheme].weight)
    layer = layer_of(weight=weight.codes.view(torch.float8_e4m3fn).t(), weight_scale=weight.scale)
    kernel = fp8(vllm)
    kernel.process_weights_after_loading(layer)
    assert is_product(kernel.apply_weights(layer, X), weight)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_blocks_are_not_transposed_and_their_scales_have_two_names(vllm: Stub, name: str) -> None:
    weight = quantize_tensor(WEIGHT, SCHEMES["fp8-block"].weight)
    layer = layer_of(weight=weight.codes.view(torch.float8_e4m3fn), **{name: weight.scale})
    layer.weight_block_size = [128, 128]
    kernel, bias = fp8(vllm), torch.randn(ROWS).bfloat16()
    kernel.process_weights_after_loading(layer)
    assert is_product(kernel.apply_weights(layer, X, bias), weight, bias)


def test_mxfp8_mxfp4_and_nvfp4_multiply_as_they_are_decoded(vllm: Stub) -> None:
    plugin.register()
    for scheme, name in (("mxfp8", "Mxfp8"), ("mxfp4", "Mxfp4"), ("nvfp4", "Nvfp4")):
        weight = quantize_tensor(WEIGHT, SCHEMES[scheme].weight)
        codes, scale = (weight.codes.view(torch.float8_e4m3fn) if scheme == "mxfp8" else weight.codes), weight.scale
        layer = layer_of(weight=codes, weight_scale=scale.view(torch.float8_e4m3fn) if scheme == "nvfp4" else scale)
        if weight.global_scale is not None:
            layer.weight_global_scale = torch.nn.Parameter(1 / weight.global_scale, requires_grad=False)
        kernel = vllm.kernel(f"Minifloat{name}LinearKernel")()
        kernel.process_weights_after_loading(layer)
        assert is_product(kernel.apply_weights(layer, X), weight), scheme


def test_the_packed_weight_replaces_the_parameters_of_the_checkpoint(vllm: Stub) -> None:
    weight = quantize_tensor(WEIGHT, SCHEMES["fp8"].weight)
    layer = layer_of(weight=weight.codes.view(torch.float8_e4m3fn).t(), weight_scale=weight.scale)
    fp8(vllm).process_weights_after_loading(layer)
    assert [(name, value.dtype) for name, value in layer.named_parameters()] == [("weight", torch.uint8)]


def test_a_weight_that_latent_attention_reads_stays_beside_the_packed_one(vllm: Stub) -> None:
    weight = quantize_tensor(WEIGHT, SCHEMES["fp8"].weight)
    layer = layer_of(weight=weight.codes.view(torch.float8_e4m3fn).t(), weight_scale=weight.scale)
    layer._cpu_skip_gemm_dispatch = True
    kernel = fp8(vllm)
    kernel.process_weights_after_loading(layer)
    assert layer.weight.shape == (COLS, ROWS)
    assert is_product(kernel.apply_weights(layer, X), weight)


def test_scales_that_fit_neither_rows_nor_tensor_are_refused(vllm: Stub) -> None:
    layer = layer_of(weight=torch.zeros(COLS, ROWS).to(torch.float8_e4m3fn), weight_scale=torch.ones(3))
    with pytest.raises(ShapeError, match=f"expected 1 or {ROWS} scales for a weight"):
        fp8(vllm).process_weights_after_loading(layer)


def asked(rows: int, cols: int, group: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Any:
    shape = types.SimpleNamespace(
        row=group[0],
        col=group[1],
        is_per_tensor=lambda: group == (-1, -1),
        is_per_channel=lambda: group == (-1, 1),
        is_per_token=lambda: group == (1, -1),
    )
    key = types.SimpleNamespace(scale=types.SimpleNamespace(group_shape=shape))
    return types.SimpleNamespace(weight_quant_key=key, weight_shape=(rows, cols), input_dtype=dtype, out_dtype=dtype)


@pytest.mark.parametrize("group", [(-1, -1), (-1, 1), (1, -1), (128, 128), (1, 128), (32, 32)])
def test_fp8_layers_that_the_kernel_takes(vllm: Stub, group: tuple[int, int]) -> None:
    assert type(fp8(vllm)).can_implement(asked(ROWS, COLS, group)) == (True, None)


def test_fp8_layers_that_the_kernel_refuses_say_why(vllm: Stub) -> None:
    kernel = type(fp8(vllm))
    answer, reason = kernel.can_implement(asked(ROWS, COLS, (24, 24)))
    assert not answer
    assert "E4M3 with FP32 scales per block 24x24" in reason
    answer, reason = kernel.can_implement(asked(ROWS, COLS, (1, -1), torch.float64))
    assert not answer
    assert "has no inputs in torch.float64" in reason


def test_kernels_are_for_cpus(vllm: Stub) -> None:
    kernel = type(fp8(vllm))
    assert kernel.is_supported() == (True, None)
    vllm.platform.is_cpu = lambda: False
    assert kernel.is_supported() == (False, "requires a CPU.")


def test_the_log_says_once_that_inputs_stay_in_16_bits(vllm: Stub) -> None:
    for _ in range(2):
        weight = quantize_tensor(WEIGHT, SCHEMES["fp8"].weight)
        layer = layer_of(weight=weight.codes.view(torch.float8_e4m3fn).t(), weight_scale=weight.scale)
        fp8(vllm).process_weights_after_loading(layer)
    assert sum("inputs of quantized linears stay in 16 bits" in text for text in vllm.messages(logging.INFO)) == 1
    assert "Using MinifloatFp8LinearKernel for FP8 GEMM" in vllm.messages(logging.INFO)


def test_a_compiled_layer_multiplies_as_an_eager_one(vllm: Stub) -> None:
    weight = quantize_tensor(WEIGHT, SCHEMES["mxfp4"].weight)
    plugin.register()
    kernel = vllm.kernel("MinifloatMxfp4LinearKernel")()
    layer = layer_of(weight=weight.codes, weight_scale=weight.scale)
    kernel.process_weights_after_loading(layer)
    eager = kernel.apply_weights(layer, X)
    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), eager)
