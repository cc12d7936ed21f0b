"""The stages of a layer, and the residual streams they add to, are those of the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rounding_cases import make_text, open_layer, write_model

QKV = "q_proj k_proj v_proj"
NORM = "post_attention_layernorm"

#: Model type -> config beyond the common sizes, and for each stage: its linears, the input of which module is the
#: residual stream before it ("-": the stage adds to none; "": the layer's own input), and the factor of its output.
Expected = list[tuple[str, str, float]]
LLAMA: Expected = [(QKV, "-", 0), ("o_proj", "", 1), ("gate_proj up_proj", "-", 0), ("down_proj", NORM, 1)]
EXPERTS: Expected = [(QKV, "-", 0), ("o_proj", "", 1), ("gate_proj up_proj", "-", 0), ("down_proj", "-", 0)]
PARALLEL: Expected = [("query_key_value", "-", 0), ("dense", "-", 0), ("dense_h_to_4h", "-", 0)]
PARALLEL += [("dense_4h_to_h", "-", 0)]
SERIAL: Expected = [("query_key_value", "-", 0), ("dense", "", 1), ("dense_h_to_4h", "-", 0)]
SERIAL += [("dense_4h_to_h", NORM, 1)]
NO_HEADS = {"num_key_value_heads": None, "head_dim": None}
CASES: dict[str, tuple[str, dict[str, Any], Expected]] = {
    "llama": ("llama", {}, LLAMA),
    "biases": ("qwen2", {}, LLAMA),
    "fused projections": (
        "phi3",
        {},
        [("qkv_proj", "-", 0), ("o_proj", "", 1), ("gate_up_proj", "-", 0), ("down_proj", NORM, 1)],
    ),
    "experts": ("qwen3_moe", {}, EXPERTS),
    "experts under other names": ("mixtral", {}, [*EXPERTS[:2], ("w1 w3", "-", 0), ("w2", "-", 0)]),
    "experts fused on disk": ("gpt_oss", {}, EXPERTS),
    "a shared expert": ("qwen2_moe", {}, [*EXPERTS, ("gate_proj up_proj", "-", 0), ("down_proj", "-", 0)]),
    "parallel blocks": ("gpt_neox", NO_HEADS, PARALLEL),
    "the same blocks one after the other": ("gpt_neox", {"use_parallel_residual": False, **NO_HEADS}, SERIAL),
    "parallel blocks behind one norm": (
        "cohere",
        {},
        [(f"{QKV} gate_proj up_proj", "-", 0), ("o_proj", "-", 0), ("down_proj", "-", 0)],
    ),
    "norms behind the blocks": ("gemma2", {"sliding_window": 16}, [(names, "-", 0) for names, _, _ in LLAMA]),
    "a factor of the residual": (
        "granite",
        {"residual_multiplier": 0.22},
        [(names, norm, factor * 0.22) for names, norm, factor in LLAMA],
    ),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("model_type", "config", "expected"), CASES.values(), ids=CASES)
def test_stages_are_found_in_the_order_of_execution_with_the_streams_they_add_to(
    tmp_path: Path, model_type: str, config: dict[str, Any], expected: Expected, index: int
) -> None:
    folder = write_model(tmp_path / "model", model_type, **config)
    with open_layer(folder, tmp_path / "arguments", make_text(1), index) as opened:
        stages, prefix = opened.stages, f"{opened.stack.path}.{index}"
        sites = opened.stack.sites_of(index)
    found = [stage.name.replace(",", "") for stage in stages]
    assert sorted(found) == sorted(names for names, _, _ in expected)
    if model_type != "qwen2_moe":  # whose shared expert runs before the others
        assert found == [names for names, _, _ in expected]
    of_stage = {(stage.name.replace(",", ""), stage.width): stage for stage in stages}
    for names, norm, factor in expected:
        stage = next(each for (name, _), each in of_stage.items() if name == names)
        if norm == "-":
            assert stage.residual is None, names
            continue
        assert stage.residual is not None, names
        assert stage.residual.path == (f"{prefix}.{norm}" if norm else ""), names
        assert stage.residual.factor == pytest.approx(factor, rel=2e-3), names
    observed = {name for site in sites.linears for name in site.names}
    observed |= {name for site in sites.experts for expert in (*site.inner, *site.outer) for name in expert}
    assert sorted(name for stage in stages for expert in stage.experts for name in expert) == sorted(observed)


def test_the_experts_of_a_layer_are_the_slots_of_two_stages(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen2_moe")
    with open_layer(folder, tmp_path / "arguments", make_text(1)) as opened:
        shared_inner, shared_outer, inner, outer = opened.stages[2:]
    assert (shared_inner.outer, shared_outer.outer, inner.outer, outer.outer) == (None, None, False, True)
    assert (shared_inner.width, shared_outer.width, inner.width, outer.width) == (64, 48, 64, 32)
    mlp = "model.layers.0.mlp"
    assert inner.path == outer.path == f"{mlp}.experts"
    assert inner.experts == tuple(
        (f"{mlp}.experts.{expert}.gate_proj", f"{mlp}.experts.{expert}.up_proj") for expert in range(4)
    )
    assert outer.experts == tuple((f"{mlp}.experts.{expert}.down_proj",) for expert in range(4))
