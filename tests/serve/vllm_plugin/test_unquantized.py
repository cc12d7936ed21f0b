"""BF16 layers: which are packed, when, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stub_vllm import Stub

from minifloat.kernels import native
from minifloat.serve import vllm_plugin as plugin

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())

WEIGHT = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.fixture
def made(vllm: Stub, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A layer of the class that replaces one of vLLM's, with a weight."""
    monkeypatch.setattr(native, "isa", lambda: "avx512_bf16")
    plugin.register()

    def make(name: str, weight: torch.Tensor = WEIGHT, **arguments: Any) -> Any:
        layer = vllm.layers[name](**arguments)
        layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    return make


def is_product(layer: Any) -> bool:
    expected = torch.nn.functional.linear(X.double(), WEIGHT.double())
    return torch.allclose(layer.quant_method.apply(layer, X).double(), expected, rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize("name", ["QKVParallelLinear", "RowParallelLinear", "ReplicatedLinear"])
def test_a_bf16_linear_is_packed_after_loading(made: Any, name: str) -> None:
    layer = made(name)
    assert layer.weight.dtype == torch.uint8
    assert is_product(layer)


def test_a_layer_with_a_quantized_weight_keeps_its_method(made: Any) -> None:
    class Method:
        def process_weights_after_loading(self, layer: Any) -> None:
            """Do nothing."""

    method = Method()
    assert made("QKVParallelLinear", quant_method=method).quant_method is method


@pytest.mark.parametrize("weight", [WEIGHT.half(), WEIGHT.unsqueeze(1)])
def test_what_is_no_bf16_matrix_is_left_to_vllm(made: Any, weight: torch.Tensor) -> None:
    layer = made("ColumnParallelLinear", weight)
    assert layer.quant_method.left == [layer]
    assert layer.weight.dtype == weight.dtype


def test_a_weight_that_latent_attention_reads_is_left_to_vllm(made: Any) -> None:
    layer = made("ColumnParallelLinear")
    other = type(layer)()
    other.weight, other._cpu_skip_gemm_dispatch = torch.nn.Parameter(WEIGHT, requires_grad=False), True
    other.quant_method.process_weights_after_loading(other)
    assert other.quant_method.left == [other]


@pytest.mark.parametrize("name", ["ParallelLMHead", "VocabParallelEmbedding"])
def test_an_embedding_is_packed_when_it_is_first_multiplied_and_keeps_its_table(made: Any, name: str) -> None:
    layer = made(name)
    assert not hasattr(layer, "minifloat_weight")
    assert is_product(layer)
    assert hasattr(layer, "minifloat_weight")
    assert torch.equal(layer.weight, WEIGHT)


def test_an_embedding_in_another_dtype_is_left_to_vllm(made: Any) -> None:
    layer = made("ParallelLMHead", WEIGHT.float())
    assert layer.quant_method.left == [layer]
    assert torch.equal(layer.quant_method.apply(layer, X.float()), X.float() @ WEIGHT.float().T)
