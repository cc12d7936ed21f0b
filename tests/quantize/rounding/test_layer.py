"""`LayerRounding` takes the better codes on held-out text; the statistics of experts with few tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rounding_cases import correlated_inputs, hessian_of
from torch import Tensor

from minifloat.calibration.layerwise.storage import TensorFile
from minifloat.model.layouts import get_writer
from minifloat.model.plan.tensor_plan import Part
from minifloat.numerics.scheme import get_scheme
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.rounding.layer import LayerRounding, output_errors
from minifloat.quantize.rounding.methods import get_method
from minifloat.quantize.rounding.statistics import ExpertRows, Rows, Statistics, filled_statistics

WIDTH = 64


def make_weight(rows: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def layer_of(weights: dict[str, Tensor], scheme: str = "mxfp4", group: str | None = None) -> LayerRounding:
    """A layer under GPTQ; with `group` its weights share a scale per tensor."""
    chosen, layout = get_scheme(scheme), get_writer("compressed-tensors")
    parts = {}
    for name, weight in weights.items():
        shape = (weight.shape[0], weight.shape[1])
        parts[name] = Part(name, chosen, shape, layout.weight_tensors(name, chosen.weight, shape), group or name)
    layer = LayerRounding(get_method("gptq"), parts, weights)
    layer.measure()
    return layer


def same(inputs: Tensor) -> Rows:
    return Rows(inputs, inputs)


def test_codes_that_lower_the_error_on_held_out_text_are_taken() -> None:
    weight = make_weight()
    layer, inputs = layer_of({"q_proj": weight.clone()}), correlated_inputs(500, WIDTH)
    layer.round_group(["q_proj"], Statistics(hessian_of(inputs), tokens=500), same(correlated_inputs(99, WIDTH, 2)), {})
    [row] = layer.rows
    nearest = quantize_tensor(weight, get_scheme("mxfp4").weight)
    assert row["method"] == "gptq"
    assert row["method_error"] < 0.5 * row["nearest_error"]
    assert layer.tensors["q_proj.weight_packed"].tobytes() != nearest.codes.numpy().tobytes()
    assert layer.tensors["q_proj.weight_scale"].tobytes() == nearest.scale.numpy().tobytes()
    assert not torch.equal(layer.weights["q_proj"], nearest.dequantize(torch.bfloat16))


def test_a_weight_that_would_lose_on_held_out_text_keeps_rounding_to_nearest_and_says_so() -> None:
    weight = make_weight()
    few = torch.randn(300, 4) @ torch.randn(4, WIDTH)  # four directions; the held-out text has all
    layer = layer_of({"q_proj": weight.clone()})
    held_out = same(torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1)))
    layer.round_group(["q_proj"], Statistics(hessian_of(few), tokens=300), held_out, {"tokens": 300})
    [row] = layer.rows
    nearest = quantize_tensor(weight, get_scheme("mxfp4").weight)
    assert row["module"] == "q_proj"
    assert row["method"] == "nearest"
    assert row["method_error"] > row["nearest_error"]
    assert row["tokens"] == 300
    assert layer.tensors["q_proj.weight_packed"].tobytes() == nearest.codes.numpy().tobytes()
    assert torch.equal(layer.weights["q_proj"], nearest.dequantize(torch.bfloat16))


def test_too_few_held_out_rows_judge_nothing() -> None:
    few = torch.randn(300, 4) @ torch.randn(4, WIDTH)
    for held_out in (None, same(torch.randn(15, WIDTH))):
        layer = layer_of({"q_proj": make_weight()})
        layer.round_group(["q_proj"], Statistics(hessian_of(few), tokens=300), held_out, {})
        assert layer.rows[0]["method"] == "gptq"
        assert "method_error" not in layer.rows[0]


def test_weights_of_one_group_share_the_scale_of_the_largest() -> None:
    weights = {"q_proj": make_weight(), "k_proj": (8 * make_weight(16, 1).float()).to(torch.bfloat16)}
    layer = layer_of(weights, "nvfp4", "qkv")
    layer.round_group(["q_proj", "k_proj"], Statistics(torch.eye(WIDTH)), None, {})
    shared = layer.tensors["q_proj.weight_global_scale"].tobytes()
    assert layer.tensors["k_proj.weight_global_scale"].tobytes() == shared
    alone = layer_of({"q_proj": make_weight()}, "nvfp4")
    alone.round_group(["q_proj"], Statistics(torch.eye(WIDTH)), None, {})
    assert alone.tensors["q_proj.weight_global_scale"].tobytes() != shared


def test_the_report_names_columns_without_input_and_a_larger_damping() -> None:
    layer = layer_of({"q_proj": make_weight(), "o_proj": make_weight(), "v_proj": make_weight()})
    hessian = torch.eye(WIDTH)
    layer.round_group(["q_proj"], Statistics(hessian), None, {})
    hessian[5, 5] = 0.0
    layer.round_group(["o_proj"], Statistics(hessian), None, {})
    hessian[:2, :2] = torch.tensor([[1.0, 1.05], [1.05, 1.0]])
    layer.round_group(["v_proj"], Statistics(hessian), None, {})
    usual, dead, damped = layer.rows
    assert usual.keys().isdisjoint({"damping", "dead_columns"})
    assert dead["dead_columns"] == damped["dead_columns"] == 1
    assert "damping" not in dead
    assert damped["damping"] == pytest.approx(0.1)


def test_weights_that_are_not_quantized_are_left_as_they_are() -> None:
    layer = layer_of({"q_proj": make_weight()})
    layer.round_group(["gate"], Statistics(torch.eye(WIDTH)), None, {})
    assert not layer.rows
    assert not layer.tensors


def test_errors_are_relative_to_the_original_outputs_and_count_the_residual_stream() -> None:
    weight = make_weight().float()
    quantized = quantize_tensor(weight, get_scheme("fp8").weight)
    inputs, reference = correlated_inputs(50, WIDTH), correlated_inputs(50, WIDTH, 2)
    stream = torch.randn(50, 32)
    for residual in (None, stream):
        target = reference.double() @ weight.double().T
        energy = target.square().sum()
        target = target if residual is None else target + residual
        expected = (target - inputs.double() @ quantized.dequantize().double().T).square().sum() / energy
        [found] = output_errors(weight, [quantized], Rows(inputs, reference, residual))
        assert found == pytest.approx(float(expected), rel=1e-5)


# ------------------------------------------------------------------------------------------------- experts


def test_an_expert_with_few_tokens_mixes_its_hessian_with_that_of_all_experts(tmp_path: Path) -> None:
    width, counts = 16, [40, 4, 0]
    inputs = [correlated_inputs(count, width, seed).to(torch.bfloat16) for seed, count in enumerate(counts)]
    references = [each + 1 for each in inputs]
    with TensorFile(tmp_path / "rows") as file:
        routed = ExpertRows(file, len(counts))
        for part in (slice(0, 3), slice(3, None)):  # two sequences
            experts = torch.cat([torch.full((len(each[part]),), expert) for expert, each in enumerate(inputs)])
            routed.add(
                Rows(torch.cat([each[part] for each in inputs]), torch.cat([each[part] for each in references])),
                experts,
            )
        assert routed.tokens == counts
        for expert, (each, reference) in enumerate(zip(inputs[:2], references, strict=False)):
            [kept] = routed.read(expert)
            assert torch.equal(kept.inputs, each)
            assert torch.equal(kept.reference, reference)
        found = list(filled_statistics(routed, width, drift=True))
    together = hessian_of(torch.cat(inputs))
    expected = [hessian_of(inputs[0]), 0.25 * hessian_of(inputs[1]) + 0.75 * together, together]
    for (expert, statistics, facts), hessian, count in zip(found, expected, counts, strict=True):
        torch.testing.assert_close(statistics.hessian, hessian, rtol=1e-5, atol=1e-6)
        assert statistics.tokens == facts["tokens"] == count
        assert (statistics.drift is None) == (expert > 0)
        assert facts.get("hessian_share") == (None if expert == 0 else count / width)


def test_experts_that_saw_no_token_at_all_get_the_hessian_of_uncorrelated_inputs(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "rows") as file:
        for _, statistics, _ in filled_statistics(ExpertRows(file, 2), 8, drift=False):
            assert torch.equal(statistics.hessian, torch.eye(8))
