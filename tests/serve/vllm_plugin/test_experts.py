"""The method for experts on layers as vLLM's loaders fill them, against the dequantized weights."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from stub_vllm import Fp8Config, MoEActivation, RoutedExperts, Stub

from minifloat.errors import UnsupportedTensorError
from minifloat.kernels import native
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, TENSOR
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor, quantize_tensor
from minifloat.serve import vllm_plugin as plugin

pytestmark = pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())

EXPERTS, HIDDEN, INNER, TOKENS, CHOSEN = 5, 256, 128, 7, 2
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(TOKENS, HIDDEN, generator=GENERATOR).bfloat16()
#: One expert is chosen by no token.
IDS = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 4], [4, 3], [0, 1], [3, 0]], dtype=torch.int32)
WEIGHTS = torch.rand(TOKENS, CHOSEN, generator=GENERATOR)
NAME = "model.layers.0.mlp.experts"


def moe_config(**changes: Any) -> Any:
    facts = {
        "hidden_dim": HIDDEN,
        "intermediate_size_per_partition": INNER,
        "w13_num_shards": 2,
        "activation": MoEActivation.SILU,
        "in_dtype": torch.bfloat16,
        "tp_size": 1,
        "use_ep": False,
        "is_lora_enabled": False,
        "has_bias": False,
        "swiglu_limit": None,
    }
    return types.SimpleNamespace(**facts | changes)


def declared(scheme: str, **changes: Any) -> dict[str, Any]:
    """The config group of a scheme, as vLLM reads it."""
    spec, inputs = SCHEMES[scheme].weight, SCHEMES[scheme].activation
    strategy = {TENSOR: "tensor", CHANNEL: "channel", BLOCK_128: "block"}.get(spec.granularity, "group")
    facts = {
        "type": "float",
        "num_bits": spec.element.bits,
        "strategy": "tensor_group" if spec.has_global_scale else strategy,
        "block_structure": [128, 128],
    }
    dynamic = None if inputs is None else "local" if inputs.has_global_scale else inputs.dynamic
    return {
        "weights": types.SimpleNamespace(**facts | changes),
        "input_activations": None if inputs is None else types.SimpleNamespace(dynamic=dynamic),
    }


def method_of(vllm: Stub, layer: Any, **schemes: Any) -> Any:
    plugin.register()
    return vllm.configs["compressed-tensors"](**schemes).get_quant_method(layer, NAME)  # type: ignore[attr-defined]


def fill(layer: Any, method: Any, scheme: str, halves: int = 2) -> list[list[QuantizedTensor]]:
    """Make the parameters of a layer, fill them as vLLM's loader does, and return gate, up and down of each expert."""
    method.create_weights(layer, EXPERTS, HIDDEN, INNER, params_dtype=torch.bfloat16, weight_loader="loader")
    assert {parameter.weight_loader for parameter in layer.parameters()} == {"loader"}
    experts = []
    for expert in range(EXPERTS):
        shapes = [(INNER, HIDDEN)] * halves + [(HIDDEN, INNER)]
        weights = [
            quantize_tensor(torch.randn(*shape, generator=GENERATOR) / 16, SCHEMES[scheme].weight) for shape in shapes
        ]
        for part, weight in enumerate(weights):
            name, place = ("w2", ...) if part == halves else ("w13", part)
            stored = {
                method.codes: weight.codes,
                method.scale: weight.scale,
                "weight_global_scale": weight.global_scale,
            }
            for leaf, value in stored.items():
                parameter = getattr(layer, f"{name}_{leaf}", None)
                if parameter is None:
                    continue
                target = parameter.data[expert]
                if leaf in method.scalars:
                    target[place] = value.reshape(())
                    continue
                target = target if name == "w2" else target.chunk(halves)[part]
                target.copy_(value.reshape(target.shape).view(target.dtype) if value.dtype == torch.uint8 else value)
        experts.append(weights)
    return experts


def expected(experts: list[list[QuantizedTensor]], x: torch.Tensor = X, weights: torch.Tensor = WEIGHTS) -> Any:
    y = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for expert, weight in zip(IDS[token].tolist(), weights[token].tolist(), strict=True):
            *rows, down = (part.dequantize().double() for part in experts[expert])
            products = [row @ x[token].double() for row in rows]
            inner = torch.nn.functional.silu(products[0]) * products[1] if len(rows) > 1 else products[0].relu() ** 2
            y[token] += weight * (down @ inner)
    return y


