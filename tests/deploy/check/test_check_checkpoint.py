"""`check_checkpoint` on folders, the command `check` with its exit status, and `quantize --target`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from minifloat.commands.main import main
from minifloat.deploy.check import ENGINES, CheckReport, LoadVerdict, Target, check_checkpoint
from minifloat.deploy.check.subject import Kind
from minifloat.deploy.check.target import machines_of
from minifloat.errors import AlreadyQuantizedError, CheckpointError, UnknownNameError, UsageError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

ROOT = Path(__file__).parents[3]
STORYBOOK = ROOT / "examples" / "storybook-4m"
INTEROP = ROOT / "tests" / "data" / "interop"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rules(report: CheckReport) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize(
    ("folder", "target", "verdict", "rule"),
    [
        ("llmc-fp8-block", "vllm:cpu", LoadVerdict.REFUSED, "blocks-128"),
        ("llmc-fp8-w8a16", "vllm:cpu", LoadVerdict.REFUSED, "vllm-weight-only-fp8"),
        ("llmc-fp8-static", "vllm:cpu", LoadVerdict.REFUSED, "vllm-cpu-static"),
        ("vllm-fp8-static", "vllm:cpu", LoadVerdict.REFUSED, "vllm-cpu-static"),
        ("modelopt-nvfp4", "vllm:cpu", LoadVerdict.REFUSED, "vllm-cpu-small-formats"),
        ("modelopt-mxfp8", "vllm:cpu", LoadVerdict.REFUSED, "vllm-cpu-small-formats"),
        ("deepseek-block32-ue8m0", "vllm:cpu", LoadVerdict.REFUSED, "vllm-cpu-block-size"),
        ("gpt-oss-mxfp4", "minifloat:h100", LoadVerdict.DEGRADED, "minifloat-not-native"),
        ("llmc-mxfp4", "vllm:cpu", LoadVerdict.REFUSED, "vllm-cpu-mxfp4"),
        ("modelopt-fp8-kv", "transformers:cpu", LoadVerdict.WRONG, "transformers-modelopt-fp8"),
    ],
)
def test_golden_checkpoints_of_other_tools_get_the_expected_verdict(
    folder: str, target: str, verdict: LoadVerdict, rule: str
) -> None:
    """The checkpoints for vllm:cpu were started in a real vLLM 0.32.0, which refused each of them."""
    report = check_checkpoint(INTEROP / folder, target)
    assert report.verdict is verdict
    assert rule in rules(report)


@pytest.mark.parametrize("folder", ["llmc-fp8-block", "llmc-mixed", "modelopt-moe-nvfp4", "gpt-oss-mxfp4"])
def test_minifloat_loads_golden_checkpoints_of_other_tools(folder: str) -> None:
    assert not check_checkpoint(INTEROP / folder, "minifloat:cpu").failures


def test_kv_scales_are_found_under_the_names_of_both_layouts() -> None:
    for folder in ("llmc-fp8-kv", "modelopt-fp8-kv"):
        assert "kv-scales-missing" not in rules(check_checkpoint(INTEROP / folder, "vllm:h100"))


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp4", "fp8", "nvfp4"])
@pytest.mark.parametrize("target", ["vllm:cpu", "vllm:h100", "sglang:h100", "transformers:cpu", "minifloat:cpu"])
def test_a_planned_checkpoint_is_judged_like_the_written_one(scheme: str, target: str, tmp_path: Path) -> None:
    planned = check_checkpoint(STORYBOOK, target, scheme=scheme)
    quantize_checkpoint(STORYBOOK, tmp_path / "out", scheme)
    written = check_checkpoint(tmp_path / "out", target)
    assert (planned.verdict, planned.kernels, planned.findings) == (written.verdict, written.kernels, written.findings)


@pytest.mark.parametrize(("head", "refused"), [("fp8-block", {"head-blocks"}), ("fp8-dynamic", set())])
def test_vllm_loads_a_quantized_lm_head_unless_it_has_blocks(
    head: str, refused: set[str], make_llama: Any, tmp_path: Path
) -> None:
    """Both were started in vLLM 0.32.0 on a CPU, with sizes that blocks divide."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "tie_word_embeddings": False}
    model = make_llama(tmp_path / "model", **sizes)
    override = f"^lm_head$={head}"
    planned = check_checkpoint(model, "vllm:cpu", scheme="fp8-block", overrides=[override])
    quantize_checkpoint(model, tmp_path / "out", "fp8-block", QuantizeOptions(overrides=[override]))
    written = check_checkpoint(tmp_path / "out", "vllm:cpu")
    assert {finding.rule for finding in written.failures} == {finding.rule for finding in planned.failures} == refused


def test_vllm_refuses_a_quantized_lm_head_that_no_config_group_names(make_llama: Any, tmp_path: Path) -> None:
    model = make_llama(tmp_path / "model", tie_word_embeddings=False)
    quantize_checkpoint(model, tmp_path / "out", "fp8-dynamic", QuantizeOptions(overrides=["^lm_head$=fp8-dynamic"]))
    assert not check_checkpoint(tmp_path / "out", "vllm:h100").failures
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"].remove("lm_head")
    path.write_text(json.dumps(config))
    assert [finding.rule for finding in check_checkpoint(tmp_path / "out", "vllm:h100").failures] == [
        "vllm-head-not-named"
    ]


