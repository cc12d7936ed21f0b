"""Layers of multi-token prediction are kept, and a plan that leaves most linear weights alone is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.errors import UnsupportedTensorError, UsageError
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import is_mtp
from minifloat.model.layouts import get_writer
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.quantization import UNKNOWN_EXPERTS, make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan, QuantizedShare, require_share
from minifloat.numerics.scheme import get_scheme
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

Make = Callable[..., Path]
_DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}


def zeros(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {name.replace("__", "."): np.ones(shape, np.float32) for name, shape in shapes.items()}


DRAFTED = zeros(
    model__layers__0__mlp__down_proj__weight=(64, 64),
    model__layers__1__mlp__down_proj__weight=(64, 64),
    model__layers__1__eh_proj__weight=(64, 128),
    model__layers__1__enorm__weight=(64,),
)
HIDDEN = zeros(
    model__embed_tokens__weight=(256, 64),
    model__layers__0__mlp__down_proj__weight=(64, 64),
    model__layers__0__moe__secret_experts=(4, 64, 64),
)


def plan_of(path: Path, *overrides: str, **options: Any) -> QuantizationPlan:
    with Checkpoint.open(path) as checkpoint:
        parsed = [Override.parse(text) for text in overrides]
        return make_plan(checkpoint, get_scheme("fp8"), get_writer("compressed-tensors"), parsed, **options)


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("model.layers.60.mlp.down_proj.weight", False),
        ("model.layers.61.self_attn.q_a_proj.weight", True),
        ("model.language_model.layers.61.eh_proj.weight", True),
        ("mtp.layers.0.self_attn.q_proj.weight", True),
        ("mtp.fc.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("model.vision_tower.encoder.layers.70.mlp.fc1.weight", False),
        ("lm_head.weight", False),
    ],
)
def test_layers_after_the_last_and_named_ones_are_of_multi_token_prediction(name: str, drafts: bool) -> None:
    assert is_mtp(name, {"num_hidden_layers": 61}) is drafts
    assert is_mtp(name, {"text_config": {"num_hidden_layers": 61}}) is drafts


def test_multi_token_prediction_is_kept_unless_asked_for(make_checkpoint: Make) -> None:
    path = make_checkpoint(tensors=DRAFTED, config=_DEEPSEEK)
    plan = plan_of(path)
    assert list(plan.modules) == ["model.layers.0.mlp.down_proj"]
    assert {"model.layers.1.mlp.down_proj", "model.layers.1.eh_proj"} <= set(plan.kept)
    asked = plan_of(path, mtp=True)
    assert list(asked.modules) == ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert "model.layers.1.eh_proj" in asked.kept  # servers build it unquantized
    assert len(plan_of(path, "layers.1.mlp=fp8").modules) == 2


def test_the_share_counts_parameters_by_reason_without_embeddings(make_checkpoint: Make) -> None:
    share = QuantizedShare.of(plan_of(make_checkpoint(tensors=HIDDEN)))
    assert (share.quantized, share.total, share.fraction) == (64 * 64, 5 * 64 * 64, 0.2)
    (left,) = share.kept
    assert (left.reason, left.count, left.elements, left.nbytes) == (UNKNOWN_EXPERTS, 1, 4 * 64 * 64, 4 * 64 * 64 * 2)


def test_a_mostly_unknown_model_is_refused_with_names_reasons_and_bytes(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tensors=HIDDEN)
    message = (
        r"only 20\.0% .* \(fused experts of unknown shape: 1 tensor of 32\.0 KiB, as .*\.secret_experts\).*-partial"
    )
    with pytest.raises(UsageError, match=message):
        quantize_checkpoint(source, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()
    report = quantize_checkpoint(source, tmp_path / "out", "fp8", QuantizeOptions(allow_partial=True))
    assert report.to_dict()["share"]["quantized"] == 64 * 64
    assert str(report.share) == "20.0% of the linear weights are quantized"


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.0.mlp.input_linear.weight", (4, 64, 64)), ("model.layers.0.ffn.experts.mlp.w1", (256, 64))],
    ids=["JetMoE", "DBRX"],
)
def test_experts_that_no_family_describes_are_named_as_such(
    name: str, shape: tuple[int, ...], make_checkpoint: Make, tmp_path: Path
) -> None:
    tensors = zeros(**{"model.layers.0.mlp.down_proj.weight": (64, 64), name: shape})
    source = make_checkpoint(tensors=tensors, config={"num_local_experts": 4})
    message = r"fused experts of unknown shape: .*need a description of their family .*--allow-partial accepts"
    with pytest.raises(UsageError, match=message):
        quantize_checkpoint(source, tmp_path / "out", "fp8")
    with pytest.raises(UnsupportedTensorError, match="no family describes fused experts"):
        quantize_checkpoint(
            source, tmp_path / "out", "fp8", QuantizeOptions(overrides=[f"{name.removesuffix('.weight')}=fp8"])
        )


def test_biases_of_experts_are_no_experts_of_unknown_shape(make_checkpoint: Make) -> None:
    biases = {"model.layers.0.mlp.experts.gate_up_proj_bias": (4, 64)}
    tensors = zeros(**{"model.layers.0.mlp.down_proj.weight": (64, 64), **biases})
    (kept,) = QuantizedShare.of(plan_of(make_checkpoint(tensors=tensors))).kept
    assert kept.reason == Role.OTHER.value


def test_weights_that_an_override_keeps_do_not_refuse_a_plan(make_checkpoint: Make) -> None:
    tensors = zeros(
        model__layers__0__mlp__down_proj__weight=(64, 64), model__layers__1__mlp__down_proj__weight=(64, 640)
    )
    plan = plan_of(make_checkpoint(tensors=tensors), r"layers\.1\.=bf16")
    require_share(plan)
    assert QuantizedShare.of(plan).fraction == pytest.approx(1 / 11)


def test_the_report_says_that_multi_token_prediction_is_kept(make_checkpoint: Make, tmp_path: Path) -> None:
    source = make_checkpoint(tensors=DRAFTED, config=_DEEPSEEK)
    kept = quantize_checkpoint(source, tmp_path / "kept", "fp8", QuantizeOptions(allow_partial=True))
    assert any("--mtp quantizes them" in note for note in kept.notes)
    asked = quantize_checkpoint(source, tmp_path / "asked", "fp8", QuantizeOptions(mtp=True))
    assert not any("--mtp" in note for note in asked.notes)
    assert " --mtp" in asked.provenance["command"]
