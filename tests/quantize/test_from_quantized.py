"""`--from-quantized`: a quantized source gives what its dequantized values give, and codes that fit are copied."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from converting import (
    FIXTURES,
    INTEROP,
    assert_expected_logits,
    dequantize,
    edited,
    interrupt_after,
    quantization_config,
    requantize,
    sharded,
    stored,
    transformers_logits,
)
from safetensors.torch import load_file
from saved_families import save_family_model

from minifloat.checkpoint import Checkpoint
from minifloat.commands.main import main
from minifloat.errors import AlreadyQuantizedError, ConversionError, NonFiniteError, StorageError, UsageError
from minifloat.model.layouts import describe, read_weight
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

LINEARS = [name for name in FIXTURES if name != "gpt-oss-mxfp4"]
SCHEMES = ("fp8-block", "mxfp8", "mxfp4", "nvfp4")


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Return the dequantized weights by module, float32."""
    with Checkpoint.open(folder) as checkpoint:
        weights = describe(checkpoint).weights
        return {module: read_weight(checkpoint, weight).dequantize() for module, weight in weights.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", LINEARS)
def test_codes_are_those_of_the_dequantized_values_or_of_the_source(name: str, scheme: str, tmp_path: Path) -> None:
    report = requantize(INTEROP / name, tmp_path / "out", scheme)
    dequantize(INTEROP / name, tmp_path / "plain", "float32")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "expected", scheme)
    written, expected = stored(tmp_path / "out"), stored(tmp_path / "expected")
    assert {key: value[:2] for key, value in written.items()} == {key: value[:2] for key, value in expected.items()}
    copied = {row.name.removesuffix(".weight") for row in report.tensors if row.detail.endswith("codes of the source")}
    for key, value in written.items():
        module = key.rpartition(".")[0]
        if module not in copied:
            assert value == expected[key], key
    source, out = decoded(INTEROP / name), decoded(tmp_path / "out")
    for module in copied:
        rounded = name.startswith("modelopt") and scheme == "nvfp4"  # a global scale that becomes its reciprocal
        torch.testing.assert_close(out[module], source[module], rtol=2e-7 if rounded else 0, atol=0)
    assert report.quantized_source is not None
    assert report.quantized_source["copied_codes"] == len(copied)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("deepseek-block128", "fp8-block"),
        ("deepseek-block128-bf16-scales", "fp8-block"),
        ("llmc-fp8-dynamic", "fp8"),
        ("vllm-fp8-static", "fp8-block"),
        ("deepseek-block32-ue8m0", "mxfp8"),
        ("llmc-mxfp4", "mxfp4"),
        ("modelopt-mxfp8", "mxfp8"),
        ("modelopt-moe-nvfp4", "nvfp4"),
        ("llmc-nvfp4", "nvfp4"),
    ],
)
def test_codes_that_the_scheme_can_hold_are_copied_and_the_report_says_so(
    name: str, scheme: str, tmp_path: Path
) -> None:
    report = requantize(INTEROP / name, tmp_path / "out", scheme)
    with Checkpoint.open(INTEROP / name) as source, Checkpoint.open(tmp_path / "out") as out:
        before, after = describe(source).weights, describe(out).weights
        assert before.keys() == after.keys()
        for module, weight in before.items():
            assert torch.equal(read_weight(source, weight).codes, read_weight(out, after[module]).codes), module
    assert report.quantized_source is not None
    assert report.quantized_source["copied_codes"] == len(before)
    assert math.isinf(report.total.sqnr_db)
    assert any(f"The codes of {len(before)} weights are those of the source" in note for note in report.notes)
    saved = json.loads((tmp_path / "out" / "minifloat.json").read_text())
    assert saved["quantized_source"] == report.quantized_source
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The source is quantized itself" in card
    assert "--from-quantized" in card


def test_the_error_is_that_against_the_dequantized_source_in_float64(tmp_path: Path) -> None:
    report = requantize(INTEROP / "llmc-nvfp4", tmp_path / "out", "mxfp4")
    source, out = decoded(INTEROP / "llmc-nvfp4"), decoded(tmp_path / "out")
    signal = sum(float(weight.double().square().sum()) for weight in source.values())
    noise = sum(float((weight.double() - out[module].double()).square().sum()) for module, weight in source.items())
    assert report.total.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
    assert report.source_bytes == sum(len(data) for _, _, data in stored(INTEROP / "llmc-nvfp4").values())


@pytest.mark.parametrize(
    ("name", "scheme"), [("deepseek-block128", "fp8-block"), ("vllm-fp8-static", "fp8"), ("modelopt-mxfp8", "mxfp8")]
)
def test_transformers_computes_the_logits_of_the_copied_codes(name: str, scheme: str, tmp_path: Path) -> None:
    requantize(INTEROP / name, tmp_path / "out", scheme)
    assert_expected_logits(name, partial(transformers_logits, tmp_path / "out"))