def test_a_gguf_file_is_judged_by_its_header(make_llama: Any, tmp_path: Path) -> None:
    source = make_llama(tmp_path / "plain", hidden_size=64)
    quantize_checkpoint(source, tmp_path / "m.gguf", "mxfp4", QuantizeOptions(layout="gguf"))
    for engine in ("llama.cpp", "ollama"):
        report = check_checkpoint(tmp_path / "m.gguf", f"{engine}:apple")
        assert (report.verdict, report.layout, report.findings) == (LoadVerdict.LOADS, "gguf", ())
        assert [(kind, kernel.name) for kind, kernel in report.kernels] == [(Kind.MXFP4, "ggml_mul_mat")]
        assert report.contents.endswith(" F32 in 1 file(s)")
        assert report.contents in run("check", tmp_path / "m.gguf", "--engine", engine, "--hardware", "cpu").output
    for engine in ENGINES.keys() - {"llama.cpp", "ollama", "transformers"}:
        report = check_checkpoint(tmp_path / "m.gguf", Target.of(engine, next(iter(machines_of(engine)))))
        assert report.verdict is LoadVerdict.REFUSED
        assert "GGUF" in report.findings[0].problem
    with pytest.raises(CheckpointError, match="give the model that the file was made from"):
        check_checkpoint(tmp_path / "m.gguf", "ollama:cpu", scheme="nvfp4")


def test_a_scheme_that_quantize_itself_refuses_will_not_load() -> None:
    report = check_checkpoint(INTEROP / "base-llama", "transformers:cpu", scheme="fp8-block", layout="fp8")
    assert report.verdict is LoadVerdict.REFUSED
    assert "whole 128x128 blocks" in report.findings[0].problem


def test_a_scheme_for_a_quantized_checkpoint_is_an_error() -> None:
    with pytest.raises(AlreadyQuantizedError):
        check_checkpoint(INTEROP / "llmc-mxfp4", "vllm:h100", scheme="fp8")


@pytest.mark.parametrize("text", ["vllm", "vllm:", "vllm:h100:4", "vllm:h100:tp0", "VLLM:h100", "vllm:h100:tp2:x"])
def test_a_malformed_target_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="vllm:h100:tp4"):
        Target.parse(text)


def test_unknown_names_are_errors_that_list_the_valid_ones() -> None:
    with pytest.raises(UnknownNameError, match="sglang"):
        Target.parse("tgi:h100")
    with pytest.raises(UnknownNameError, match="mi300"):
        Target.parse("vllm:v100")


@pytest.mark.parametrize("text", ["vllm:h100", "sglang:mi300:tp8"])
def test_the_text_of_a_target_parses_to_the_same_target(text: str) -> None:
    assert str(Target.parse(text)) == text


def test_the_exit_status_is_0_if_it_loads_1_if_not_and_3_if_not_known() -> None:
    on_cpu = ("--engine", "vllm", "--hardware", "cpu")
    assert run("check", STORYBOOK, *on_cpu, "--scheme", "fp8-block").exit_code == 0
    refused = run("check", STORYBOOK, *on_cpu, "--scheme", "mxfp4")
    assert refused.exit_code == 1
    assert "will not load" in refused.output
    assert "cure" in refused.output
    unknown = run("check", str(INTEROP / "modelopt-fp8-kv"), "--engine", "sglang", "--hardware", "h100")
    assert unknown.exit_code == 3
    assert run("check", STORYBOOK, "--engine", "tgi", "--hardware", "h100").exit_code == 2


def test_the_json_output_names_the_verdict_the_engine_and_the_rules() -> None:
    result = run(
        "check", STORYBOOK, "--engine", "vllm", "--hardware", "h100", "--tp", "8", "--scheme", "fp8-block", "--json"
    )
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (answer["verdict"], answer["tp"], answer["engine_version"]) == ("refused", 8, "vLLM 0.33.0")
    assert "blocks-128" in [finding["rule"] for finding in answer["findings"]]


def test_quantize_writes_nothing_that_its_target_would_refuse(tmp_path: Path) -> None:
    result = run("quantize", STORYBOOK, tmp_path / "out", "--scheme", "mxfp4", "--target", "vllm:cpu")
    assert result.exit_code == 2
    assert "vllm-cpu-mxfp4" in result.output
    assert "fp8-block" in result.output
    assert list(tmp_path.iterdir()) == []


def test_quantize_notes_how_its_target_degrades_the_checkpoint(tmp_path: Path) -> None:
    report = quantize_checkpoint(STORYBOOK, tmp_path / "out", "mxfp4", QuantizeOptions(target="vllm:b200"))
    assert any("inputs are rounded to 4 bits" in note for note in report.notes)


def test_an_uncalibrated_static_scheme_is_judged_as_weight_only(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="vllm-weight-only-fp8"):
        quantize_checkpoint(STORYBOOK, tmp_path / "out", "fp8-static", QuantizeOptions(target="vllm:mi300"))


def test_a_dense_model_that_declares_quant_method_mxfp4_is_judged_refused_or_wrong(tmp_path: Path) -> None:
    folder = dense_mxfp4(tmp_path / "dense")
    for target, verdict in (("vllm:h100", LoadVerdict.REFUSED), ("transformers:cpu", LoadVerdict.WRONG)):
        assert check_checkpoint(folder, target).verdict is verdict


def dense_mxfp4(folder: Path) -> Path:
    """Write Storybook in MXFP4 with gpt-oss' quant_method."""
    quantize_checkpoint(STORYBOOK, folder.with_name("made"), "mxfp4")
    shutil.copytree(folder.with_name("made"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_check_imports_no_torch() -> None:
    code = (
        "import sys; from minifloat.deploy.check import check_checkpoint; "
        f"check_checkpoint({str(STORYBOOK)!r}, 'minifloat:cpu', scheme='mxfp4'); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
