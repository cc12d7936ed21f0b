"""`make_plan` decides from headers what becomes of every tensor, and refuses what cannot be quantized."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.errors import (
    AlreadyQuantizedError,
    PatternError,
    ShapeError,
    UnknownNameError,
    UnsupportedTensorError,
    UsageError,
)
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import role_of
from minifloat.model.layouts import get_writer
from minifloat.model.plan.overrides import Override
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.tensor_plan import QuantizationPlan
from minifloat.numerics.scheme import SCHEMES, get_scheme

Make = Callable[..., Path]


def plan_of(path: Path, scheme: str = "fp8", *overrides: str, layout: str = "compressed-tensors") -> QuantizationPlan:
    with Checkpoint.open(path) as checkpoint:
        return make_plan(
            checkpoint, get_scheme(scheme), get_writer(layout), [Override.parse(text) for text in overrides]
        )


def moe_tensors(experts: int = 2, hidden: int = 64, inner: int = 32, transposed: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    axes = (0, 2, 1) if transposed else (0, 1, 2)
    return {
        "model.layers.0.mlp.gate.weight": rng.standard_normal((experts, hidden), np.float32),
        "model.layers.0.mlp.experts.gate_up_proj": rng.standard_normal((experts, 2 * inner, hidden), np.float32)
        .transpose(axes)
        .copy(),
        "model.layers.0.mlp.experts.down_proj": rng.standard_normal((experts, hidden, inner), np.float32)
        .transpose(axes)
        .copy(),
    }


MOE_CONFIG = {"model_type": "qwen3_5_moe", "hidden_size": 64, "moe_intermediate_size": 32}


def test_every_source_tensor_is_quantized_or_copied_exactly_once(make_checkpoint: Make) -> None:
    path = make_checkpoint(shards=3)
    plan = plan_of(path)
    with Checkpoint.open(path) as checkpoint:
        assert [tensor.source.name for tensor in plan.tensors] == list(checkpoint.tensors)
    for tensor in plan.tensors:
        assert bool(tensor.parts) != bool(tensor.reason)


def test_linears_are_quantized_and_the_rest_is_kept(make_checkpoint: Make) -> None:
    plan = plan_of(make_checkpoint())
    quantized = {tensor.source.name for tensor in plan.tensors if tensor.parts}
    assert len(quantized) == 14
    assert all(re.search(r"layers\.\d\.(self_attn|mlp)\.\w+_proj\.weight$", name) for name in quantized)
    assert plan.kept == ("lm_head",)


def test_a_tied_lm_head_is_still_listed_as_kept(make_checkpoint: Make) -> None:
    tensors = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 64), np.float32)}
    assert plan_of(make_checkpoint(tensors=tensors)).kept == ("lm_head",)


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), Role.LINEAR),
        ("transformer.h.3.mlp.dense_h_to_4h.weight", (8, 8), Role.LINEAR),
        ("model.layers.0.mlp.experts.7.w1.weight", (8, 8), Role.LINEAR),
        ("model.layers.0.mlp.experts.gate_up_proj", (2, 8, 8), Role.EXPERTS),
        ("model.layers.0.mlp.gate.weight", (2, 8), Role.ROUTER),
        ("model.layers.0.block_sparse_moe.gate.weight", (2, 8), Role.ROUTER),
        ("model.layers.0.mlp.router.weight", (2, 8), Role.ROUTER),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 8), Role.ROUTER),
        ("model.layers.0.mlp.gate_proj.weight", (8, 8), Role.LINEAR),
        ("model.embed_tokens.weight", (8, 8), Role.EMBEDDING),
        ("transformer.wte.weight", (8, 8), Role.EMBEDDING),
        ("model.layers.61.embed_tokens.weight", (8, 8), Role.EMBEDDING),
        ("lm_head.weight", (8, 8), Role.LM_HEAD),
        ("model.layers.61.shared_head.head.weight", (8, 8), Role.LM_HEAD),
        ("model.visual.blocks.0.attn.qkv.weight", (8, 8), Role.TOWER),
        ("vision_tower.encoder.layers.0.self_attn.q_proj.weight", (8, 8), Role.TOWER),
        ("model.norm.weight", (8,), Role.VECTOR),
        ("model.layers.0.mamba.conv1d.weight", (8, 1, 4), Role.OTHER),
        ("model.layers.0.mamba.A_log", (8, 4), Role.OTHER),
        ("model.projector.weight", (8, 8), Role.OTHER),
    ],
)
def test_the_role_of_a_tensor_follows_from_its_name_and_shape(
    make_checkpoint: Make, name: str, shape: tuple[int, ...], role: Role
) -> None:
    with Checkpoint.open(make_checkpoint(tensors={name: np.ones(shape, np.float32)})) as checkpoint:
        assert role_of(checkpoint.tensors[name]) is role


def test_the_last_matching_override_decides(make_checkpoint: Make) -> None:
    plan = plan_of(make_checkpoint(), "fp8", r"mlp=mxfp8", r"layers\.1\.mlp=bf16")
    assert plan.modules["model.layers.0.mlp.down_proj"] == SCHEMES["mxfp8"]
    assert plan.modules["model.layers.0.self_attn.o_proj"] == SCHEMES["fp8"]
    assert {name for name in plan.kept if "mlp" in name} == {
        f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")
    }


def test_lm_head_is_quantized_when_asked(make_checkpoint: Make) -> None:
    plan = plan_of(make_checkpoint(), "fp8", "^lm_head$=fp8")
    assert plan.modules["lm_head"] == SCHEMES["fp8"]
    assert plan.kept == ()


@pytest.mark.parametrize("text", ["no-equals-sign", "=fp8", "(unclosed=fp8"])
def test_an_override_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Override.parse(text)


def test_an_override_with_an_unknown_scheme_lists_the_schemes() -> None:
    with pytest.raises(UnknownNameError, match=r"fp9.*valid: bf16, fp8-block.*nvfp4"):
        Override.parse("mlp=fp9")


def test_a_pattern_that_matches_nothing_is_refused_with_examples_of_names(make_checkpoint: Make) -> None:
    with pytest.raises(PatternError, match=r"'mpl' matches no weight.*weights are named like model\."):
        plan_of(make_checkpoint(), "fp8", "mpl=bf16")


def test_a_pattern_for_a_tied_lm_head_says_that_it_is_tied(make_checkpoint: Make) -> None:
    tensors = {"model.layers.0.mlp.down_proj.weight": np.ones((64, 64), np.float32)}
    with pytest.raises(PatternError, match="lm_head is tied"):
        plan_of(make_checkpoint(tensors=tensors), "fp8", "lm_head=fp8")


def test_embeddings_are_refused_by_name(make_checkpoint: Make) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"model\.embed_tokens\.weight"):
        plan_of(make_checkpoint(), "fp8", "embed_tokens=mxfp4")


@pytest.mark.parametrize("override", ["q_proj=mxfp8", "up_proj=bf16"])
def test_layers_that_servers_fuse_must_share_a_scheme(make_checkpoint: Make, override: str) -> None:
    with pytest.raises(UsageError, match="run as one layer in servers"):
        plan_of(make_checkpoint(), "fp8", override)


def test_experts_of_a_layer_must_share_a_scheme(make_checkpoint: Make) -> None:
    names = [f"model.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(2) for p in ("gate", "up", "down")]
    path = make_checkpoint(tensors={name: np.ones((64, 64), np.float32) for name in names})
    with pytest.raises(UsageError, match="run as one layer in servers"):
        plan_of(path, "fp8", r"experts\.1=mxfp8")


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8", "nvfp4"])
def test_columns_that_groups_do_not_divide_are_refused_with_the_cure(make_checkpoint: Make, scheme: str) -> None:
    path = make_checkpoint(tensors={"model.layers.0.mlp.down_proj.weight": np.ones((64, 172), np.float32)})
    with pytest.raises(
        ShapeError, match=r"down_proj\.weight: .* multiple of \d+ columns, found 172.*--exclude"
    ) as caught:
        plan_of(path, scheme)
    cure = re.search(r"--override '(.*?)'", str(caught.value))
    assert cure is not None
    assert plan_of(path, scheme, cure[1]).modules == {"model.layers.0.mlp.down_proj": SCHEMES["fp8"]}


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8", "fp8-static", "fp8-dynamic"])
def test_schemes_without_groups_accept_partial_blocks(make_checkpoint: Make, scheme: str) -> None:
    path = make_checkpoint(tensors={"model.layers.0.mlp.down_proj.weight": np.ones((130, 172), np.float32)})
    assert len(plan_of(path, scheme).modules) == 1


def test_a_quantized_source_is_refused(make_checkpoint: Make) -> None:
    path = make_checkpoint(config={"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(AlreadyQuantizedError, match="original checkpoint"):
        plan_of(path)


def test_a_source_with_nothing_to_quantize_is_refused(make_checkpoint: Make) -> None:
    with pytest.raises(UsageError, match="nothing to quantize"):
        plan_of(make_checkpoint(tensors={"lm_head.weight": np.ones((8, 8), np.float32)}))


def test_conv1d_architectures_are_refused(make_checkpoint: Make) -> None:
    with pytest.raises(
        UnsupportedTensorError, match=r"^model\.layers\S+\.weight: GPT-2 stores .* Keep this model in 16"
    ):
        plan_of(make_checkpoint(config={"model_type": "gpt2"}))


def test_the_fp8_layout_refuses_partial_blocks_that_transformers_would_misread(make_checkpoint: Make) -> None:
    path = make_checkpoint(tensors={"model.layers.0.mlp.down_proj.weight": np.ones((128, 160), np.float32)})
    with pytest.raises(ShapeError, match=r"down_proj.*128x160.*--layout compressed-tensors"):
        plan_of(path, "fp8-block", layout="fp8")


def test_the_fp8_layout_holds_only_blocks(make_checkpoint: Make) -> None:
    path = make_checkpoint(tensors={"model.layers.0.mlp.down_proj.weight": np.ones((128, 256), np.float32)})
    assert plan_of(path, "fp8-block", layout="fp8").modules
    with pytest.raises(UsageError, match="holds fp8-block only"):
        plan_of(path, "mxfp4", layout="fp8")


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_experts_are_split_into_linears(make_checkpoint: Make, transposed: bool) -> None:
    path = make_checkpoint(tensors=moe_tensors(transposed=transposed), config=MOE_CONFIG)
    plan = plan_of(path)
    base = "model.layers.0.mlp.experts"
    assert set(plan.modules) == {f"{base}.{e}.{p}_proj" for e in range(2) for p in ("gate", "up", "down")}
    shapes = {part.module: part.shape for tensor in plan.tensors for part in tensor.parts}
    assert shapes[f"{base}.1.up_proj"] == (32, 64)
    assert shapes[f"{base}.0.down_proj"] == (64, 32)
    assert "model.layers.0.mlp.gate" in plan.kept


def test_fused_experts_are_quantized_all_or_none(make_checkpoint: Make) -> None:
    path = make_checkpoint(tensors=moe_tensors(), config=MOE_CONFIG)
    with pytest.raises(UsageError, match=r"experts.*run as one layer in servers"):
        plan_of(path, "fp8", r"experts\.down_proj=bf16")


def test_fused_experts_whose_orientation_is_unclear_are_refused(make_checkpoint: Make) -> None:
    path = make_checkpoint(
        tensors=moe_tensors(hidden=64, inner=32), config={"model_type": "x", "intermediate_size": None}
    )
    with pytest.raises(UnsupportedTensorError, match=r"experts\.gate_up_proj.*do not\s+tell rows from columns"):
        plan_of(path)
    wrong = make_checkpoint("wrong", moe_tensors(), config=MOE_CONFIG | {"moe_intermediate_size": 48})
    with pytest.raises(UnsupportedTensorError, match=r"moe_intermediate_size 48 of the config do not fit"):
        plan_of(wrong)


def test_interleaved_experts_of_gpt_oss_are_refused(make_checkpoint: Make) -> None:
    path = make_checkpoint(tensors=moe_tensors(), config=MOE_CONFIG | {"model_type": "gpt_oss"})
    with pytest.raises(UnsupportedTensorError, match="gpt-oss"):
        plan_of(path)
    mixed = moe_tensors() | {"model.layers.0.mlp.up_proj.weight": np.ones((64, 64), np.float32)}
    with_linear = make_checkpoint("mixed", mixed, config=MOE_CONFIG | {"model_type": "gpt_oss"})
    assert list(plan_of(with_linear, "fp8", "experts=bf16").modules) == ["model.layers.0.mlp.up_proj"]


def test_an_empty_weight_is_refused(make_checkpoint: Make) -> None:
    with pytest.raises(ShapeError, match="empty"):
        plan_of(make_checkpoint(tensors={"model.layers.0.mlp.up_proj.weight": np.ones((0, 8), np.float32)}))
