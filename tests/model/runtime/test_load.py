"""`load` against transformers' own `from_pretrained`: plain checkpoints bit for bit, quantized ones with their weights
replaced by the dequantized ones."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, ConfigError, ShapeError, UnsupportedTensorError, UsageError
from minifloat.model.layouts import describe, read_weight
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

MakeModel = Callable[..., Path]
MODEL_TYPES = ["llama", "qwen3", "mixtral", "qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3"]
IDS = torch.tensor([[3, 41, 17, 59, 8, 26, 33, 50]])


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def modules_of(model: PreTrainedModel, kind: type) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def dequantized_twin(plain: Path, quantized: Path, folder: Path) -> PreTrainedModel:
    """transformers' float32 model of the plain checkpoint, its weights replaced by the dequantized ones."""
    shutil.copytree(plain, folder)
    tensors = {name: tensor.float() for name, tensor in load_file(plain / "model.safetensors").items()}
    with Checkpoint.open(quantized) as checkpoint:
        for module, stored in describe(checkpoint).weights.items():
            weight = read_weight(checkpoint, stored).dequantize()
            if f"{module}.weight" in tensors:
                tensors[f"{module}.weight"] = weight
            else:
                experts, expert, projection = module.rsplit(".", 2)  # fused [E, in, out]: gate before up
                fused = tensors[f"{experts}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"]
                start = weight.shape[0] if projection == "up_proj" else 0
                fused[int(expert), :, start : start + weight.shape[0]] = weight.T
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


# ------------------------------------------------------------------------------------------ plain checkpoints


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_plain_checkpoint_becomes_what_from_pretrained_makes_of_it(
    make_model: MakeModel, tmp_path: Path, model_type: str, dtype: torch.dtype | None
) -> None:
    folder = make_model(tmp_path / "m", model_type)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto")
    model = load(folder, LoadOptions(dtype=dtype))
    assert type(model) is type(expected)
    assert not model.training
    for mine, theirs in (
        (model.state_dict(), expected.state_dict()),
        (dict(model.named_parameters()), dict(expected.named_parameters())),
        (dict(model.named_buffers()), dict(expected.named_buffers())),
    ):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name
    assert torch.equal(logits(model), logits(expected.eval()))


def test_shards_and_one_file_give_the_same_model(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert torch.equal(logits(load(tmp_path / "sharded")), logits(load(folder)))


def test_tied_embeddings_are_one_tensor(make_llama: MakeModel, tmp_path: Path) -> None:
    model = load(make_llama(tmp_path / "m", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "m")))


def test_a_checkpoint_of_the_base_model_has_its_prefix_added(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m", tie_word_embeddings=True)
    expected = logits(load(folder))
    edit_tensors(folder, lambda t: t.update({name.removeprefix("model."): t.pop(name) for name in list(t)}))
    assert torch.equal(logits(load(folder)), expected)


def test_the_generation_config_is_loaded(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9], "top_k": 11}))
    config = load(folder).generation_config
    assert config is not None
    assert (config.eos_token_id, config.top_k) == ([7, 9], 11)


def test_without_a_dtype_in_the_config_that_of_the_tensors_counts(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m", dtype="float16")
    edit_config(folder, dtype=None)
    assert load(folder).dtype == torch.float16


def test_parameters_want_no_gradient(llama_folder: Path) -> None:
    assert not any(parameter.requires_grad for parameter in load(llama_folder).parameters())


# -------------------------------------------------------------------------------------- quantized checkpoints


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "qwen3_moe", "llama4_text", "deepseek_v3"])
def test_a_quantized_checkpoint_has_the_logits_of_its_dequantized_weights(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str
) -> None:
    plain = make_model(tmp_path / "plain", model_type)
    quantize_checkpoint(plain, tmp_path / "q", scheme)
    model = load(tmp_path / "q", LoadOptions(dtype=torch.float32, weight_only=True))
    expected = logits(dequantized_twin(plain, tmp_path / "q", tmp_path / "twin"))
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert modules_of(model, QuantizedLinear)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_stay_quantized(make_model: MakeModel, tmp_path: Path, model_type: str) -> None:
    quantize_checkpoint(make_model(tmp_path / "plain", model_type), tmp_path / "q", "mxfp4")
    model = load(tmp_path / "q")
    stacks = modules_of(model, QuantizedExperts)
    assert {name.rsplit(".", 1)[1] for name in stacks} == {"gate_up_proj", "down_proj"}
    assert not [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]


