"""Attribution: known changes are found, and the damage equals that of independent calculations."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from minifloat.errors import UsageError
from minifloat.evaluate.compare.attribution import Attribution, attribute
from minifloat.evaluate.compare.options import Tolerance
from minifloat.evaluate.compare.transformers_model import TransformersModel
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

IN_FLOAT32 = LoadOptions(dtype=torch.float32)

MakeModel = Callable[..., Path]

WINDOWS = torch.randint(0, 256, (6, 32), generator=torch.Generator().manual_seed(0))
UNBOUNDED = Tolerance(max_ppl_increase=float("inf"), max_kl=float("inf"), min_same_top1=0)
#: Enough time to measure every module of such small models.
SECONDS = 60.0


def predictor(folder: Path, **options: Any) -> TransformersModel:
    return TransformersModel.of(folder, LoadOptions(dtype=torch.float32, **options))


def attributed(baseline: Path, candidate: Path, seconds: float = SECONDS) -> Attribution:
    return attribute(predictor(baseline), predictor(candidate), WINDOWS, UNBOUNDED, seconds)


def changed(folder: Path, copy: Path, name: str, factor: float = 1.05) -> Path:
    """Copy a checkpoint and multiply one tensor."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def kl_of_torch(baseline: PreTrainedModel, candidate: PreTrainedModel) -> float:
    with torch.no_grad():
        p, q = (model(WINDOWS).logits[:, :-1].double().log_softmax(-1) for model in (baseline, candidate))
    return float(nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean())