def is_close(y: torch.Tensor, wanted: torch.Tensor) -> bool:
    return y.dtype == torch.bfloat16 and torch.allclose(y.double(), wanted, rtol=2**-6, atol=2e-2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_every_scheme_compute_as_they_are_decoded(vllm: Stub, scheme: str) -> None:
    layer = RoutedExperts(moe_config())
    method = method_of(vllm, layer, others=declared(scheme))
    experts = fill(layer, method, scheme)
    method.process_weights_after_loading(layer)
    assert list(layer.parameters()) == []
    assert is_close(method.apply(layer, X, WEIGHTS, IDS, None, None), expected(experts))


def test_scales_of_inputs_have_a_place_and_are_not_used(vllm: Stub) -> None:
    for scheme, name in (("fp8-static", "input_scale"), ("nvfp4-w4a4", "input_global_scale")):
        layer = RoutedExperts(moe_config())
        method = method_of(vllm, layer, others=declared(scheme))
        experts = fill(layer, method, scheme)
        getattr(layer, f"w13_{name}").data.fill_(3.0)
        method.process_weights_after_loading(layer)
        assert is_close(method.apply(layer, X, WEIGHTS, IDS), expected(experts))


def test_experts_without_a_gate_have_one_half(vllm: Stub) -> None:
    layer = RoutedExperts(moe_config(w13_num_shards=1, activation=MoEActivation.RELU2_NO_MUL))
    layer.ckpt_up_proj_name = None  # type: ignore[assignment]
    method = method_of(vllm, layer, others=declared("nvfp4"))
    experts = fill(layer, method, "nvfp4", halves=1)
    method.process_weights_after_loading(layer)
    assert is_close(method.apply(layer, X, WEIGHTS, IDS), expected(experts))


def test_routers_whose_weights_multiply_inputs(vllm: Stub) -> None:
    layer = RoutedExperts(moe_config())
    layer.apply_router_weight_on_input = True
    method = method_of(vllm, layer, others=declared("fp8"))
    experts = fill(layer, method, "fp8")
    method.process_weights_after_loading(layer)
    weights = WEIGHTS[:, :1].expand(-1, 2)
    y = method.compute(layer, X, WEIGHTS[:, :1], IDS[:, :1])
    one = expected(experts, X * weights[:, :1].bfloat16(), torch.tensor([[1.0, 0.0]]).expand(TOKENS, 2))
    assert is_close(y, one)


def test_experts_in_blocks_of_layout_fp8(vllm: Stub) -> None:
    plugin.register()
    make: Any = vllm.configs["fp8"]
    layer = RoutedExperts(moe_config())
    method = make([128, 128]).get_quant_method(layer, NAME)
    experts = fill(layer, method, "fp8-block")
    assert layer.w13_weight_scale_inv.quant_method == "block"
    method.process_weights_after_loading(layer)
    assert is_close(method.apply(layer, X, WEIGHTS, IDS), expected(experts))
    for config, other in ((make([64, 64]), layer), (make(None), layer), (make([128, 128], (NAME,)), layer)):
        assert config.get_quant_method(other, NAME) == "vLLM's choice"
    assert isinstance(make([128, 128]), Fp8Config)
    assert make([128, 128]).get_quant_method(torch.nn.Linear(1, 1), NAME) == "vLLM's choice"


def test_compiled_experts_compute_as_eager_ones(vllm: Stub) -> None:
    layer = RoutedExperts(moe_config())
    method = method_of(vllm, layer, others=declared("mxfp4"))
    fill(layer, method, "mxfp4")
    method.process_weights_after_loading(layer)
    layer.quant_method = method
    vllm.runners[NAME] = types.SimpleNamespace(routed_experts=layer)
    compiled = torch.compile(lambda x: method.apply(layer, x, WEIGHTS, IDS), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), method.apply(layer, X, WEIGHTS, IDS))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_ep": True}, "start it without --enable-expert-parallel"),
        ({"is_lora_enabled": True}, "start vLLM without --enable-lora"),
        ({"has_bias": True}, "they have biases; serve the model with minifloat"),
        ({"activation": MoEActivation.SWIGLUOAI}, "their activation is swigluoai"),
        ({"swiglu_limit": 7.0}, "their activation has a limit"),
        ({"in_dtype": torch.float64}, "start vLLM with --dtype bfloat16"),
        ({"intermediate_size_per_partition": 192}, "192, which blocks of 128x128 do not divide; start fewer processes"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name_before_weights_are_made(
    vllm: Stub, changes: dict[str, Any], reason: str
) -> None:
    layer = RoutedExperts(moe_config(**changes))
    with pytest.raises(UnsupportedTensorError, match=reason) as caught:
        method_of(vllm, layer, others=declared("fp8-block"))
    assert NAME in str(caught.value)
    assert list(layer.parameters()) == []


def test_groups_that_processes_cut_are_refused(vllm: Stub) -> None:
    layer = RoutedExperts(moe_config(intermediate_size_per_partition=48, tp_size=2))
    with pytest.raises(UnsupportedTensorError, match="48, which blocks of 1x32 do not divide"):
        method_of(vllm, layer, others=declared("mxfp4"))


def test_what_is_left_to_vllm(vllm: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, fp8 = RoutedExperts(moe_config()), declared("fp8")
    for schemes in (
        {"others": None},  # not quantized
        {"others": fp8, "down_proj": declared("mxfp4")},  # which vLLM refuses
        {"others": declared("fp8", type="int")},
        {"others": declared("fp8", num_bits=4)},
        {"others": declared("fp8-block", block_structure=[64, 64])},
    ):
        assert method_of(vllm, layer, **schemes) == "vLLM's choice"
    assert method_of(vllm, torch.nn.Linear(1, 1), others=fp8) == "vLLM's choice"
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert method_of(vllm, layer, others=declared("fp8-block")) == "vLLM's choice"
    assert method_of(vllm, layer, others=fp8).spec == SCHEMES["fp8"].weight
