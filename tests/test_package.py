"""The package as a whole: what it exports, and what must not be in the tree."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import minifloat
from minifloat.commands.main import COMMANDS
from minifloat.report.text import size_text

ROOT = Path(__file__).parents[1]


def test_every_public_name_resolves_and_is_documented() -> None:
    for name in minifloat.__all__:
        assert getattr(minifloat, name) is not None
        assert name in dir(minifloat)


def test_nothing_shadows_the_kernels_package_that_transformers_looks_up() -> None:
    assert not (ROOT / "kernels").exists()
    assert not [path for folder in ("examples", "benchmarks", "scripts") for path in (ROOT / folder).rglob("kernels*")]
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_every_command_has_a_public_function_whose_name_has_its_name_in_it() -> None:
    for command in COMMANDS.keys() - {"completion"}:  # is for shells only
        functions = [name for name in minifloat.__all__ if command in name.split("_")]
        assert any(inspect.isfunction(getattr(minifloat, name)) for name in functions), command


def test_public_functions_name_the_types_of_their_keyword_arguments() -> None:
    untyped = []
    for name in minifloat.__all__:
        public = getattr(minifloat, name)
        if inspect.isfunction(public) or (inspect.isclass(public) and not issubclass(public, Exception)):
            parameters = inspect.signature(public).parameters.values()
            rest = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
            untyped += [name for parameter in rest if "Unpack[" not in str(parameter.annotation)]
    assert untyped == []


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, minifloat\n"
        "dir(minifloat), minifloat.SCHEMES, minifloat.Calibration\n"
        "heavy = {'torch', 'transformers', 'rich', 'fastapi', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_results_show_a_headline_in_one_line_and_as_a_table(tmp_path: Path) -> None:
    base = ROOT / "tests" / "data" / "interop" / "base-llama"
    report = minifloat.quantize_checkpoint(base, tmp_path / "out", "fp8")
    results = [
        report,
        minifloat.inspect_checkpoint(tmp_path / "out"),
        minifloat.check_checkpoint(tmp_path / "out", "vllm:h100"),
        minifloat.plan_model(base, "fp8", "h100"),
        minifloat.convert_checkpoint(
            tmp_path / "out", tmp_path / "plain", options=minifloat.ConvertOptions(dequantize=True)
        ),
        minifloat.push_checkpoint(
            tmp_path / "out", "org/name", minifloat.PushOptions(dry_run=True, license="mit", base_model="org/base")
        ),
    ]
    for result in results:
        assert "\n" not in repr(result)
        assert len(repr(result)) < 600
        assert repr(result).startswith(f"{type(result).__name__}(")
        table = result._repr_html_()
        assert table.count("<tr>") == len(result.headline()) <= 8
    assert "&lt;name&gt;" in dataclasses.replace(results[-1], repo_id="org/<name>")._repr_html_()
    assert repr(report) == (
        f"QuantizeReport(scheme: fp8, tensors: {report.count('quantized')} quantized, {report.count('copied')} copied, "
        f"size: {size_text(report.source_bytes)} -> {size_text(report.output_bytes)}, "
        f"SQNR: {report.total.sqnr_db:.1f} dB, written to: {tmp_path / 'out'})"
    )