def snapshot(model: PreTrainedModel) -> list[tuple[str, int, bytes]]:
    """Return the name, identity and bytes of every tensor of a model, in the model's order."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, id(t), t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors]


def test_an_output_layer_that_was_quantized_while_it_was_loaded_costs_no_bytes_and_is_no_override(
    llama_folder: Path, mxfp4_folder: Path
) -> None:
    tight = Tolerance(max_ppl_increase=0, max_kl=0, min_same_top1=1)
    candidate = predictor(mxfp4_folder, lm_head="fp8")
    found = attribute(predictor(llama_folder), candidate, WINDOWS, tight, SECONDS)
    (row,) = [row for row in found.rows if row.module == "lm_head"]
    assert row.extra_bytes == 0
    assert row.kl_alone is not None
    assert row.kl_alone > 0
    assert found.suggestion is not None
    assert found.suggestion.everything
    assert not any(re.search(override.partition("=")[0], "lm_head") for override in found.suggestion.overrides)


@pytest.mark.parametrize("module", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8-dynamic"])
def test_a_scale_multiplied_by_1_05_is_the_only_difference(
    llama_folder: Path, tmp_path: Path, module: str, scheme: str
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme)
    other = changed(tmp_path / "q", tmp_path / "other", f"{module}.weight_scale")
    result = attributed(tmp_path / "q", other)
    (row,) = result.rows
    whole = kl_of_torch(load(tmp_path / "q", IN_FLOAT32), load(other, IN_FLOAT32))
    assert (row.module, row.kl_without, row.extra_bytes) == (module, 0, 0)
    assert row.kl_alone == pytest.approx(whole, rel=1e-6)
    assert row.sqnr_db == pytest.approx(26, abs=0.1)  # 5% of the output
    assert (result.measured, result.of, result.tokens, result.suggestion) == (1, 1, 6 * 31, None)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block"])
def test_a_module_with_a_wrong_scale_ranks_before_the_damage_of_quantization(
    make_llama: MakeModel, tmp_path: Path, scheme: str
) -> None:
    plain = make_llama(tmp_path / "plain")
    quantize_checkpoint(plain, tmp_path / "q", scheme)
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    for name in (name for name in tensors if name.endswith("down_proj.weight_scale")):
        result = attributed(plain, changed(tmp_path / "q", tmp_path / name, name, 1.2))
        assert result.rows[0].module == name.removesuffix(".weight_scale")
        assert result.measured == result.of == 14


@pytest.mark.parametrize(
    "tensor", ["model.layers.1.self_attn.o_proj.weight", "model.layers.0.input_layernorm.weight", "lm_head.weight"]
)
def test_one_changed_tensor_of_a_plain_copy_is_the_only_difference(
    llama_folder: Path, tmp_path: Path, tensor: str
) -> None:
    other = changed(llama_folder, tmp_path / "other", tensor)
    (row,) = attributed(llama_folder, other).rows
    assert (row.module, row.kl_without, row.extra_bytes) == (tensor.removesuffix(".weight"), 0, 0)
    whole = kl_of_torch(load(llama_folder, IN_FLOAT32), load(other, IN_FLOAT32))
    assert row.kl_alone == pytest.approx(whole, rel=1e-6)


def test_a_model_has_no_differences_from_itself(fp8_dynamic_folder: Path) -> None:
    one = predictor(fp8_dynamic_folder)
    for other in (one, predictor(fp8_dynamic_folder), predictor(fp8_dynamic_folder, impl="reference")):
        result = attribute(one, other, WINDOWS, Tolerance(), SECONDS)
        assert (result.rows, result.of, result.suggestion) == ((), 0, None)


def test_the_same_weights_with_other_inputs_differ(fp8_dynamic_folder: Path) -> None:
    result = attribute(
        predictor(fp8_dynamic_folder, weight_only=True), predictor(fp8_dynamic_folder), WINDOWS, UNBOUNDED, SECONDS
    )
    assert result.of == 14
    assert all(row.extra_bytes == 0 and row.sqnr_db > 20 for row in result.rows)


@pytest.mark.parametrize("quantized_baseline", [False, True])
def test_a_run_without_quantized_inputs_is_measured_without_them(
    llama_folder: Path, tmp_path: Path, fp8_dynamic_folder: Path, quantized_baseline: bool
) -> None:
    other = changed(fp8_dynamic_folder, tmp_path / "other", "model.layers.1.mlp.down_proj.weight_scale")
    baseline = fp8_dynamic_folder if quantized_baseline else llama_folder
    candidate = predictor(other)
    candidate.weight_only = True
    expected = attribute(predictor(baseline), predictor(other, weight_only=True), WINDOWS, UNBOUNDED, SECONDS)
    result = attribute(predictor(baseline), candidate, WINDOWS, UNBOUNDED, SECONDS)
    assert result.rows == expected.rows
    assert result.of == 14
    assert result.rows != attributed(baseline, other).rows
    (row,) = (row for row in result.rows if row.module == "model.layers.1.mlp.down_proj")
    if quantized_baseline:
        alone = load(other, IN_FLOAT32)
        alone.get_submodule(row.module).activation = None
        assert row.kl_alone == pytest.approx(kl_of_torch(predictor(baseline).model, alone), rel=1e-6)


def test_damage_alone_and_without_equals_that_of_checkpoints_quantized_accordingly(
    llama_folder: Path, tmp_path: Path, mxfp4_folder: Path
) -> None:
    module = "model.layers.1.mlp.down_proj"
    quantize_checkpoint(llama_folder, tmp_path / "without", "mxfp4", QuantizeOptions(overrides=[f"{module}=bf16"]))
    quantize_checkpoint(
        llama_folder, tmp_path / "alone", "mxfp4", QuantizeOptions(overrides=[".=bf16", f"{module}=mxfp4"])
    )
    result = attributed(llama_folder, mxfp4_folder)
    row = next(row for row in result.rows if row.module == module)
    baseline, alone, without = (
        load(folder, IN_FLOAT32) for folder in (llama_folder, tmp_path / "alone", tmp_path / "without")
    )
    assert row.kl_alone == pytest.approx(kl_of_torch(baseline, alone), rel=1e-4)
    assert row.kl_without == pytest.approx(kl_of_torch(baseline, without), rel=1e-4)
    damages = [row.kl_alone for row in result.rows]
    assert damages == sorted(damages, reverse=True)


def test_sqnr_is_measured_at_the_output_on_the_inputs_of_the_baseline(llama_folder: Path, mxfp4_folder: Path) -> None:
    baseline, candidate = (load(folder, IN_FLOAT32) for folder in (llama_folder, mxfp4_folder))
    inputs: dict[str, torch.Tensor] = {}
    for name, module in baseline.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, args, __, name=name: inputs.__setitem__(name, args[0]))
    with torch.no_grad():
        baseline(WINDOWS)
    rows = attributed(llama_folder, mxfp4_folder).rows
    assert len(rows) == 14
    for row in rows:
        x = inputs[row.module].double()
        expected = x @ baseline.get_submodule(row.module).weight.double().T
        found = x @ candidate.get_submodule(row.module).quantized.dequantize().double().T
        noise = (found - expected).square().sum()
        assert row.sqnr_db == pytest.approx(float(10 * (expected.square().sum() / noise).log10()), abs=0.01)


def test_both_models_are_unchanged_afterwards(make_mixtral: MakeModel, tmp_path: Path) -> None:
    plain = make_mixtral(tmp_path / "plain")
    quantize_checkpoint(plain, tmp_path / "q", "mxfp4")
    models = [predictor(folder) for folder in (plain, tmp_path / "q")]
    before = [snapshot(model.model) for model in models]
    modules = [list(model.model.named_modules()) for model in models]
    attribute(models[0], models[1], WINDOWS, Tolerance(), SECONDS)
    assert [snapshot(model.model) for model in models] == before
    assert [list(model.model.named_modules()) for model in models] == modules


@pytest.mark.parametrize("passes", range(3, 40, 6))
def test_both_models_are_unchanged_after_an_interrupt(
    llama_folder: Path, mxfp4_folder: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    models = [predictor(folder) for folder in (llama_folder, mxfp4_folder)]
    before = [snapshot(model.model) for model in models]
    left = iter(range(passes))
    forward = nn.functional.silu

    def interrupted(x: torch.Tensor, **options: Any) -> torch.Tensor:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return forward(x, **options)

    monkeypatch.setattr(nn.functional, "silu", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attribute(models[0], models[1], WINDOWS, Tolerance(), SECONDS)
    assert [snapshot(model.model) for model in models] == before
    assert not any(module._forward_hooks for model in models for module in model.model.modules())


def test_without_time_every_module_still_has_its_sqnr(llama_folder: Path, mxfp4_folder: Path) -> None:
    result = attributed(llama_folder, mxfp4_folder, seconds=0)
    ratios = [row.sqnr_db for row in result.rows]
    assert (result.measured, result.of, len(ratios), result.suggestion) == (0, 14, 14, None)
    assert all(row.kl_alone is None and row.kl_without is None for row in result.rows)
    assert ratios == sorted(ratios)
    assert 10 < ratios[0] < ratios[-1] < 40


def test_progress_ends_at_the_whole_time_budget(llama_folder: Path, mxfp4_folder: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    attribute(
        predictor(llama_folder),
        predictor(mxfp4_folder),
        WINDOWS,
        Tolerance(),
        SECONDS,
        lambda done, total, what: calls.append((done, total, what)),
    )
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert {total for _, total, _ in calls} == {60_000}
    assert calls[-1][0] == 60_000


def test_one_module_of_each_role_is_exchanged_first(llama_folder: Path, mxfp4_folder: Path) -> None:
    calls: list[str] = []
    models = [predictor(folder) for folder in (llama_folder, mxfp4_folder)]
    attribute(models[0], models[1], WINDOWS, UNBOUNDED, SECONDS, lambda _, __, what: calls.append(what))
    exchanged = [what.removesuffix(" alone") for what in calls if what.endswith(" alone")]
    assert len(set(exchanged)) == 14
    assert len({module.rpartition(".")[2] for module in exchanged[:7]}) == 7


@pytest.mark.parametrize(("model_type", "block"), [("mixtral", "block_sparse_moe"), ("qwen3_moe", "mlp")])
def test_each_projection_of_a_layers_experts_is_one_module(
    make_model: Callable[..., Path], tmp_path: Path, model_type: str, block: str
) -> None:
    plain = make_model(tmp_path / "plain", model_type)
    quantize_checkpoint(plain, tmp_path / "q", "fp8")
    rows = {row.module: row for row in attributed(plain, tmp_path / "q").rows}
    experts = {f"model.layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("gate_up_proj", "down_proj")}
    attention = {f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"}
    assert rows.keys() == experts | attention
    assert all(row.kl_alone and row.kl_without for row in rows.values())
    assert all(20 < row.sqnr_db < 40 for row in rows.values())
    stored = [sum(t.nbytes for t in load_file(f / "model.safetensors").values()) for f in (plain, tmp_path / "q")]
    assert sum(row.extra_bytes for row in rows.values()) == stored[0] - stored[1]

    names = [n for n in load_file(tmp_path / "q" / "model.safetensors") if n.endswith("weight_scale") and ".1." in n]
    name = next(name for name in names if f"layers.1.{block}.experts" in name or "layers.1.mlp.experts" in name)
    other = changed(tmp_path / "q", tmp_path / "other", name, 1.3)
    (row,) = attributed(tmp_path / "q", other).rows
    whole = kl_of_torch(*(load(folder, IN_FLOAT32) for folder in (tmp_path / "q", other)))
    assert row.module.startswith("model.layers.1.mlp.experts.")
    assert row.kl_alone == pytest.approx(whole, rel=1e-6)
    assert row.kl_without == 0


def test_the_sqnr_of_experts_is_that_of_all_experts_of_a_layer_together(
    make_mixtral: MakeModel, tmp_path: Path
) -> None:
    plain = make_mixtral(tmp_path / "plain")
    other = changed(plain, tmp_path / "other", "model.layers.1.block_sparse_moe.experts.2.w1.weight")
    (row,) = attributed(plain, other).rows
    assert row.module == "model.layers.1.mlp.experts.gate_up_proj"
    outputs = []
    for model in (load(folder, IN_FLOAT32) for folder in (plain, other)):  # the same before the layer
        model.model.layers[1].mlp.experts.register_forward_hook(lambda _, __, output: outputs.append(output.double()))
        with torch.no_grad():
            model(WINDOWS)
    noise = (outputs[1] - outputs[0]).square().sum()
    assert row.sqnr_db == pytest.approx(float(10 * (outputs[0].square().sum() / noise).log10()), abs=0.01)


def test_tied_embeddings_are_one_difference(make_llama: MakeModel, tmp_path: Path) -> None:
    plain = make_llama(tmp_path / "plain", tie_word_embeddings=True)
    other = changed(plain, tmp_path / "other", "model.embed_tokens.weight")
    models = [predictor(folder) for folder in (plain, other)]
    (row,) = attribute(models[0], models[1], WINDOWS, UNBOUNDED, SECONDS).rows
    assert (row.module, row.kl_without) == ("model.embed_tokens", 0)
    assert row.kl_alone == pytest.approx(kl_of_torch(*(model.model for model in models)), rel=1e-6)
    for model in models:
        assert model.model.lm_head.weight is model.model.model.embed_tokens.weight


def test_the_error_of_a_quantized_kv_cache_is_not_part_of_a_modules_damage(llama_folder: Path, tmp_path: Path) -> None:
    class Coarse(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().update(keys.to(torch.bfloat16).float() * 1.1, values, *args, **kwargs)

    other = changed(llama_folder, tmp_path / "other", "model.layers.1.mlp.up_proj.weight")
    plain, candidate = predictor(llama_folder), predictor(other)
    whole = kl_of_torch(plain.model, candidate.model)
    candidate.new_cache = Coarse
    (row,) = attribute(plain, candidate, WINDOWS, UNBOUNDED, SECONDS).rows
    assert row.kl_alone == pytest.approx(whole, rel=1e-4)
    assert row.kl_without is not None
    assert row.kl_without > 1e-6


@pytest.mark.parametrize("config", [{"hidden_size": 32}, {"num_hidden_layers": 1}, {"intermediate_size": 64}])
def test_models_of_different_sizes_are_refused(
    llama_folder: Path, make_llama: MakeModel, tmp_path: Path, config: dict[str, int]
) -> None:
    other = make_llama(tmp_path / "other", **config)
    with pytest.raises(UsageError, match="two models of one architecture"):
        attributed(llama_folder, other)


def test_another_architecture_is_refused(llama_folder: Path, make_qwen3: MakeModel, tmp_path: Path) -> None:
    other = make_qwen3(tmp_path / "other")
    with pytest.raises(UsageError, match="LlamaForCausalLM in the baseline and Qwen3ForCausalLM in the candidate"):
        attributed(llama_folder, other)
