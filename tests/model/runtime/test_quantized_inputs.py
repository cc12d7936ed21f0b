"""`load` of W8A8 checkpoints: the logits of transformers with compressed-tensors, and of a model quantized by hand.

transformers quantizes the inputs of linears in its forward (not those of fused experts, and no partial groups), in
float32 where the model is; both sides then sum the same products in float32. Activations that differ by rounding fall
on the same codes unless they lie that close to a tie, so the tolerance is that of float32, 1e-5 of the largest logit,
and a flip of one code would show: it is about a hundred times that. One that an order of summation flips is no error:
whole models are run by the reference here, and the kernels are held to it linear by linear, on the same inputs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from minifloat.errors import ConfigError, NonFiniteError, ShapeError
from minifloat.kernels import native
from minifloat.model.runtime.experts import ExpertFactor, QuantizedExperts, multiplies_experts
from minifloat.model.runtime.linear import QuantizedLinear, QuantizedWeight
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.granularity import GROUP_16
from minifloat.numerics.scheme import SCHEMES, ActivationSpec
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

INTEROP = Path(__file__).parents[2] / "data" / "interop"
IDS = torch.arange(40)[None]
MakeModel = Callable[..., Path]


def with_and_without_inputs(folder: Path, impl: str = "reference") -> tuple[Any, Any]:
    """Return the model with the quantized inputs that it declares, and weight-only."""
    quantized, plain = (LoadOptions(dtype=torch.float32, impl=impl, weight_only=flag) for flag in (False, True))
    return load(folder, quantized), load(folder, plain)


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def assert_same_but_for_a_flip(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As `assert_same`, for sums in two orders whose results are quantized again.

    Processors sum in different orders too. A number that lies between two codes by less than the difference, one among
    some hundred thousand here, takes another code: one token may be off by what one code of one input changes.
    """
    whole = 1e-5 * float(expected.abs().max())
    off = (found - expected).abs().amax(dim=-1).flatten()
    assert int((off > whole).sum()) <= 1, off
    assert float(off.max()) <= 10 * whole, off


