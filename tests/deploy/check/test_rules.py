"""Every rule has a case that it applies to and a similar case that it does not apply to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minifloat.deploy.check.engine_kernels import VLLM_ON_GPUS, kernel_for
from minifloat.deploy.check.judge import judge
from minifloat.deploy.check.rules import RULES, LoadVerdict, apply_rules
from minifloat.deploy.check.subject import Case, Kind, Subject, Weight, kind_of
from minifloat.deploy.check.target import ENGINES, GPUS, Target, machines_of
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE
from minifloat.errors import UnknownNameError, UsageError
from minifloat.model.layouts.inspection import Inspection, TensorRow
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import BLOCK_128, TENSOR, block_granularity
from minifloat.numerics.scheme import SCHEMES, KVSpec, Scheme, WeightSpec, weight_only

#: One layer of a model whose sizes suit every scheme on one process, and 128x128 blocks on two.
SHAPES = {
    "self_attn.q_proj": (1024, 1024),
    "self_attn.k_proj": (256, 1024),
    "self_attn.v_proj": (256, 1024),
    "self_attn.o_proj": (1024, 1024),
    "mlp.gate_proj": (1536, 1024),
    "mlp.up_proj": (1536, 1024),
    "mlp.down_proj": (1024, 1536),
}
EXPERTS = {"gate_proj": (768, 1024), "up_proj": (768, 1024), "down_proj": (1024, 768)}
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rope_parameters": {"rope_type": "default"}}
FP8_KV = KVSpec(E4M3, TENSOR)
BLOCKS_32 = Scheme("blocks of 32", "", WeightSpec(E4M3, block_granularity(32, 32)))
NVFP4_W4A4 = SCHEMES["nvfp4-w4a4"]
_ANY_SCALES = replace(SCHEMES["fp8-block"], weight=WeightSpec(E4M3, BLOCK_128))
DEEPSEEK_V4: dict[str, Any] = {"experts": True, "model_type": "deepseek_v4"}


def subject(scheme: str | Scheme, layout: str | None = "compressed-tensors", **facts: Any) -> Subject:
    """A model of one layer."""
    chosen = SCHEMES[scheme] if isinstance(scheme, str) else scheme
    shapes = SHAPES | facts.pop("shapes", {})
    plain = facts.pop("plain", ())
    if facts.pop("experts", False):
        facts = {"model_type": "qwen3_moe"} | facts
        shapes |= {f"mlp.experts.0.{name}": shape for name, shape in EXPERTS.items()}
    names = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    if facts.pop("head", False):
        names["lm_head"] = (4096, 1024)
    if facts.pop("embedding", False):
        names["model.embed_tokens"] = (4096, 1024)
    weights = tuple(
        Weight(name, shape)
        if name.rsplit(".", 1)[-1] in plain
        else Weight(name, shape, chosen.weight, chosen.activation)
        for name, shape in names.items()
    )
    return Subject(
        **{"model_type": "llama", "heads": 16, "kv_heads": 4, "config": CONFIG} | facts, layout=layout, weights=weights
    )


def only_experts(scheme: str) -> Subject:
    whole = subject(scheme, experts=True)
    return replace(whole, weights=tuple(weight for weight in whole.weights if weight.is_expert))


_FILE = Inspection("m.gguf", "smollm3", "gguf", None, 1, (TensorRow("w", "quantized", "NVFP4", (8, 64), 512, 288),))
FILE = Subject.of_file(_FILE)
Q4_K = Subject.of_file(replace(_FILE, rows=(replace(_FILE.rows[0], format="Q4_K"),)))

HALF_OF_EXPERTS = (*only_experts("mxfp4").weights, *only_experts("fp8").weights)
MISNAMED = replace(subject("mxfp4", "gpt-oss"), weights=(), misnamed=True)
RAGGED = {"mlp.gate_proj": (160, 1024), "mlp.up_proj": (160, 1024)}
STATIC_WEIGHTS = weight_only(SCHEMES["fp8-static"])

INDEXER = {"self_attn.indexer.wk": (128, 1024), "self_attn.indexer.weights_proj": (64, 1024)}
KEEPS_SCORES = subject("fp8-block", shapes=INDEXER, plain=("weights_proj",))
DRAFTS = subject("fp8-block", shapes={"eh_proj": (1024, 2048)}, config=CONFIG | {"num_hidden_layers": 0})

LATENT = subject("fp8", config=CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
SMALL_LATENT = replace(LATENT, config=LATENT.config | {"kv_lora_rank": 256})

#: Rule -> a subject and a target that it applies to, then what it must not apply to: another subject, target, or both.
CASES: dict[str, tuple[Any, ...]] = {
    "tp-attention-heads": (subject("fp8"), "vllm:h100:tp3", "vllm:h100:tp4"),
    "tp-kv-heads": (subject("fp8", heads=24, kv_heads=4), "vllm:h100:tp6", "vllm:h100:tp8"),
    "tp-kv-heads-copied": (subject("fp8"), "vllm:h100:tp8", "vllm:h100:tp4"),
    "tp-matrices": (subject("fp8", shapes={"mlp.down_proj": (1024, 1530)}), "vllm:h100:tp4", subject("fp8")),
    "blocks-128": (subject("fp8-block"), "vllm:h100:tp8", "vllm:h100:tp2"),
    "vllm-cpu-latent-size": (SMALL_LATENT, "vllm:cpu-no-amx", LATENT),
    "vllm-cpu-latent": (LATENT, "vllm+minifloat:cpu-no-amx", subject("fp8")),
    "blocks-128-experts": (subject("fp8-block", experts=True), "vllm:h100:tp4", "vllm:h100:tp2"),
    "groups-across-gpus": (subject("mxfp4", shapes={"mlp.down_proj": (1024, 1568)}), "vllm:h100:tp2", subject("mxfp4")),
    "fused-layers-mixed": (
        subject("fp8-block", plain=("q_proj",)),
        "vllm:h100",
        subject("fp8-block", plain=("o_proj",)),
    ),
    "transformers-packed-weight": (
        subject("mxfp4", model_type="nanochat"),
        "transformers:cpu",
        subject("mxfp8", model_type="nanochat"),
    ),
    "transformers-converted-packed": (
        subject("nvfp4", model_type="olmo_hybrid"),
        "transformers:cpu",
        subject("nvfp4", model_type="olmo3"),
    ),
    "transformers-converted": (
        subject("fp8", outer_type="qianfan_ocr"),
        "transformers:cpu",
        subject("fp8", outer_type="internvl"),
    ),
    "transformers-hrm-nvfp4": (
        subject("nvfp4", model_type="hrm_text"),
        "transformers:cpu",
        subject("mxfp4", model_type="hrm_text"),
    ),
    "vllm-indexer": (subject("fp8-block", shapes=INDEXER), "vllm:h100", KEEPS_SCORES),
    "sglang-indexer": (subject("fp8-dynamic", shapes=INDEXER), "sglang:h100", subject("fp8-block", shapes=INDEXER)),
    "vllm-mtp-projection": (DRAFTS, "vllm:h100", replace(DRAFTS, model_type="nemotron_h")),
    "sglang-mtp-projection": (DRAFTS, "sglang:h100", subject("fp8-block")),
    "vllm-mamba-1": (  # Mamba-2 has no x_proj
        subject("fp8", shapes={"mixer.in_proj": (512, 1024), "mixer.x_proj": (64, 1024)}),
        "vllm:h100",
        subject("fp8", shapes={"mixer.in_proj": (512, 1024)}),
    ),
    "vllm-router": (
        subject("fp8-dynamic", shapes={"mlp.gate": (8, 1024)}),
        "vllm:h100",
        subject("fp8-dynamic", shapes={"mlp.gate": (8, 1024)}, model_type="qwen3_moe"),
    ),
    "sglang-router": (
        subject("fp8-dynamic", shapes={"mlp.shared_expert_gate": (1, 1024)}),
        "sglang:h100",
        subject("fp8-dynamic", experts=True),
    ),
    "sglang-olmo": (
        subject("fp8-dynamic", model_type="olmo"),
        "sglang:h100",
        subject("fp8-dynamic", model_type="olmo2"),
    ),
    "vllm-weight-only-fp8": (subject("fp8"), "vllm:cpu", "vllm:h100"),
    "vllm-cpu-static": (subject("fp8-static"), "vllm:cpu", "vllm:h100"),
    "vllm-cpu-dynamic": (subject("fp8-dynamic"), "vllm:cpu-no-amx", subject("fp8-block")),
    "vllm-cpu-dynamic-amx": (subject("fp8-dynamic"), "vllm:cpu", "vllm:cpu-no-amx"),
    "vllm-cpu-small-formats": (subject("mxfp8"), "vllm:cpu", subject("fp8-block")),
    "vllm-cpu-mxfp4": (subject("mxfp4"), "vllm:cpu", subject("mxfp4", "gpt-oss")),
    "vllm-cpu-amx": (subject("fp8-block"), "vllm:cpu-no-amx", "vllm:cpu"),
    "vllm-cpu-head-size": (
        subject("fp8-block", config=CONFIG | {"head_dim": 72}),
        "vllm:cpu",
        subject("fp8-block", config=CONFIG | {"head_dim": 64}),
    ),
    "vllm-cpu-block-size": (subject(BLOCKS_32, "fp8"), "vllm:cpu", subject("fp8-block", "fp8")),
    "vllm-dense-mxfp4": (MISNAMED, "vllm:h100", subject("mxfp4")),
    "ampere-weight-only": (subject("fp8-dynamic"), "vllm:a100", "vllm:l40s"),
    "vllm-b200-mxfp4-inputs": (subject("mxfp4"), "vllm:b200", "vllm:h200"),
    "vllm-b200-mxfp8-inputs": (subject("mxfp8"), "vllm:b200", "vllm:h200"),
    "vllm-b200-w4a8": (subject("mxfp4-w4a8"), "vllm:b200", subject("mxfp4-w4a4")),
    "vllm-a100-w4a8": (subject("mxfp4-w4a8"), "vllm:a100", "vllm:l40s"),
    "vllm-hopper-mxfp4-inputs": (subject("mxfp4"), "vllm:h100", only_experts("mxfp4")),
    "vllm-w4a8-experts": (only_experts("mxfp4-w4a8"), "vllm:l40s", "vllm:h100"),
    "vllm-mi300-mxfp4-experts": (only_experts("mxfp4"), "vllm:mi300", only_experts("mxfp4-w4a8")),
    "vllm-mx-before-blackwell": (subject("mxfp8-w8a8"), "vllm:h100", "vllm:b200"),
    "nvfp4-before-blackwell": (subject(NVFP4_W4A4), "vllm:h100", "vllm:b200"),
    "vllm-mi300-nvfp4": (subject("nvfp4"), "vllm:mi300", "vllm:a100"),
    "vllm-mi300-emulated": (subject("mxfp4"), "vllm:mi300", subject("fp8-block")),
    "mi300-fnuz": (subject("fp8-block"), "vllm:mi300", "vllm:h100"),
    "experts-weight-only-fp8": (only_experts("fp8"), "vllm:h100", only_experts("fp8-dynamic")),
    "vllm-cpu-experts": (only_experts("fp8-dynamic"), "vllm:cpu", only_experts("fp8-block")),
    "vllm-fp8-layout-head": (subject("fp8-block", "fp8", head=True), "vllm:h100", subject("fp8-block", head=True)),
    "head-blocks": (
        subject("fp8-block", head=True, head_named=True),
        "vllm:h100",
        subject("fp8-dynamic", head=True, head_named=True),
    ),
    "vllm-head-not-named": (
        subject("fp8-dynamic", head=True),
        "vllm:h100",
        subject("fp8-dynamic", head=True, head_named=True),
    ),
    "vllm-embedding": (subject("fp8", embedding=True), "vllm:h100", subject("fp8")),
    "transformers-tied-embedding": (
        subject("fp8", embedding=True),
        "transformers:cpu",
        subject("fp8", embedding=True, head=True),
    ),
    "mlx-layout": (subject("mxfp4", "mlx"), "vllm:h100", "minifloat:cpu"),
    "mlx-other-layout": (subject("mxfp4"), "mlx:apple", subject("mxfp4", "mlx")),
    "vllm-modelopt-mxfp4": (subject("mxfp4", "modelopt"), "vllm:h100", subject("mxfp4")),
    "kv-scales-missing": (
        subject("fp8-block", kv=FP8_KV),
        "vllm:h100",
        subject("fp8-block", kv=FP8_KV, kv_scales=True),
    ),
    "sglang-cpu": (subject("fp8-block"), "sglang:cpu", "sglang:h100"),
    "sglang-cpu-amx": (subject("fp8-block", "fp8"), "sglang:cpu-no-amx", "sglang:cpu"),
    "sglang-vocabulary": (
        subject("fp8-dynamic", head=True),
        "sglang:h100",
        subject("fp8-dynamic", head=True, head_named=True),
    ),
    "sglang-llama-scales": (
        subject("mxfp8-w8a8", "mxfp8", model_type="phi3"),
        "sglang:b200",
        subject("mxfp8-w8a8", "mxfp8", model_type="qwen3"),
    ),
    "vllm-blocks-rounded-again": (subject(_ANY_SCALES), "vllm:h100", "vllm:l40s"),
    "sglang-blocks-rounded-again": (subject(_ANY_SCALES), "sglang:b200", "sglang:h100"),
    "sglang-mxfp8": (subject("mxfp8"), "sglang:h100", subject("mxfp4")),
    "sglang-mxfp8-layout": (subject("mxfp8-w8a8", "mxfp8"), "sglang:h100", "sglang:b200"),
    "sglang-mxfp8-rounded-again": (subject("mxfp8-w8a8", "mxfp8"), "sglang:mi300", "sglang:b200"),
    "sglang-mxfp4": (subject("mxfp4-w4a4"), "sglang:h100", only_experts("mxfp4")),
    "sglang-mxfp4-experts": (only_experts("mxfp4"), "sglang:h100", subject("mxfp4")),
    "sglang-a100-blocks": (subject("fp8-block"), "sglang:a100", only_experts("fp8-block")),
    "sglang-mi300-marlin": (subject("nvfp4"), "sglang:mi300", subject("fp8-dynamic")),
    "sglang-weight-only-blocks": (subject(weight_only(SCHEMES["fp8-block"])), "sglang:h100", subject("fp8-block")),
    "transformers-modelopt-fp8": (subject("fp8-static", "modelopt"), "transformers:cpu", subject("fp8-static")),
    "transformers-modelopt-fp4": (subject("nvfp4", "modelopt"), "transformers:cpu", subject("nvfp4")),
    "transformers-fp8-per-tensor": (subject("fp8-static", "fp8"), "transformers:cpu", subject("fp8-block", "fp8")),
    "transformers-partial-blocks-misread": (
        subject("fp8-block", "fp8", shapes=RAGGED),
        "transformers:cpu",
        subject("fp8-block", shapes=RAGGED),
    ),
    "transformers-partial-blocks": (
        subject("fp8-block", "fp8", shapes={"mlp.up_proj": (161, 1024)}),
        "transformers:a100",
        subject("fp8-block", "fp8", shapes=RAGGED),
    ),
    "transformers-ragged-inputs": (
        subject("fp8-block", shapes={"mlp.down_proj": (1024, 160)}),
        "transformers:cpu",
        subject("fp8-block"),
    ),
    "transformers-single-experts": (
        subject("mxfp4", experts=True, model_type="gemma4_text"),
        "transformers:h100",
        subject("mxfp4", experts=True, model_type="llama4_text"),
    ),
    "vllm-single-experts": (
        subject("mxfp4", experts=True, model_type="aria_text"),
        "vllm:h100",
        subject("mxfp4", experts=True, model_type="gemma4_text"),
    ),
    "vllm-expert-dtype": (
        subject("fp8-block", "fp8", **DEEPSEEK_V4),
        "vllm:h100",
        subject("fp8-block", "fp8", **DEEPSEEK_V4, config=CONFIG | {"expert_dtype": "fp8"}),
    ),
    "vllm-experts-unlisted": (
        subject("fp8-dynamic", unlisted_experts=(Weight("model.layers.0.mlp.experts.down_proj", (768, 1024)),)),
        "vllm:h100",
        subject("fp8-dynamic"),
    ),
    "transformers-experts-blocks": (only_experts("fp8-block"), "transformers:cpu", only_experts("fp8-dynamic")),
    "transformers-experts-nvfp4": (
        only_experts("nvfp4"),
        "transformers:cpu",
        replace(only_experts("nvfp4"), model_type="llama4_text"),
    ),
    "transformers-experts-mixed": (
        replace(only_experts("fp8"), weights=HALF_OF_EXPERTS),
        "transformers:cpu",
        replace(subject("fp8"), weights=(*subject("fp8").weights, *HALF_OF_EXPERTS[:3])),
    ),
    "transformers-dense-mxfp4": (MISNAMED, "transformers:h100", subject("mxfp4")),
    "transformers-decompresses": (subject("fp8-block"), "transformers:h100", subject("fp8-block", "fp8")),
    "transformers-decodes-fp8": (subject("fp8-block", "fp8"), "transformers:a100", "transformers:h100"),
    "transformers-decodes-mxfp4": (subject("mxfp4", "gpt-oss"), "transformers:cpu", subject("mxfp4")),
    "transformers-kv-cache": (
        subject("fp8-block", kv=FP8_KV, kv_scales=True),
        "transformers:cpu",
        subject("fp8-block"),
    ),
    "tensorrt-llm-nvidia-only": (subject("fp8-block"), "tensorrt-llm:mi300", "tensorrt-llm:h100"),
    "tensorrt-llm-not-read": (subject("fp8-static"), "tensorrt-llm:h100", subject("fp8-static", "modelopt")),
    "tensorrt-llm-blocks-rounded-again": (subject(_ANY_SCALES), "tensorrt-llm:b200", "tensorrt-llm:h200"),
    "minifloat-nvidia-only": (subject("fp8"), "minifloat:mi300", "minifloat:a100"),
    "minifloat-gpu-unmeasured": (subject("fp8"), "minifloat:h100", "minifloat:cpu"),
    "minifloat-one-process": (subject("fp8"), "minifloat:cpu:tp2", "minifloat:cpu"),
    "minifloat-dense-mxfp4": (MISNAMED, "minifloat:cpu", subject("mxfp4")),
    "minifloat-not-native": (
        subject("fp8", model_type="falcon_h1"),
        "minifloat:cpu",
        subject("fp8", model_type="gemma3_text", outer_type="gemma3"),
    ),
    "minifloat-text-only": (
        subject("fp8", model_type="gemma3_text", outer_type="gemma3"),
        "minifloat:cpu",
        subject("fp8", outer_type="llama"),
    ),
    "minifloat-kv-scales-missing": (
        subject("fp8", kv=FP8_KV),
        "minifloat:cpu",
        subject("fp8", kv=FP8_KV, kv_scales=True),
    ),
    "gguf-architecture": (
        subject("mxfp4", config=CONFIG | {"architectures": ["XForCausalLM"]}),
        "llama.cpp:cpu",
        subject("mxfp4"),
    ),
    "gguf-blocks": (
        subject("nvfp4", shapes={"mlp.down_proj": (1024, 1568)}),
        "llama.cpp:apple",
        subject("mxfp4", shapes={"mlp.down_proj": (1024, 1568)}),
    ),
    "gguf-file": (subject("mxfp4"), "llama.cpp:cpu", FILE),
    "gguf-unknown": (replace(FILE, file=replace(_FILE, architecture="clip")), "ollama:apple", FILE),
    "gguf-plugin": (FILE, "vllm:h100", subject("nvfp4")),
    "gguf-not-read": (FILE, "minifloat:cpu", "llama.cpp:cpu"),
    "mlx-gguf": (FILE, "mlx:apple", subject("nvfp4", "mlx")),
    "sglang-gguf-nvidia": (FILE, "sglang:mi300", "sglang:h100"),
    "sglang-gguf-type": (FILE, "sglang:h100", Q4_K),
    "sglang-gguf-architecture": (Q4_K, "sglang:h100", subject("nvfp4")),
    "transformers-gguf": (FILE, "transformers:cpu", replace(FILE, file=replace(_FILE, architecture="qwen3moe"))),
    "transformers-gguf-nvfp4": (FILE, "transformers:h100", Q4_K),
    "transformers-gguf-decoded": (Q4_K, "transformers:h100", subject("nvfp4")),
    "gguf-type": (subject("fp8"), "llama.cpp:cpu", subject("nvfp4")),
    "head-unquantized": (subject("fp8", head=True, plain=("lm_head",)), "vllm:h100", subject("fp8", head=True)),
}


def applied(case: tuple[Subject, str]) -> dict[str, tuple[str, ...]]:
    """Return the evidence of each rule that applies to a model and a target."""
    target = Target.parse(case[1])
    return {finding.rule: finding.evidence for finding in apply_rules(Case(case[0], target))}


@pytest.mark.parametrize(
    ("facts", "target", "reason"),
    [
        ({"model_type": "llama", "outer_type": "internvl"}, "minifloat:cpu", "model_type is 'internvl', not one of"),
        ({"model_type": "llama", "outer_type": "llava"}, "minifloat:h100", ""),
        ({"model_type": "unknown", "outer_type": "llava"}, "minifloat:h100", ""),
        ({"model_type": "qwen2_vl", "outer_type": "qwen2_vl"}, "minifloat:h100", ""),
        ({"model_type": "gemma3_text", "outer_type": "gemma3"}, "minifloat:h100", "the decoder of GPUs does not have"),
        ({"model_type": "gemma4_text", "outer_type": "gemma4"}, "minifloat:cpu", ""),
        ({"model_type": "mixtral"}, "minifloat:h100", "the decoder of GPUs does not have mixtures of experts"),
        ({"config": {"hidden_act": "tanh"}}, "minifloat:cpu", "activation is 'tanh', not one of silu"),
        ({"config": {"hidden_size": "wide"}}, "minifloat:cpu", ""),
    ],
)
def test_why_the_text_model_is_not_native(facts: dict[str, Any], target: str, reason: str) -> None:
    found = applied((subject("fp8", **{"config": {}} | facts), target))
    assert "".join(found.get("minifloat-not-native", ())).startswith(reason or "")
    assert ("minifloat-not-native" in found) == bool(reason)
    assert ("minifloat-text-only" in found) == (not reason and facts.get("outer_type", "llama") != "llama")


def test_every_rule_has_a_unique_name_and_a_case() -> None:
    assert sorted(rule.name for rule in RULES) == sorted(CASES)
    assert {engine for rule in RULES for engine in rule.engines} == set(ENGINES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_applies_to_its_case_and_not_to_the_similar_case(rule: str) -> None:
    model, target, *other = CASES[rule]
    similar = next((part for part in other if isinstance(part, Subject)), model)
    assert applied((model, target))[rule]
    assert rule not in applied((similar, next((part for part in other if isinstance(part, str)), target)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_failure_names_a_cure_and_a_source(rule: Any) -> None:
    assert rule.source
    assert rule.problem
    assert rule.cure or not rule.verdict.is_failure
    assert all(set(rule.hardware) <= set(machines_of(engine)) for engine in rule.engines)


def test_evidence_of_broken_blocks_shows_the_remainder() -> None:
    model = subject("fp8-block", shapes={"mlp.gate_proj": (1536, 1024), "mlp.up_proj": (1536, 1024)})
    lines = applied((model, "vllm:h100:tp8"))["blocks-128"]
    assert "model.layers.*.mlp.gate_proj (1536x1024): 192 rows on a GPU, 192 % 128 = 64" in lines
    assert "model.layers.*.mlp.down_proj (1024x1536): 192 columns on a GPU, 192 % 128 = 64" in lines


def test_only_the_last_part_of_a_fused_layer_may_end_in_a_partial_block() -> None:
    last = subject("fp8-block", shapes={"self_attn.v_proj": (160, 1024), "mlp.up_proj": (160, 1024)})
    assert "blocks-128" not in applied((last, "vllm:h100"))
    first = subject("fp8-block", shapes={"mlp.gate_proj": (160, 1024)})
    assert "blocks-128" in applied((first, "vllm:h100"))


def test_blocks_of_copied_key_value_heads_are_checked_per_head() -> None:
    """4 heads of 256 / 4 = 64 rows: a GPU of 8 holds one whole head, half a block."""
    assert any("k_proj" in line for line in applied((subject("fp8-block"), "vllm:h100:tp8"))["blocks-128"])
    wide = subject("fp8-block", shapes={"self_attn.k_proj": (512, 1024), "self_attn.v_proj": (512, 1024)})
    assert not any("k_proj" in line for line in applied((wide, "vllm:h100:tp8"))["blocks-128"])


@pytest.mark.parametrize("hardware", ENGINE_HARDWARE)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_refused_or_has_a_named_kernel_on_every_machine(
    scheme: str, engine: str, hardware: str
) -> None:
    """Either a rule refuses it, or the kernel is named."""
    report = judge("model", None, Case(subject(scheme), Target.of(engine, hardware)))
    assert report.verdict is not LoadVerdict.UNKNOWN
    assert bool(report.failures) != bool(report.kernels)


@pytest.mark.parametrize("hardware", GPUS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_every_scheme_are_refused_or_have_a_named_kernel_in_vllm(scheme: str, hardware: str) -> None:
    report = judge("model", None, Case(only_experts(scheme), Target.of("vllm", hardware)))
    assert bool(report.failures) != bool(report.kernels)
    assert all(kernel.experts for _, kernel in report.kernels)


@pytest.mark.parametrize(
    ("scheme", "hardware", "linears", "experts"),
    [
        ("fp8-block", "a100", "HummingFP8ScaledMMLinearKernel", "MarlinExperts"),
        ("fp8-dynamic", "h200", "CutlassFP8ScaledMMLinearKernel", "TritonOrCutlassExperts"),
        ("mxfp8", "b200", "FlashInferCutedslMxfp8LinearKernel", "TrtLlmFp8ExpertsMonolithic"),
        ("mxfp4", "h100", "HummingMxFp4LinearKernel", "MarlinExperts"),
        ("mxfp4-w4a8", "b200", "HummingMxFp4LinearKernel", "TrtLlmMxfp4ExpertsMonolithic"),
        ("nvfp4", "b200", "FlashInferCuteDslNvFp4W4A16LinearKernel", "MarlinExperts"),
        ("nvfp4-w4a4", "mi300", "EmulationNvFp4LinearKernel", "Nvfp4QuantizationEmulationTritonExperts"),
    ],
)
def test_kernels_of_linears_and_experts_in_vllm(scheme: str, hardware: str, linears: str, experts: str) -> None:
    report = judge("model", None, Case(subject(scheme, experts=True), Target.of("vllm", hardware)))
    assert [(kernel.experts, kernel.name) for _, kernel in report.kernels] == [(False, linears), (True, experts)]
    assert [kernel["experts"] for kernel in report.to_dict()["kernels"]] == [False, True]


def test_the_page_about_vllm_has_the_table_of_kernels_on_gpus() -> None:
    rows = []
    for row in VLLM_ON_GPUS:
        weights = "; ".join(kind.value for kind in row.kinds) + (f" ({row.layout})" if row.layout else "")
        function = row.source.rpartition(" ")[2]
        part = "experts" if row.experts else "linears"
        cells = (weights, part, ", ".join(row.hardware), row.name, row.without_flashinfer, row.computes, function)
        rows.append(f"| {' | '.join(cells)} |")
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    _, table = page.split("| without FlashInfer | computes with | chosen by |\n|---|---|---|---|---|---|---|\n")
    assert table.partition("\n\n")[0].splitlines() == rows


@pytest.mark.parametrize(
    ("model", "target", "applies"),
    [
        (subject("fp8-dynamic", shapes=INDEXER, plain=("weights_proj",)), "sglang:h100", True),
        (subject("fp8-block", shapes=INDEXER), "sglang:mi300", True),
        (subject("fp8-block", shapes=INDEXER, plain=("weights_proj",)), "sglang:mi300", False),
    ],
)
def test_sglang_decodes_an_indexer_in_blocks_on_nvidia_alone(model: Subject, target: str, applies: bool) -> None:
    assert ("sglang-indexer" in applied((model, target))) is applies


@pytest.mark.parametrize(
    "model", [subject("fp8-block", "fp8", head=True), subject("fp8", embedding=True)], ids=["head", "embedding"]
)
def test_sglang_takes_codes_of_the_vocabulary_for_weights(model: Subject) -> None:
    assert "sglang-vocabulary" in applied((model, "sglang:h100"))


def test_experts_of_gpt_oss_and_fp8_blocks_of_experts_need_amx_too() -> None:
    for needy in (subject("mxfp4", "gpt-oss"), only_experts("fp8-block"), subject("fp8-block", "fp8")):
        assert "vllm-cpu-amx" in applied((needy, "vllm:cpu-no-amx"))
    assert "vllm-cpu-amx" not in applied((subject("fp8-dynamic"), "vllm:cpu-no-amx"))


def test_the_head_size_comes_from_the_config_or_from_hidden_size_over_heads() -> None:
    for config, size in (
        ({"head_dim": 80, "hidden_size": 1024}, 80),
        ({"head_dim": None, "hidden_size": 1024}, 64),
        ({"hidden_size": 1024, "kv_lora_rank": 512}, 0),
        ({}, 0),
    ):
        assert subject("fp8", config=config).head_size == size


def test_a_layout_without_rule_or_kernel_is_reported_as_not_known() -> None:
    case = Case(subject("fp8-static", "modelopt"), Target.of("sglang", "h100"))
    assert kernel_for(case, Kind.FP8_STATIC) is None
    assert judge("model", None, case).verdict is LoadVerdict.UNKNOWN


def test_a_model_that_is_not_quantized_loads_everywhere() -> None:
    plain = subject("fp8", None, plain=tuple(name.rsplit(".", 1)[-1] for name in SHAPES))
    for engine in ENGINES:
        file = LoadVerdict.DEGRADED if engine in ("llama.cpp", "ollama") else LoadVerdict.LOADS
        machine = "h100" if engine == "tensorrt-llm" else "cpu"
        assert judge("model", None, Case(plain, Target.of(engine, machine))).verdict is file


def test_every_scheme_has_its_kind() -> None:
    found = {name: kind_of(scheme.weight, scheme.activation) for name, scheme in SCHEMES.items()}
    assert found == {
        "fp8-block": Kind.FP8_BLOCK,
        "fp8": Kind.FP8_WEIGHT_ONLY,
        "fp8-static": Kind.FP8_STATIC,
        "fp8-dynamic": Kind.FP8_DYNAMIC,
        "mxfp8": Kind.MXFP8,
        "mxfp4": Kind.MXFP4,
        "nvfp4": Kind.NVFP4,
        "mxfp8-w8a8": Kind.MXFP8_W8A8,
        "mxfp4-w4a8": Kind.MXFP4_W4A8,
        "mxfp4-w4a4": Kind.MXFP4_W4A4,
        "nvfp4-w4a4": Kind.NVFP4_W4A4,
    }
    assert kind_of(STATIC_WEIGHTS.weight, STATIC_WEIGHTS.activation) is Kind.FP8_WEIGHT_ONLY
    assert kind_of(BLOCKS_32.weight, None) is Kind.OTHER


@pytest.mark.parametrize(
    ("scheme", "heads", "verdict"),
    [
        ("fp8-block", 32, LoadVerdict.REFUSED),
        ("fp8-block", 128, LoadVerdict.LOADS),
        ("fp8-dynamic", 32, LoadVerdict.LOADS),
    ],
)
def test_gates_of_linear_attention_are_one_linear_whose_parts_are_no_whole_blocks(
    scheme: str, heads: int, verdict: LoadVerdict
) -> None:
    names = {"in_proj_qkv": 8192, "in_proj_z": 4096, "in_proj_b": heads, "in_proj_a": heads}
    shapes = {f"linear_attn.{name}": (rows, 1024) for name, rows in names.items()}
    config = CONFIG | {"model_type": "qwen3_5_text", "linear_num_key_heads": 16, "linear_key_head_dim": 128}
    model = subject(scheme, shapes=shapes, model_type="qwen3_5_text", config=config)
    assert judge("", None, Case(model, Target.parse("vllm:mi300"))).verdict is verdict


def test_queries_and_gates_of_linear_attention_must_be_quantized_alike() -> None:
    shapes = {"linear_attn.in_proj_qkv": (8192, 1024), "linear_attn.in_proj_z": (4096, 1024)}
    mixed = subject("fp8-block", shapes=shapes, plain=("in_proj_z",), model_type="qwen3_5_text")
    report = judge("", None, Case(mixed, Target.parse("vllm:h100")))
    assert [finding.rule for finding in report.failures] == ["fused-layers-mixed"]


@pytest.mark.parametrize("hardware", ["cpu", "cpu-no-amx"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_the_plugin_linears_of_every_scheme_run_in_vllm_on_a_cpu(scheme: str, hardware: str) -> None:
    report = judge("model", None, Case(subject(scheme), Target.parse(f"vllm+minifloat:{hardware}")))
    assert report.verdict is LoadVerdict.LOADS
    assert [kernel.name for _, kernel in report.kernels] == [
        f"Minifloat{ {'fp8': 'Fp8', 'mxfp8': 'Mxfp8', 'mxfp4': 'Mxfp4', 'nvfp4': 'Nvfp4'}[scheme.split('-')[0]] }"
        "LinearKernel (plugin)"
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_the_plugin_experts_of_every_scheme_run_in_vllm_on_a_cpu(scheme: str) -> None:
    model = subject(scheme, experts=True)
    assert judge("model", None, Case(model, Target.parse("vllm:cpu-no-amx"))).verdict is LoadVerdict.REFUSED
    for one in (model, only_experts(scheme)):
        report = judge("model", None, Case(one, Target.parse("vllm+minifloat:cpu-no-amx")))
        assert report.verdict is LoadVerdict.LOADS


def test_latent_attention_that_vllm_expands_into_heads_runs_on_a_cpu_without_amx() -> None:
    expanded = replace(LATENT, model_type="minicpm3")
    assert not {"vllm-cpu-latent", "vllm-cpu-latent-size"} & set(applied((expanded, "vllm+minifloat:cpu-no-amx")))


def test_the_plugin_computes_no_other_layout() -> None:
    for needy, rule in (
        (subject("mxfp4", "gpt-oss"), "vllm-cpu-amx"),
        (subject("nvfp4", "modelopt"), "vllm-cpu-small-formats"),
        (subject("fp8-static", "fp8"), "vllm-cpu-static"),
    ):
        assert rule in applied((needy, "vllm+minifloat:cpu-no-amx"))
    assert not applied((subject("fp8-block", "fp8"), "vllm+minifloat:cpu-no-amx"))


def test_a_plugin_is_refused_where_it_does_nothing() -> None:
    target = Target.parse("vllm+minifloat:cpu:tp2")
    assert (target.plugin, str(target)) == ("minifloat", "vllm+minifloat:cpu:tp2")
    with pytest.raises(UsageError, match="computes on CPUs; on h100 it changes nothing"):
        Target.of("vllm", "h100", plugin="minifloat")
    with pytest.raises(UnknownNameError, match="plugin of sglang"):
        Target.of("sglang", "cpu", plugin="minifloat")
    with pytest.raises(UnknownNameError, match="plugin of vllm"):
        Target.of("vllm", "cpu", plugin="zentorch")