def test_experts_that_a_model_multiplies_as_a_whole_are_dequantized_and_named(
    make_model: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(make_model(tmp_path / "plain", "llama4_text"), tmp_path / "q", "fp8")
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(tmp_path / "q")
    assert not modules_of(model, QuantizedExperts)
    assert "model.layers.0.feed_forward.experts.0.down_proj.weight" in caplog.text


def test_no_parameter_holds_a_quantized_weight(make_llama: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_llama(tmp_path / "plain", attention_bias=True), tmp_path / "q", "fp8")
    model = load(tmp_path / "q")
    kept = {name.rsplit(".", 2)[-2] for name, p in model.named_parameters() if p.ndim == 2}
    assert kept == {"embed_tokens", "lm_head"}
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.layers[0].self_attn.q_proj.bias is not None


def test_a_quantized_lm_head_is_not_tied_over(
    make_llama: MakeModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantize_checkpoint(
        make_llama(tmp_path / "plain"), tmp_path / "q", "fp8", QuantizeOptions(overrides=["lm_head=fp8"])
    )
    untied = logits(load(tmp_path / "q"))
    edit_config(tmp_path / "q", tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "minifloat"):
        model = load(tmp_path / "q")
    assert isinstance(model.lm_head, QuantizedLinear)
    assert torch.equal(logits(model), untied)
    assert "lm_head.weight" in caplog.text


def test_transformers_does_not_save_a_quantized_model(make_llama: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_llama(tmp_path / "plain"), tmp_path / "q", "fp8")
    with pytest.raises(UsageError, match="copy the folder"):
        load(tmp_path / "q").save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


# ------------------------------------------------------------------------------------- everything is accounted for


@pytest.fixture
def folder(make_llama: MakeModel, tmp_path: Path) -> Path:
    return make_llama(tmp_path / "m")


def test_an_expert_that_is_missing_is_an_error(make_mixtral: MakeModel, tmp_path: Path) -> None:
    quantize_checkpoint(make_mixtral(tmp_path / "plain"), tmp_path / "q", "fp8")
    expert = "model.layers.0.block_sparse_moe.experts.1.w2"
    edit_tensors(tmp_path / "q", lambda t: [t.pop(f"{expert}.{kind}") for kind in ("weight", "weight_scale")])
    with pytest.raises(ShapeError, match=r"model\.layers\.0\.mlp\.experts\.down_proj.*\[4, .*\[3, "):
        load(tmp_path / "q")


def test_an_up_projection_without_its_gate_is_an_error(make_mixtral: MakeModel, tmp_path: Path) -> None:
    folder = make_mixtral(tmp_path / "plain")
    edit_tensors(folder, lambda t: t.pop("model.layers.0.block_sparse_moe.experts.1.w1.weight"))
    with pytest.raises(CheckpointError, match=r"gate_up_proj"):
        load(folder)


def test_a_quantized_weight_of_the_wrong_shape_is_named(folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(folder, tmp_path / "q", "fp8")
    edit_config(tmp_path / "q", intermediate_size=128)
    with pytest.raises(ShapeError, match=r"mlp\.\w+_proj\.weight: the config expects"):
        load(tmp_path / "q")


def test_rotary_buffers_of_old_checkpoints_are_dropped_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    with caplog.at_level(logging.WARNING, "minifloat"):
        load(folder)
    assert name in caplog.text


def test_layers_for_multi_token_prediction_are_dropped_by_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.2.eh_proj.weight"
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.ones(4, 4)}))
    with pytest.raises(CheckpointError, match=name):
        load(folder)
    edit_config(folder, num_nextn_predict_layers=1)
    with caplog.at_level(logging.WARNING, "minifloat"):
        load(folder)
    assert name in caplog.text


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.uint8])
def test_a_parameter_stored_as_no_floating_number_is_refused(folder: Path, dtype: torch.dtype) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=dtype)}))
    with pytest.raises(UnsupportedTensorError, match=r"model\.norm\.weight: .*float.* found (C64|I64|U8)"):
        load(folder)


# ------------------------------------------------------------------------------------------- files not believed


def test_a_truncated_shard_is_found_before_transformers_sees_anything(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    monkeypatch.setattr("minifloat.model.runtime.load.empty_model", lambda *_: pytest.fail("transformers was asked"))
    with pytest.raises(CheckpointError):
        load(folder)


def test_code_in_the_checkpoint_is_not_run(folder: Path) -> None:
    (folder / "modeling.py").write_text("raise SystemExit('it ran')")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    edit_config(folder, model_type="own_model", auto_map=auto_map)
    with pytest.raises(ConfigError, match="own_model: it needs the Python code"):
        load(folder)


def test_code_beside_a_known_model_type_is_left_alone(folder: Path) -> None:
    expected = logits(load(folder))
    (folder / "modeling.py").write_text("raise SystemExit('it ran')")
    edit_config(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_a_config_does_not_choose_kernels_from_the_hub(folder: Path, key: str) -> None:
    expected = load(folder).config._attn_implementation
    edit_config(folder, **{key: "somebody/kernels"})
    assert load(folder).config._attn_implementation == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "nobody_knows"}, "model_type nobody_knows: transformers .* does not have it"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": "wide"}, "hidden_size: expected a positive integer, found 'wide'"),
        ({"num_attention_heads": 0}, "num_attention_heads: expected a positive integer, found 0"),
        ({"dtype": "int8"}, "dtype: expected a floating dtype"),
        ({"dtype": "load"}, "dtype: expected a floating dtype"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "transformers .* cannot"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        load(folder)


def test_an_architecture_that_generates_no_text_falls_back_to_the_causal_model(folder: Path) -> None:
    edit_config(folder, architectures=["LlamaForSequenceClassification", "load_dataset", "NoSuchModel"])
    assert type(load(folder)).__name__ == "LlamaForCausalLM"


def test_a_generation_config_that_is_no_json_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(folder)
