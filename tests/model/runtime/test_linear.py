"""Modules that hold quantized weights: what survives a cast or a move, and what experts answer."""

import copy

import pytest
import torch
from torch import nn

from minifloat.errors import ShapeError
from minifloat.model.runtime.experts import QuantizedExperts, indexes_experts
from minifloat.model.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor


def quantized(scheme: str, rows: int = 48, cols: int = 64, seed: int = 0) -> QuantizedTensor:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 1e-4
    return quantize_tensor(weight, SCHEMES[scheme].weight)


def make_linear(scheme: str) -> QuantizedLinear:
    module = QuantizedLinear(quantized(scheme), torch.float32)
    module.register_parameter("bias", nn.Parameter(torch.randn(48), requires_grad=False))
    return module


CASTS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.bfloat16),
    "type": lambda module: module.type(torch.float16),
    "inside a model": lambda module: nn.Sequential(module).half()[0],
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("cast", CASTS)
def test_a_cast_leaves_codes_and_scales_alone(scheme: str, cast: str) -> None:
    module = make_linear(scheme)
    before = module.quantized.dequantize()
    module = CASTS[cast](module)
    assert module.scale.dtype == quantized(scheme).scale.dtype
    assert torch.equal(module.quantized.dequantize(), before)
    assert module.bias is not None
    assert module.bias.dtype == module.dtype == module.weight.dtype != torch.float32


def test_a_cast_there_and_back_changes_no_result() -> None:
    module, x = make_linear("fp8"), torch.randn(3, 64)
    module.register_parameter("bias", None)
    expected = module(x)
    assert torch.equal(module.half().float()(x), expected)


def test_a_move_takes_codes_and_scales_along() -> None:
    module = make_linear("nvfp4").to("meta")
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
    assert module.dtype == torch.float32


def test_the_state_dict_and_a_copy_hold_the_same_weight() -> None:
    module, other = make_linear("nvfp4"), make_linear("nvfp4")
    other.codes.zero_()
    other.load_state_dict(copy.deepcopy(module).state_dict())
    assert torch.equal(other.weight, module.weight)


def test_the_weight_is_no_parameter() -> None:
    assert [name for name, _ in make_linear("fp8").named_parameters()] == ["bias"]


def test_the_repr_names_the_format() -> None:
    assert repr(make_linear("fp8-block")) == "QuantizedLinear([48, 64], E4M3, block 128x128, FP32 scales, bias=True)"


def experts(transposed: bool) -> tuple[QuantizedExperts, list[torch.Tensor]]:
    parts = [[quantized("mxfp4", 16, 64, seed), quantized("mxfp4", 16, 64, seed + 10)] for seed in range(3)]
    full = [torch.cat([part.dequantize() for part in expert]) for expert in parts]
    weights = [[QuantizedWeight(part, torch.bfloat16) for part in expert] for expert in parts]
    return QuantizedExperts(weights, transposed, multiplied=False), full


@pytest.mark.parametrize("index", [2, torch.tensor(2), torch.tensor([2])])
def test_experts_answer_with_gate_above_up(index: int | torch.Tensor) -> None:
    stack, full = experts(transposed=False)
    assert stack.shape == (3, 32, 64)
    assert torch.equal(stack[index], full[2].bfloat16())


def test_transposed_experts_answer_with_the_transpose() -> None:
    stack, full = experts(transposed=True)
    assert stack.shape == (3, 64, 32)
    assert torch.equal(stack[1], full[1].bfloat16().T)


def test_experts_follow_the_dtype_of_the_model() -> None:
    stack, full = experts(transposed=False)
    assert torch.equal(stack.float()[0], full[0])


@pytest.mark.parametrize("index", [torch.tensor([0, 1]), torch.tensor(1.0)])
def test_experts_refuse_an_index_that_is_not_one_integer(index: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="one at a time"):
        experts(transposed=False)[0][index]


def test_experts_of_different_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"rows \{16, 48\}"):
        QuantizedExperts([[QuantizedWeight(quantized("fp8", rows), torch.float32)] for rows in (16, 48)], False, True)


def test_the_source_of_a_class_tells_whether_it_indexes_its_experts() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    assert indexes_experts(MixtralExperts, "gate_up_proj")
    assert indexes_experts(GptOssExperts, "down_proj")
    assert not indexes_experts(Llama4TextExperts, "gate_up_proj")
    assert not indexes_experts(MixtralExperts, "a_parameter_that_it_does_not_have")


def test_a_class_without_source_is_not_trusted_to_index_its_experts() -> None:
    namespace: dict[str, type[nn.Module]] = {}
    exec("class Hidden(nn.Module):\n def forward(self): return self.w[0]", {"nn": nn}, namespace)
    assert not indexes_experts(namespace["Hidden"], "w")