def test_weights_that_servers_fuse_share_their_scale_again(tmp_path: Path) -> None:
    def scaled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor * 3 if name.endswith("k_proj.weight_global_scale") else tensor
            for name, tensor in tensors.items()
        }

    source = edited(INTEROP / "llmc-nvfp4a16", tmp_path / "model", tensors=scaled)
    report = requantize(source, tmp_path / "out", "nvfp4")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for layer in {name.partition(".self_attn")[0] for name in written if ".self_attn" in name}:
        divisors = {written[f"{layer}.self_attn.{part}_proj.weight_global_scale"].item() for part in "qkv"}
        amax = max(float(decoded(source)[f"{layer}.self_attn.{part}_proj"].abs().max()) for part in "qkv")
        assert divisors == {2.0 ** math.floor(math.log2(2688 / amax))}
    requantized = {row.name.split(".")[-2] for row in report.tensors if row.detail == "nvfp4"}
    assert requantized == {"q_proj", "k_proj", "v_proj"}


def test_weights_that_stay_unquantized_are_dequantized_once_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    report = quantize_checkpoint(
        INTEROP / "deepseek-block128",
        tmp_path / "out",
        "mxfp4",
        QuantizeOptions(overrides=["down_proj=bf16"], from_quantized=True),
    )
    written, source = load_file(tmp_path / "out" / "model.safetensors"), decoded(INTEROP / "deepseek-block128")
    name = next(module for module in source if module.endswith("down_proj"))
    assert torch.equal(written[f"{name}.weight"], source[name].to(torch.bfloat16))
    row = next(row for row in report.tensors if row.name == f"{name}.weight")
    assert (row.action, row.detail) == ("copied", "down_proj=bf16, dequantized to BF16")
    config = quantization_config(tmp_path / "out")
    assert name in config["ignore"]


def test_single_experts_of_a_model_that_is_loaded_with_fused_ones_are_not_dequantized_one_by_one(
    tmp_path: Path,
) -> None:
    quantize_checkpoint(save_family_model("llama4", tmp_path / "model"), tmp_path / "quantized", "mxfp8")
    requantize(tmp_path / "quantized", tmp_path / "out", "mxfp4")
    assert decoded(tmp_path / "out").keys() == decoded(tmp_path / "quantized").keys()
    with pytest.raises(UsageError, match=r"experts\.0\.\w+: the experts of Llama 4 are loaded fused .* --dequantize"):
        quantize_checkpoint(
            tmp_path / "quantized",
            tmp_path / "partial",
            "mxfp4",
            QuantizeOptions(overrides=[r"\.experts\.=bf16"], allow_partial=True, from_quantized=True),
        )


def test_every_tensor_of_the_source_is_in_the_report(tmp_path: Path) -> None:
    report = requantize(INTEROP / "modelopt-fp8-kv", tmp_path / "out", "mxfp8")
    dropped = {row.name for row in report.tensors if row.action == "dropped"}
    assert dropped == {name for name in stored(INTEROP / "modelopt-fp8-kv") if re.search(r"(input|[kv])_scale$", name)}
    assert any(f"{len(dropped)} tensors of the source's quantization were dropped" in note for note in report.notes)


def test_an_interrupted_run_continues_and_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sharded(INTEROP / "modelopt-moe-nvfp4", tmp_path / "model", 4)
    whole = requantize(source, tmp_path / "whole", "fp8-block")
    with monkeypatch.context() as patched:
        interrupt_after(patched, 2)
        with pytest.raises(StorageError):
            requantize(source, tmp_path / "out", "fp8-block")
    report = requantize(source, tmp_path / "out", "fp8-block")
    assert report.resumed_shards == 2
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert report.to_dict() == whole.to_dict()


def test_a_quantized_source_is_refused_unless_asked_for_and_the_message_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(AlreadyQuantizedError, match=r"quantized already \(quant_method 'fp8'\).* --from-quantized"):
        quantize_checkpoint(INTEROP / "deepseek-block128", tmp_path / "out", "mxfp4")
    with pytest.raises(UsageError, match="base-llama is not quantized: leave --from-quantized out"):
        requantize(INTEROP / "base-llama", tmp_path / "out", "mxfp4")


def test_parts_of_a_quantization_that_codes_and_scales_do_not_hold_are_refused(tmp_path: Path) -> None:
    source = edited(
        INTEROP / "llmc-fp8-block", tmp_path / "model", config=lambda config: config.update(transform_config={"a": 1})
    )
    with pytest.raises(ConversionError, match="transform_config"):
        requantize(source, tmp_path / "out", "mxfp4")


@pytest.mark.parametrize("scheme", ["fp8-dynamic", "mxfp4"])
def test_a_nan_among_codes_or_scales_is_refused_by_name(scheme: str, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"

    def with_nan(tensors: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
        bits = tensors[key].view(torch.uint8).clone()
        bits.view(-1)[:4] = 0xFF
        return tensors | {key: bits.view(tensors[key].dtype)}

    for key in (name, f"{name}_scale"):
        source = edited(
            INTEROP / "llmc-fp8-dynamic", tmp_path / key, tensors=lambda tensors, key=key: with_nan(tensors, key)
        )
        with pytest.raises(NonFiniteError, match=re.escape(key)):
            requantize(source, tmp_path / "out", scheme)
        assert not (tmp_path / "out").exists()


def test_the_command_takes_the_option_and_prints_what_the_source_was(tmp_path: Path) -> None:
    arguments = ["quantize", str(INTEROP / "deepseek-block128"), str(tmp_path / "out"), "--scheme", "mxfp4"]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    result = CliRunner().invoke(main, [*arguments, "--from-quantized"], catch_exceptions=False)
    assert result.exit_code == 0
    printed = " ".join(result.output.split())
    assert "The source is quantized itself (layout fp8: fp8-block 7)" in printed