def as_transformers_runs(folder: Path) -> PreTrainedModel:
    """With the quantization of inputs that compressed-tensors does in the forward."""
    pytest.importorskip("compressed_tensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if not any(getattr(module, "quantization_enabled", True) for module in model.modules()):
        pytest.skip("this transformers does not quantize inputs")
    return model


def quantized_by_hand(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """The input as the checkpoint's spec says, by torch's own cast, in padded groups of columns."""
    assert weight.activation is not None
    groups = weight.activation.granularity.cols or x.shape[-1]
    padded = nn.functional.pad(x, (0, -x.shape[-1] % groups)).unflatten(-1, (-1, groups))
    scale = weight.input_scale
    if scale is None:
        scale = (padded.abs().amax(-1, keepdim=True) / torch.tensor(448.0)).clamp(min=2.0**-60)
    values = (padded / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return values.flatten(-2)[..., : x.shape[-1]]


def twin(model: PreTrainedModel, weight_only: PreTrainedModel) -> PreTrainedModel:
    """The weight-only model with every linear replaced by a plain one, and inputs quantized by hooks."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight = nn.Parameter(module.quantized.dequantize())
            plain.bias = module.bias
            plain.register_forward_pre_hook(lambda _, args, it=module: (quantized_by_hand(args[0], it),))
            weight_only.set_submodule(name, plain)
    return weight_only


# ------------------------------------------------------------------------------------------------ whole models


@pytest.mark.parametrize("name", ["llmc-fp8-static", "llmc-fp8-dynamic"])
def test_the_logits_are_those_of_transformers_with_compressed_tensors(name: str) -> None:
    expected = load_file(INTEROP / name / "expected.safetensors")
    found = logits(load(INTEROP / name, LoadOptions(dtype=torch.float32, impl="reference")), expected["input_ids"])
    assert_same(found, logits(as_transformers_runs(INTEROP / name), expected["input_ids"]))
    assert (found[0] - expected["logits"]).abs().max() > 0.1  # those are of the weights alone


def with_weights_in_float32(theirs: PreTrainedModel, mine: PreTrainedModel) -> PreTrainedModel:
    """Give the model of transformers the weights of ours; it would decode weights of MX and NVFP4 to BF16 at first."""
    theirs._forward_pre_hooks.clear()
    for name, module in mine.named_modules():
        if isinstance(module, QuantizedLinear):
            linear = theirs.get_submodule(name)
            linear.weight = nn.Parameter(module.quantized.dequantize(), requires_grad=False)
            if module.input_scale is not None:  # transformers' own copy, to which the checkpoint's must be equal
                assert torch.equal(linear.input_global_scale, module.input_scale.reshape(1))
    return theirs


@pytest.mark.parametrize("name", ["llmc-mxfp8", "llmc-mxfp4", "llmc-nvfp4"])
def test_inputs_of_mx_and_nvfp4_give_the_logits_of_compressed_tensors(name: str) -> None:
    expected = load_file(INTEROP / name / "expected.safetensors")
    mine = load(INTEROP / name, LoadOptions(dtype=torch.float32, impl="reference"))
    assert all(m.activation is not None for m in mine.modules() if isinstance(m, QuantizedLinear))
    found = logits(mine, expected["input_ids"])
    theirs = with_weights_in_float32(as_transformers_runs(INTEROP / name), mine)
    assert_same(found, logits(theirs, expected["input_ids"]))
    assert (found[0] - expected["logits"]).abs().max() > 0.1  # those are of the weights alone


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block"])
def test_our_own_checkpoints_have_the_logits_of_transformers(
    make_qwen3: MakeModel, tmp_path: Path, scheme: str
) -> None:
    whole = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
    quantize_checkpoint(make_qwen3(tmp_path / "plain", **whole), tmp_path / "q", scheme)
    found = logits(load(tmp_path / "q", LoadOptions(dtype=torch.float32, impl="reference")))
    assert_same(found, logits(as_transformers_runs(tmp_path / "q")))


FIXTURES = ["llmc-fp8-static", "llmc-fp8-dynamic", "llmc-fp8-block", "modelopt-fp8-kv", "modelopt-fp8-channel"]


@pytest.mark.parametrize("name", [*FIXTURES, "deepseek-block128", "vllm-fp8-static"])
def test_the_logits_are_those_of_inputs_quantized_by_hand(name: str) -> None:
    model, plain = with_and_without_inputs(INTEROP / name)
    assert all(m.activation is not None for m in model.modules() if isinstance(m, QuantizedLinear))
    weight_only = logits(plain)
    expected = logits(twin(model, plain))
    assert_same(logits(model), expected)
    assert (expected - weight_only).abs().max() > 0.05


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weight_only_leaves_all_inputs_alone(
    llama_folder: Path, tmp_path: Path, scheme: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme)
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(tmp_path / "q", LoadOptions(weight_only=True))
    assert not [m for m in model.modules() if isinstance(m, QuantizedWeight) and m.activation is not None]
    assert not caplog.text


def test_a_model_in_bf16_quantizes_what_bf16_gives(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8-dynamic")
    model = load(tmp_path / "q")
    linear = model.model.layers[0].mlp.down_proj
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = quantized_by_hand(x.float(), linear) @ linear.quantized.dequantize().T
    found = linear(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2.0**-7, atol=1e-5)


@pytest.mark.parametrize("name", [*FIXTURES, "deepseek-block128", "vllm-fp8-static", "llmc-moe-fp8-dynamic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_what_the_reference_gives_for_the_same_input(name: str, dtype: torch.dtype) -> None:
    model, expected = (load(INTEROP / name, LoadOptions(dtype=dtype, impl=impl)) for impl in ("auto", "reference"))
    weights = {path: m for path, m in model.named_modules() if isinstance(m, QuantizedWeight)}
    assert weights
    generator = torch.Generator().manual_seed(0)
    for path, module in weights.items():
        x = (torch.randn(7, module.shape[1], generator=generator) * 3).to(dtype)
        assert module.is_packed == (native.load() is not None)
        one, other = module.multiply(x), expected.get_submodule(path).multiply(x)
        assert one.dtype == other.dtype == dtype
        # Both sum the same products in float32, which a 16-bit result then rounds: at most to neighbours.
        rtol = 1e-5 if dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(one, other, rtol=rtol, atol=1e-6 * float(other.abs().max()), msg=path)


# ----------------------------------------------------------------------------------------------------- experts


def experts_by_hand(model: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Give the plain model experts of tensors, and a forward that quantizes every token's input to them."""
    for layer, mine in zip(plain.model.layers, model.model.layers, strict=True):
        if not hasattr(layer.mlp, "experts"):
            continue
        stacks = mine.mlp.experts.gate_up_proj, mine.mlp.experts.down_proj

        def forward(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, stacks=stacks) -> torch.Tensor:  # type: ignore[no-untyped-def]
            out = torch.zeros_like(x)
            for token in range(x.shape[0]):
                for expert, factor in zip(index[token].tolist(), weights[token], strict=True):
                    gate, up = stacks[0].experts[expert]
                    (down,) = stacks[1].experts[expert]
                    halves = [
                        quantized_by_hand(x[token, None], part) @ part.quantized.dequantize().T for part in (gate, up)
                    ]
                    inner = nn.functional.silu(halves[0]) * halves[1]
                    out[token] += factor * (quantized_by_hand(inner, down) @ down.quantized.dequantize().T)[0]
            return out

        layer.mlp.experts.forward = forward


def test_experts_of_another_tool_quantize_their_inputs_token_by_token() -> None:
    name = INTEROP / "llmc-moe-fp8-dynamic"
    model, plain = with_and_without_inputs(name)
    weight_only = logits(plain)
    experts_by_hand(model, plain)
    assert_same(logits(model), logits(twin(model, plain)))
    assert (logits(model) - weight_only).abs().max() > 0.1


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("scheme", ["fp8-dynamic", "fp8-block"])
def test_experts_of_our_own_quantize_their_inputs(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str
) -> None:
    overrides = ["self_attn=bf16", "shared_experts=bf16"] if model_type == "deepseek_v3" else ["self_attn=bf16"]
    quantize_checkpoint(
        make_model(tmp_path / "plain", model_type), tmp_path / "q", scheme, QuantizeOptions(overrides=overrides)
    )
    model, plain = with_and_without_inputs(tmp_path / "q")
    weight_only = logits(plain)
    experts_by_hand(model, plain)
    assert_same_but_for_a_flip(logits(model), logits(twin(model, plain)))
    assert (logits(model) - weight_only).abs().max() > 1e-3


def test_a_transposed_expert_multiplies_like_its_parts() -> None:
    scheme, weight = SCHEMES["fp8-dynamic"], torch.randn(16, 64)
    parts = [QuantizedWeight(quantize_tensor(weight, scheme.weight), torch.float32, scheme.activation)]
    x = torch.randn(5, 64)
    straight, transposed = (QuantizedExperts([parts], transposed, True)[0] for transposed in (False, True))
    assert isinstance(straight, ExpertFactor)
    expected = parts[0].multiply(x)
    assert torch.equal(nn.functional.linear(x, straight), expected)  # type: ignore[arg-type]
    assert torch.equal(x @ transposed, expected)  # type: ignore[operator]
    with pytest.raises(TypeError):  # which torch replaces by the usual one for operators
        x @ straight  # type: ignore[operator]
    with pytest.raises(TypeError, match="can only be multiplied"):
        nn.functional.linear(x, transposed)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can only be multiplied"):
        torch.cat([straight, straight])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="can only be multiplied"):
        nn.functional.linear(x, straight, torch.ones(16))  # type: ignore[arg-type]


def test_the_source_of_a_class_tells_whether_it_only_multiplies_with_its_experts() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    assert multiplies_experts(MixtralExperts, "gate_up_proj")
    assert multiplies_experts(GptOssExperts, "down_proj")
    assert not multiplies_experts(Llama4TextExperts, "gate_up_proj")
    assert not multiplies_experts(ConvertingExperts, "converted")
    assert not multiplies_experts(ConvertingExperts, "left_factor")
    assert not multiplies_experts(ConvertingExperts, "added")
    assert multiplies_experts(ConvertingExperts, "multiplied")


class ConvertingExperts(nn.Module):
    """What classes of experts may do."""

    def forward(self, x: torch.Tensor, e: int) -> torch.Tensor:
        x = x.float() @ self.converted[e].float()
        x = self.left_factor[e] @ x
        x = x + self.added[e]
        return nn.functional.linear(x, self.multiplied[e]) @ self.multiplied[e]


def test_experts_that_are_not_only_multiplied_run_weight_only_and_are_named(
    make_mixtral: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minifloat.model.runtime.load.multiplies_experts", lambda *_: False)
    quantize_checkpoint(
        make_mixtral(tmp_path / "plain"), tmp_path / "q", "fp8-dynamic", QuantizeOptions(overrides=["self_attn=bf16"])
    )
    with caplog.at_level(logging.WARNING, "minifloat"):
        model, plain = with_and_without_inputs(tmp_path / "q", impl="auto")
    assert "24 modules are computed weight-only, because the code of their experts" in caplog.text
    assert "model.layers.0.block_sparse_moe.experts.0.w1" in caplog.text
    assert torch.equal(logits(model), logits(plain))


# ------------------------------------------------------------------------------------------- what is said instead


def test_inputs_that_are_not_simulated_are_named(caplog: pytest.LogCaptureFixture) -> None:
    name = "deepseek-block32-ue8m0"
    expected = load_file(INTEROP / name / "expected.safetensors")
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(INTEROP / name, LoadOptions(dtype=torch.float32))
    assert "computed weight-only, because inputs in E" in caplog.text
    assert "model.layers.0.self_attn" in caplog.text
    assert_same(logits(model, expected["input_ids"])[0], expected["logits"])


def test_every_module_of_a_mixture_quantizes_its_own_inputs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(INTEROP / "llmc-mixed")
    held = {n.rsplit(".", 1)[1]: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert held["q_proj"].activation == SCHEMES["fp8-dynamic"].activation
    assert held["gate_proj"].activation == ActivationSpec(E2M1, GROUP_16, dynamic=True, scale=E4M3)
    assert held["gate_proj"].input_scale is not None
    assert held["down_proj"].activation is None
    assert not caplog.text


def test_the_input_scale_of_modelopt_becomes_a_divisor() -> None:
    model = load(INTEROP / "modelopt-nvfp4", LoadOptions(dtype=torch.float32))
    stored = load_file(INTEROP / "modelopt-nvfp4" / "model.safetensors")
    linears = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    assert linears
    for name, linear in linears.items():
        assert linear.input_scale == 1 / stored[f"{name}.input_scale"]


def test_a_warning_names_dequantized_experts_as_weight_only(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(make_model(tmp_path / "plain", "llama4_text"), tmp_path / "q", "fp8-dynamic")
    with caplog.at_level(logging.WARNING, "minifloat"):
        load(tmp_path / "q")
    assert "computed weight-only, because they are held dequantized: model.layers.0.feed_forward.experts" in caplog.text


# --------------------------------------------------------------------------------------------------- static scales


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A checkpoint with static scales that a test may change."""
    folder = tmp_path / "static"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((INTEROP / "llmc-fp8-static" / name).read_bytes())
    return folder


def set_scale(folder: Path, value: torch.Tensor | None) -> str:
    """Change one scale; the module that it belongs to."""
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.up_proj.input_scale"))
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name.removesuffix(".input_scale")


def test_a_static_checkpoint_without_a_scale_is_refused_by_the_module(static: Path) -> None:
    module = set_scale(static, None)
    with pytest.raises(ConfigError, match=rf"config\.json: .* no input_scale for {module}; load it weight-only"):
        load(static)
    load(static, LoadOptions(weight_only=True))


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
def test_a_scale_that_no_input_can_be_divided_by_is_refused(static: Path, value: float) -> None:
    module = set_scale(static, torch.tensor([value]))
    with pytest.raises(NonFiniteError, match=rf"{module}\.input_scale: expected a positive, finite scale"):
        load(static)


def test_several_scales_for_one_input_are_refused(static: Path) -> None:
    set_scale(static, torch.ones(2))
    with pytest.raises(ShapeError, match=r"expected one scale .* found shape \[2\]"):
        load(static)


def test_a_scale_in_bf16_is_read_exactly_and_survives_casts(static: Path) -> None:
    value = torch.tensor([0.0123], dtype=torch.bfloat16)
    module = set_scale(static, value)
    model = load(static)
    for cast in (model, model.half(), model.float()):
        scale = cast.get_submodule(module).input_scale
        assert scale.dtype == torch.float32
        assert scale.shape == ()
        assert float(scale) == float(value)


def test_the_repr_names_how_inputs_are_quantized(static: Path) -> None:
    model = load(static)
    linear = next(module for module in model.modules() if isinstance(module, QuantizedLinear))
    assert "FP32 scales, inputs E4M3 per tensor (static), " in repr(linear)


def test_a_declaration_in_the_config_alone_decides(static: Path) -> None:
    config = json.loads((static / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    config["quantization_config"]["config_groups"]["group_0"]["format"] = "naive-quantized"
    (static / "config.json").write_text(json.dumps(config))
    expected = logits(load(INTEROP / "llmc-fp8-static", LoadOptions(weight_only=True)))
    assert torch.equal(logits(load(static)), expected)
