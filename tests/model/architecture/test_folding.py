"""Which tensors of a layer take part in folding, by their names."""

from __future__ import annotations

import pytest

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.family import FoldKind
from minifloat.model.architecture.folding import FoldPart, fold_sites, why_not_fold

LAYER = "model.layers.3"
CONFIG = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION = {
    "input_layernorm.weight": (32,),
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.v_proj.bias": (16,),
    "self_attn.o_proj.weight": (32, 32),
    "post_attention_layernorm.weight": (32,),
}
DENSE = {
    **ATTENTION,
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
}
FUSED_EXPERTS = {
    **ATTENTION,
    "mlp.gate.weight": (4, 32),
    "mlp.experts.gate_up_proj": (4, 32, 32),
    "mlp.experts.down_proj": (4, 32, 16),
}


def infos(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16") -> dict[str, TensorInfo]:
    return {f"{LAYER}.{name}": TensorInfo(f"{LAYER}.{name}", dtype, shape, "", 0, 0) for name, shape in shapes.items()}


def part(name: str, *where: object) -> FoldPart:
    return FoldPart(f"{LAYER}.{name}", *where)  # type: ignore[arg-type]


def test_a_llama_layer_has_four_sites_in_the_order_in_which_it_runs() -> None:
    attention, value, mlp, up = fold_sites(LAYER, infos(DENSE), CONFIG)
    assert [site.kind for site in (attention, value, mlp, up)] == list(map(FoldKind, ("norm", "value", "norm", "up")))
    assert attention.producers == (part("input_layernorm.weight"),)
    assert attention.readers == tuple(part(f"self_attn.{name}_proj.weight") for name in "qkv")
    assert value.producers == (part("self_attn.v_proj.weight"), part("self_attn.v_proj.bias"))
    assert (value.readers, value.channels, value.head_dim, value.sharing) == (
        (part("self_attn.o_proj.weight"),),
        32,
        8,
        2,
    )
    assert mlp.readers == (part("mlp.gate_proj.weight"), part("mlp.up_proj.weight"))
    assert (up.producers, up.readers) == ((part("mlp.up_proj.weight"),), (part("mlp.down_proj.weight"),))


def test_tensors_of_other_layers_do_not_take_part() -> None:
    other = {name.replace("layers.3", "layers.33"): info for name, info in infos({"strange.weight": (1,)}).items()}
    assert fold_sites(LAYER, infos(DENSE) | other, CONFIG) == fold_sites(LAYER, infos(DENSE), CONFIG)


def test_the_router_reads_the_norm_and_every_fused_expert_has_its_own_site() -> None:
    _, _, mlp, *ups = fold_sites(LAYER, infos(FUSED_EXPERTS), CONFIG | {"model_type": "qwen3_moe"})
    assert mlp.readers == (part("mlp.gate.weight"), part("mlp.experts.gate_up_proj"))
    assert [up.producers for up in ups] == [(part("mlp.experts.gate_up_proj", e, (16, 32)),) for e in range(4)]
    assert [up.readers for up in ups] == [(part("mlp.experts.down_proj", e),) for e in range(4)]


def test_fused_qkv_and_gate_up_give_the_rows_of_value_and_up() -> None:
    fused = {name: shape for name, shape in ATTENTION.items() if "_proj" not in name or "o_proj" in name}
    fused |= {
        "self_attn.qkv_proj.weight": (64, 32),
        "mlp.gate_up_proj.weight": (96, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    _, value, mlp, up = fold_sites(LAYER, infos(fused), CONFIG | {"model_type": "phi3"})
    assert value.producers == (part("self_attn.qkv_proj.weight", None, (48, 64)),)
    assert mlp.readers == (part("mlp.gate_up_proj.weight"),)
    assert up.producers == (part("mlp.gate_up_proj.weight", None, (48, 96)),)


def test_a_text_config_inside_the_config_decides() -> None:
    assert len(fold_sites(LAYER, infos(DENSE), {"model_type": "mistral3", "text_config": CONFIG})) == 4


def test_norms_that_add_one_to_their_weight_do_not_take_part() -> None:
    kinds = [site.kind for site in fold_sites(LAYER, infos(DENSE), CONFIG | {"model_type": "gemma"})]
    assert kinds == [FoldKind.VALUE, FoldKind.UP]


def test_clamped_values_do_not_take_part() -> None:
    kinds = [site.kind for site in fold_sites(LAYER, infos(DENSE), CONFIG | {"model_type": "olmo", "clip_qkv": 8.0})]
    assert kinds == [FoldKind.UP]


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (infos(DENSE), {"model_type": "deepseek_v3"}, "the model_type 'deepseek_v3' is not one of"),
        (infos(DENSE), {}, "the model_type None is not one of"),
        (infos(DENSE | {"mlp.strange_proj.weight": (4, 32)}), CONFIG, "unknown use, model.layers.3.mlp.strange_proj"),
        (infos(DENSE | {"self_attn.o_norm.weight": (32,)}), CONFIG, "unknown use, model.layers.3.self_attn.o_norm"),
        (infos(DENSE, "F8_E4M3"), CONFIG, "is stored as F8_E4M3; expected BF16, F16 or F32"),
        ({}, CONFIG, "no tensor has a name that starts with 'model.layers.3'"),
        (
            infos(FUSED_EXPERTS | {"mlp.experts.down_proj": (4, 16, 32)}),
            CONFIG | {"model_type": "qwen3_moe"},
            "does not store experts as [E, out, in]",
        ),
    ],
)
def test_a_layer_that_is_not_known_has_no_sites_and_a_reason(
    tensors: dict[str, TensorInfo], config: dict[str, object], reason: str
) -> None:
    assert fold_sites(LAYER, tensors, config) == ()
    assert reason in why_not_fold(LAYER, tensors, config)


def test_a_layer_with_sites_has_no_reason() -> None:
    assert why_not_fold(LAYER, infos(DENSE), CONFIG) == ""
