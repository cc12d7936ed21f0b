"""The rules about transformers agree with what the installed transformers does with each checkpoint on this CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging

from minifloat.checkpoint import Checkpoint
from minifloat.deploy.check import LoadVerdict, check_checkpoint
from minifloat.deploy.check.rules import GGUF_IN_TRANSFORMERS
from minifloat.model.layouts import describe, read_weight
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.convert import convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

ROOT = Path(__file__).parents[3]
STORYBOOK = ROOT / "examples" / "storybook-4m"
INTEROP = ROOT / "tests" / "data" / "interop"
MakeModel = Callable[..., Path]
#: Relative distance of a BF16 weight from its decoded codes; a wrongly scaled weight is percents away.
ROUNDED = 2**-7
TOKENS = torch.arange(1, 9)[None]


@pytest.fixture(autouse=True)
def quiet() -> Any:
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


def what_happens(folder: Path) -> str:
    """Load a checkpoint, run it once and compare its linears with their codes: "right", "wrong" or "refused"."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            assert model(TOKENS).logits.isfinite().all()
    except (RuntimeError, ValueError):
        return "refused"
    compared = 0
    with Checkpoint.open(folder) as checkpoint:
        for module, stored in describe(checkpoint).weights.items():
            held = held_weight(model, module)
            expected = read_weight(checkpoint, stored).dequantize()
            compared += 1
            if held.shape != expected.shape or (held.float() - expected).norm() > ROUNDED * expected.norm():
                return "wrong"
    assert compared
    return "right"


def held_weight(model: Any, module: str) -> torch.Tensor:
    """Return the weight of a linear of the checkpoint in transformers' model, where experts are fused."""
    name = module.replace("block_sparse_moe", "mlp")  # Mixtral's on disk
    block, is_expert, rest = name.partition(".experts.")
    experts = model.get_submodule(f"{block}.experts") if is_expert else None
    if experts is None or not hasattr(experts, "gate_up_proj"):
        weight: torch.Tensor = model.get_submodule(name).weight
        return weight
    number, projection = rest.split(".")
    if projection in ("down_proj", "w2"):
        fused: torch.Tensor = experts.down_proj[int(number)]
        return fused
    gate, up = experts.gate_up_proj[int(number)].chunk(2)
    return gate if projection in ("gate_proj", "w1") else up


EXPECTED = {
    LoadVerdict.REFUSED: "refused",
    LoadVerdict.WRONG: "wrong",
    LoadVerdict.DEGRADED: "right",
    LoadVerdict.LOADS: "right",
}

#: Golden checkpoints of which the installed transformers makes something else than 5.24, the version of the rules.
BEFORE_5_24 = {"vllm-fp8-static": "refused"} if transformers.__version__.startswith("5.23.") else {}

_SIZES = {"hidden_size": 128, "intermediate_size": 256}
OF_WHOLE_BLOCKS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_SIZES, "moe_intermediate_size": 256, "head_dim": 32},
    "mixtral": {**_SIZES, "head_dim": 32, "num_key_value_heads": 4},
    "deepseek_v3": {**_SIZES, "moe_intermediate_size": 256, "q_lora_rank": 128, "kv_lora_rank": 128, "v_head_dim": 32},
    "llama4_text": {**_SIZES, "intermediate_size_mlp": 256, "head_dim": 32},
}

FOLDERS = sorted(
    path.name
    for path in INTEROP.iterdir()
    if path.is_dir() and not path.name.startswith("base-") and path.name != "gpt-oss-mxfp4"
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_transformers_treats_golden_checkpoints_as_the_rules_predict(folder: str) -> None:
    report = check_checkpoint(INTEROP / folder, "transformers:cpu")
    assert what_happens(INTEROP / folder) == BEFORE_5_24.get(folder, EXPECTED[report.verdict]), rules_of(report)


@pytest.mark.parametrize(("scheme", "layout"), [*((s, "compressed-tensors") for s in SCHEMES), ("fp8-block", "fp8")])
def test_transformers_decodes_every_scheme_of_ours_correctly(scheme: str, layout: str, tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "out", scheme, QuantizeOptions(layout=layout))
    report = check_checkpoint(tmp_path / "out", "transformers:cpu")
    assert report.verdict is LoadVerdict.DEGRADED
    assert what_happens(tmp_path / "out") == "right", rules_of(report)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3", "llama4_text"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_treats_experts_of_every_scheme_as_the_rules_predict(
    make_model: MakeModel, tmp_path: Path, model_type: str, scheme: str
) -> None:
    quantize_checkpoint(make_model(tmp_path / "m", model_type, **OF_WHOLE_BLOCKS[model_type]), tmp_path / "out", scheme)
    report = check_checkpoint(tmp_path / "out", "transformers:cpu")
    assert what_happens(tmp_path / "out") == EXPECTED[report.verdict], rules_of(report)


@pytest.mark.parametrize(
    "overrides",
    [[r"\.experts\.=mxfp4"], [r"\.experts\.=mxfp4", "o_proj=mxfp8"], [r"layers\.0\..*\.experts\.=mxfp4"]],
    ids=["another scheme", "one of three", "two schemes"],
)
def test_transformers_treats_experts_under_overrides_as_the_rules_predict(
    make_model: MakeModel, tmp_path: Path, overrides: list[str]
) -> None:
    made = make_model(tmp_path / "m", "qwen3_moe", **OF_WHOLE_BLOCKS["qwen3_moe"])
    quantize_checkpoint(made, tmp_path / "out", "fp8", QuantizeOptions(overrides=overrides))
    report = check_checkpoint(tmp_path / "out", "transformers:cpu")
    assert what_happens(tmp_path / "out") == EXPECTED[report.verdict], rules_of(report)


def test_dense_mxfp4_gets_random_weights_without_an_error(tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "made", "mxfp4")
    folder = tmp_path / "dense"
    shutil.copytree(tmp_path / "made", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert check_checkpoint(folder, "transformers:cpu").verdict is LoadVerdict.WRONG
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(STORYBOOK, dtype=torch.float32)
    name = "model.layers.0.mlp.down_proj.weight"
    held, wanted = model.get_parameter(name), original.get_parameter(name)
    assert (held - wanted).norm() > wanted.norm() / 2


def rules_of(report: Any) -> list[str]:
    return [finding.rule for finding in report.findings]


@pytest.mark.parametrize(("scheme", "right"), [("mxfp4", True), ("nvfp4", False)])
def test_transformers_decodes_gguf_files_but_for_the_global_scales_of_nvfp4(
    make_model: MakeModel, tmp_path: Path, scheme: str, right: bool
) -> None:
    source = make_model(tmp_path / "plain", "qwen2", hidden_size=64, intermediate_size=128)
    quantize_checkpoint(source, tmp_path / "out", scheme)
    convert_checkpoint(tmp_path / "out", tmp_path / "m.gguf", "gguf")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    expected = load(tmp_path / "out", LoadOptions(dtype=torch.float32))
    with torch.no_grad():
        same = torch.allclose(model(TOKENS).logits, expected(TOKENS).logits, atol=1e-5)
    assert same is right
    report = check_checkpoint(tmp_path / "m.gguf", "transformers:cpu")
    assert report.verdict is (LoadVerdict.DEGRADED if right else LoadVerdict.WRONG)


def test_transformers_reads_the_architectures_of_gguf_that_check_knows() -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    renamed = {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
    known = {renamed.get(name, name) for name in GGUF_IN_TRANSFORMERS} - {"t5encoder"}  # read as t5
    assert known | {"umt5"} == set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}  # by its name
