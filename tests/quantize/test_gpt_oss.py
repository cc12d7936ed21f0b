"""gpt-oss in BF16 becomes MXFP4 in the layout of the official checkpoints; other formats of its experts are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from converting import INTEROP, dequantize, edited, quantization_config, requantize, stored
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import minifloat
from minifloat.deploy.check import LoadVerdict, check_checkpoint
from minifloat.errors import UnknownNameError, UnsupportedTensorError, UsageError
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

BASE = INTEROP / "base-gpt-oss"
OFFICIAL = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt-oss") / "out"
    quantize_checkpoint(BASE, folder, "mxfp4")
    return folder


def logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = torch.nn.Module.float(model)(ids).logits
    return found


def test_names_dtypes_and_shapes_are_those_of_an_official_checkpoint(quantized: Path) -> None:
    facts = [
        {name: value[:2] for name, value in stored(path).items()} for path in (quantized, INTEROP / "gpt-oss-mxfp4")
    ]
    assert facts[0] == facts[1]
    assert quantization_config(quantized) == OFFICIAL


def test_every_expert_has_the_codes_of_the_reference_and_all_else_is_copied(quantized: Path) -> None:
    base, written = load_file(BASE / "model.safetensors"), load_file(quantized / "model.safetensors")
    experts = [name for name in base if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert experts
    for name in experts:
        for index, matrix in enumerate(base[name]):
            reference = quantize_tensor(matrix.T.contiguous(), SCHEMES["mxfp4"].weight)
            assert torch.equal(written[f"{name}_blocks"][index].flatten(1), reference.codes)
            assert torch.equal(written[f"{name}_scales"][index], reference.scale)
    for name in base.keys() - set(experts):
        assert torch.equal(written[name], base[name]), name


def test_transformers_and_load_compute_the_logits_of_the_dequantized_weights(quantized: Path, tmp_path: Path) -> None:
    dequantize(quantized, tmp_path / "plain", "float32")
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    ids = load_file(INTEROP / "gpt-oss-mxfp4" / "expected.safetensors")["input_ids"]
    plain = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain", **options), ids)
    config = Mxfp4Config(dequantize=True)
    served = logits(AutoModelForCausalLM.from_pretrained(quantized, quantization_config=config, **options), ids)
    assert torch.equal(served, plain)
    ours = logits(minifloat.load(quantized, minifloat.LoadOptions(dtype=torch.float32)), ids)
    torch.testing.assert_close(ours, plain, rtol=0, atol=2e-5 * float(plain.abs().max()))


def test_a_quantized_gpt_oss_is_copied_code_for_code(tmp_path: Path) -> None:
    source = INTEROP / "gpt-oss-mxfp4"
    report = requantize(source, tmp_path / "out", "mxfp4")
    assert stored(tmp_path / "out") == stored(source)
    assert report.quantized_source is not None
    assert report.quantized_source["copied_codes"] == len([name for name in stored(source) if name.endswith("_blocks")])


def test_experts_that_stay_in_16_bits_are_dequantized_as_transformers_stores_them(tmp_path: Path) -> None:
    source = INTEROP / "gpt-oss-mxfp4"
    overrides = ["experts=bf16"]
    quantize_checkpoint(
        source,
        tmp_path / "out",
        "fp8-dynamic",
        QuantizeOptions(overrides=overrides, from_quantized=True, allow_partial=True),
    )
    dequantize(source, tmp_path / "plain")
    plain, written = load_file(tmp_path / "plain" / "model.safetensors"), stored(tmp_path / "out")
    for name in [name for name in plain if "experts." in name]:
        assert written[name][2] == plain[name].view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("scheme", ["fp8-block", "fp8-dynamic", "nvfp4", "mxfp4-w4a4"])
def test_experts_in_a_format_that_no_engine_loads_are_refused_with_what_to_do(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"own layout alone: use --scheme mxfp4 --layout gpt-oss, or keep"):
        quantize_checkpoint(BASE, tmp_path / "out", scheme)
    report = check_checkpoint(BASE, "vllm:h100", scheme=scheme)
    assert report.verdict is LoadVerdict.REFUSED
    assert "--layout gpt-oss" in report.findings[0].problem


def test_the_layout_refuses_what_its_readers_would_run_unquantized(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"servers would run llama in it unquantized: use --layout compressed-tensors"):
        quantize_checkpoint(INTEROP / "base-llama", tmp_path / "out", "mxfp4", QuantizeOptions(layout="gpt-oss"))
    with pytest.raises(UsageError, match=r"layout 'gpt-oss' holds mxfp4 only, not 'fp8'"):
        quantize_checkpoint(BASE, tmp_path / "out", "fp8", QuantizeOptions(layout="gpt-oss"))
    with pytest.raises(UsageError, match=r"q_proj: layout 'gpt-oss' holds fused experts only; leave it in 16 bits"):
        quantize_checkpoint(BASE, tmp_path / "out", "mxfp4", QuantizeOptions(overrides=["q_proj=mxfp4"]))
    with pytest.raises(UnknownNameError, match="valid: compressed-tensors, fp8, gpt-oss"):
        quantize_checkpoint(BASE, tmp_path / "out", "mxfp4", QuantizeOptions(layout="gptoss"))


def test_all_layers_or_none_are_quantized(make_gpt_oss: Callable[..., Path], tmp_path: Path) -> None:
    source = make_gpt_oss(tmp_path / "model")
    overrides = [r"layers\.0\.mlp\.experts=bf16"]
    with pytest.raises(
        UsageError, match=r"layers\.0\S+ would stay in 16 bits: layout 'gpt-oss' holds the experts of every"
    ):
        quantize_checkpoint(source, tmp_path / "out", "mxfp4", QuantizeOptions(overrides=overrides, allow_partial=True))


def test_check_judges_the_plan_as_it_judges_the_written_checkpoint(quantized: Path) -> None:
    for target in ("vllm:h100", "vllm:cpu", "transformers:cpu", "minifloat:cpu"):
        planned, written = check_checkpoint(BASE, target, scheme="mxfp4"), check_checkpoint(quantized, target)
        assert [(finding.rule, finding.evidence) for finding in planned.findings] == [
            (finding.rule, finding.evidence) for finding in written.findings
        ]
    assert check_checkpoint(quantized, "vllm:h100").verdict is LoadVerdict.LOADS
    assert check_checkpoint(quantized, "transformers:cpu").verdict is LoadVerdict.DEGRADED


def test_blocks_without_scales_are_refused_by_name(quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    damaged = edited(
        quantized, tmp_path / "damaged", tensors=lambda all: {k: v for k, v in all.items() if k != f"{name}_scales"}
    )
    with pytest.raises(minifloat.MinifloatError, match=f"{name}_blocks has no {name}_scales beside it"):
        requantize(damaged, tmp_path / "out", "mxfp4")


def test_experts_that_are_kept_are_listed_by_the_names_that_servers_ask_for(tmp_path: Path) -> None:
    """vLLM builds the experts of a layer quantized unless the config lists its single experts."""
    keep = ["experts=bf16", "lm_head=bf16"]
    quantize_checkpoint(BASE, tmp_path / "out", "fp8-dynamic", QuantizeOptions(overrides=keep, allow_partial=True))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {
        f"model.layers.{layer}.mlp.experts.{expert}.{linear}"
        for layer in range(config["num_hidden_layers"])
        for expert in range(config["num_local_experts"])
        for linear in ("gate_proj", "up_proj", "down_proj")
    }
    listed = {name for name in config["quantization_config"]["ignore"] if "experts" in name}
    patterns = [name.removeprefix("re:") for name in listed if name.startswith("re:")]
    assert listed - {f"re:{pattern}" for pattern in patterns} == expected
    assert all(sum(bool(re.fullmatch(pattern, name)) for pattern in patterns) == 1 for name in expected)
    assert "vllm-experts-unlisted" not in rules_of(tmp_path / "out")
    config["quantization_config"]["ignore"] = [
        name for name in config["quantization_config"]["ignore"] if "experts" not in name
    ]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert "vllm-experts-unlisted" in rules_of(tmp_path / "out")


def rules_of(folder: Path) -> set[str]:
    return {finding.rule for finding in check_checkpoint(folder, "vllm:h100").findings}
