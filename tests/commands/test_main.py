"""The commands: tables and JSON on success, one line and status 2 for a user's mistake."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from minifloat.calibration.rules import RULES
from minifloat.commands.main import COMMANDS, main
from minifloat.commands.options import SIZE
from minifloat.commands.serve import serve
from minifloat.deploy.estimate.hardware import ENGINE_HARDWARE, PLANNED_HARDWARE
from minifloat.engine.options import EngineOptions
from minifloat.serve.server.settings import ServerSettings

BASE = Path(__file__).parents[1] / "data" / "interop" / "base-llama"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_help_lists_the_commands_in_the_order_of_use() -> None:
    output = run("--help").output
    positions = [output.index(f"\n  {name}") for name in ("quantize", "inspect", "compare", "generate", "doctor")]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target-bits", "5"], "a budget of 5 bits per weight chooses formats by the damage that text shows"),
        (["--target-bytes", "5GB"], "a budget of 5,000,000,000 bytes"),
        (["--max-kl", "0.02"], "a budget of a KL divergence of 0.02"),
        (["--target-bits", "5", "--max-kl", "0.02"], "got --target-bits and --max-kl"),
        (["--target-bytes", "five"], "'--target-bytes': expected a size such as 8G, 8GiB or 500MB, got 'five'"),
    ],
    ids=str,
)
def test_a_budget_without_data_and_two_budgets_are_refused(
    llama_folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    result = run("quantize", llama_folder, tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.output


def test_help_of_quantize_lists_the_schemes() -> None:
    output = run("quantize", "--help").output
    for name in ("fp8-block", "fp8-static", "mxfp4", "nvfp4"):
        assert name in output


def test_quantize_prints_a_row_per_kind_of_tensor_and_the_destination(tmp_path: Path) -> None:
    result = run("quantize", BASE, tmp_path / "out", "--scheme", "fp8")
    assert result.exit_code == 0, result.output
    for word in ("self_attn.q_proj.weight", "copied (embedding)", "copied (norm or bias)", "SQNR", "Written to"):
        assert word in result.output


def test_quantize_prints_json_that_parses(tmp_path: Path) -> None:
    result = run("quantize", BASE, tmp_path / "out", "--scheme", "fp8-block", "--json")
    report = json.loads(result.stdout)
    assert report["recipe"]["scheme"] == "fp8-block"
    assert report == json.loads((tmp_path / "out" / "minifloat.json").read_text())


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    assert run("quantize", BASE, tmp_path / "out", "-q").output == ""


def test_convert_prints_the_conversion_of_every_tensor_and_the_destination(tmp_path: Path) -> None:
    source = BASE.parent / "modelopt-fp8-kv"
    result = run("convert", source, tmp_path / "out", "--layout", "compressed-tensors")
    assert result.exit_code == 0, result.output
    for words in ("model.layers.*.self_attn.k_scale", "copied (not quantized)", "23 converted, 5 copied, 0 dropped"):
        assert words in result.output
    result = run("convert", source, tmp_path / "plain", "--dequantize", "--json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "plain" / "minifloat.json").read_text())


def test_a_conversion_that_would_change_values_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = run("convert", BASE.parent / "llmc-nvfp4", tmp_path / "out", "--layout", "modelopt")
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert "--allow-rounding" in result.output


def test_exclude_is_an_override_to_bf16(tmp_path: Path) -> None:
    run("quantize", BASE, tmp_path / "out", "-q", "--exclude", "down_proj")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert {name.rsplit(".", 1)[-1] for name in ignored} == {"down_proj", "lm_head"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "{base}", "{tmp}/out", "--scheme", "fp4"], "unknown scheme 'fp4'; valid: fp8-block"),
        (["quantize", "{base}", "{tmp}/out", "--layout", "awq"], "unknown layout 'awq'"),
        (["quantize", "{base}", "{tmp}/out", "--layout", "gguf"], "it has no tokenizer; copy tokenizer.json"),
        (["quantize", "{base}", "{tmp}/out", "--override", "nothing=fp8"], "'nothing' matches no weight"),
        (["quantize", "{base}", "{tmp}/no/out"], "does not exist"),
        (["quantize", "{base}", "{tmp}"], "--overwrite"),
        (["quantize", "{tmp}", "{tmp}/out"], "config.json"),
        (["quantize", "{base}", "{tmp}/out", "--override", "down=bf8"], "unknown scheme 'bf8'; valid: bf16, fp8-block"),
        (["generate", "{base}", "x"], "it has no tokenizer; copy tokenizer.json and tokenizer_config.json"),
        (["inspect", "{tmp}/model.gguf"], "model.gguf: no whole GGUF file"),
        (["compare", "{base}", "{tmp}/model.gguf"], "model.gguf: no whole GGUF file"),
        (["quantize", "{tmp}/model.gguf", "{tmp}/out"], "model.gguf: a GGUF file, llama.cpp's format"),
        (["serve", "{tmp}/gguf", "--port", "0"], "m.GGUF: a GGUF file, llama.cpp's format"),
        (["plan", "{tmp}/quantized", "--scheme", "fp8"], "minifloat convert --dequantize"),
        (["quantize", "{tmp}/quantized", "{tmp}/out"], "minifloat convert --dequantize"),
        (["calibrate", "{tmp}/quantized", "{tmp}/s.safetensors", "--data", "self"], "minifloat convert --dequantize"),
        (["inspect", "{tmp}/missing"], "missing"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "gguf").mkdir()
    for file in (tmp_path / "model.gguf", tmp_path / "gguf" / "m.GGUF"):
        file.write_bytes(b"GGUF")
    if "{tmp}/quantized" in arguments:
        assert run("quantize", BASE, tmp_path / "quantized", "-q").exit_code == 0
    result = run(*(text.format(base=BASE, tmp=tmp_path) for text in arguments))
    assert result.exit_code == 2
    assert result.output.startswith("minifloat: error: ")
    assert message in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("command", [("quantize", BASE), ("convert", BASE.parent / "modelopt-fp8-kv", "--dequantize")])
def test_a_destination_that_is_an_empty_folder_is_taken(tmp_path: Path, command: tuple[str | Path, ...]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    name, source, *options = command
    result = run(name, source, out, "-q", *options)
    assert (result.exit_code, result.output) == (0, "")
    assert (out / "config.json").is_file()
    assert run(name, source, out, "-q", *options).exit_code == 2


def test_check_keeps_what_exclude_names_as_quantize_does() -> None:
    options = ("--engine", "vllm", "--hardware", "h100", "--scheme", "fp8-block")
    assert "'zz' matches no weight" in run("check", BASE, *options, "--exclude", "zz").output
    excluded, overridden, plain = (
        json.loads(run("check", BASE, *options, *more, "--json").stdout)
        for more in (("--exclude", "down_proj"), ("--override", "down_proj=bf16"), ())
    )
    assert excluded == overridden
    assert excluded.keys() == plain.keys()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    result = run("--debug", "inspect", tmp_path / "missing")
    assert type(result.exception).__name__ == "NotACheckpointError"


def test_inspect_shows_layout_formats_and_bits(tmp_path: Path) -> None:
    run("quantize", BASE, tmp_path / "out", "-q", "--scheme", "mxfp4")
    result = run("inspect", tmp_path / "out")
    assert result.exit_code == 0
    for word in ("layout: compressed-tensors", "quantized weights alone 4.25", "mxfp4", "model.layers.*.mlp.down_proj"):
        assert word in result.output
    assert json.loads(run("inspect", tmp_path / "out", "--json").stdout)["quantized_bits_per_weight"] == 4.25


def test_doctor_names_the_kernels_and_versions() -> None:
    result = run("doctor")
    assert result.exit_code == 0
    for word in ("minifloat", "torch", "native kernels"):
        assert word in result.output


def test_help_of_every_command_loads_nothing_heavy() -> None:
    code = (
        "import sys, minifloat\n"
        "from minifloat.commands.main import COMMANDS, main\n"
        "from click.testing import CliRunner\n"
        "for command in ([], *([name] for name in COMMANDS)):\n"
        "    assert CliRunner().invoke(main, [*command, '--help']).exit_code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'safetensors', 'huggingface_hub', 'fastapi', 'uvicorn', "
        "'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_python_m_minifloat_runs_the_command_line() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "minifloat", "--version"], check=True, capture_output=True, text=True
    )
    assert result.stdout.startswith("minifloat, version ")


@pytest.mark.parametrize(
    ("command", "option", "names"),
    [
        ("quantize", "--rule", RULES),
        ("calibrate", "--rule", RULES),
        ("inspect", "--rule", RULES),
        ("plan", "--hardware", PLANNED_HARDWARE),
        ("check", "--hardware", ENGINE_HARDWARE),
    ],
)
def test_the_help_of_an_option_has_every_name_that_it_takes(command: str, option: str, names: Iterable[str]) -> None:
    text = _options(command)[option].help
    assert [name for name in names if not re.search(rf"\b{name}\b", text or "")] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help_with_at_most_one_default(command: str) -> None:
    for name, option in _options(command).items():
        assert option.help, name
        assert not (option.show_default and "[default:" in option.help), f"{command} {name}: {option.help}"


def _options(command: str) -> dict[str, click.Option]:
    found = main.get_command(click.Context(main), command)
    assert found is not None
    return {option.opts[0]: option for option in found.params if isinstance(option, click.Option)}


def test_the_help_lists_every_command_in_one_line() -> None:
    lines = run("--help").output.splitlines()
    listed = lines[lines.index("Commands:") + 1 :]
    assert [line.split() for line in listed] == [[name, *summary.split()] for name, summary in COMMANDS.items()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantise"], "there is no command 'quantise'; did you mean 'quantize'? (see: minifloat --help)"),
        (["frobnicate"], "there is no command 'frobnicate'; the commands are quantize, calibrate, inspect"),
        (["--nope"], "no such option '--nope' (see: minifloat --help)"),
        (["quantize"], "missing argument 'MODEL' (see: minifloat quantize --help)"),
        (["plan", "x", "--gpu", "2"], "Did you mean '--gpus'? (see: minifloat plan --help)"),
        (["plan", "x", "--gpus", "many"], "invalid value for '--gpus': 'many'"),
        (["check", "x"], "missing option '--engine'"),
        (["calibrate", "x", "y", "--data", "z", "--max-memory", "8"], "8 what? Give the unit: 8G, 8MiB, or 8B"),
        (["serve", "x", "--kv-cache-memory", "8Q"], "'--kv-cache-memory': expected a size such as 8G"),
        (["compare", "x"], "name CANDIDATES"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors_are_one_line_that_begins_as_all_errors_do(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("minifloat: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8G", 8 << 30), ("8GiB", 8 << 30), ("8gb", 8 * 10**9), ("1.5 MiB", 3 << 19), ("64K", 1 << 16), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text: str, nbytes: int) -> None:
    assert SIZE.convert(text, None, None) == nbytes


def test_every_option_that_takes_a_size_has_the_one_type() -> None:
    options = [
        (name, option.name)
        for name in COMMANDS
        for option in main.get_command(click.Context(main), name).params  # type: ignore[union-attr]
        if option.metavar == "SIZE"
    ]
    assert len(options) >= 4
    assert options == [
        (name, option.name)
        for name in COMMANDS
        for option in main.get_command(click.Context(main), name).params  # type: ignore[union-attr]
        if option.type is SIZE
    ]


def test_the_short_help_fits_80_columns_uncut() -> None:
    lines = run("--help").output.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines[1:])  # the first line is the usage


@pytest.mark.parametrize("name", COMMANDS)
def test_the_dataclass_of_a_command_has_a_field_for_every_parameter(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    callback = command.callback
    assert callback is not None
    params_class = inspect.getclosurevars(callback).nonlocals.get("params_class")
    if params_class is None:
        parameters = inspect.signature(callback).parameters.values()
        names = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        assert names <= {parameter.name for parameter in command.params}
    else:
        assert {field.name for field in fields(params_class)} == {parameter.name for parameter in command.params}


def test_quantizing_and_inspecting_load_no_torch_where_the_kernels_are_native(tmp_path: Path) -> None:
    from minifloat.kernels import native

    if native.load() is None:
        pytest.skip(native.why_unavailable())
    code = (
        "import sys\n"
        "from minifloat.model.layouts.inspection import inspect_checkpoint\n"
        "from minifloat.quantize.job import quantize_checkpoint\n"
        f"quantize_checkpoint({str(BASE)!r}, {str(tmp_path / 'out')!r}, 'mxfp4')\n"
        f"inspect_checkpoint({str(tmp_path / 'out')!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compare_prints_a_row_per_text_and_generate_continues_the_prompt(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/minifloat", "compare", "a model"])
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    assert run("quantize", llama_folder, tmp_path / "out", "-q", "--scheme", "fp8").exit_code == 0
    options = ("--data", text, "--window", "32", "--new-tokens", "4")
    bounds = ("--max-kl", "10", "--min-top1", "0", "--max-ppl-increase", "100%")
    result = run("compare", llama_folder, tmp_path / "out", *options, *bounds)
    assert result.exit_code == 0, result.output
    assert "text.txt" in result.output
    assert "top-1" in result.output
    failed = run("compare", llama_folder, tmp_path / "out", *options, "--max-kl", "1e-9")
    assert failed.exit_code == 1
    assert run("compare", llama_folder, tmp_path / "out", *options, "--max-tokens", "60").exit_code == 3
    refused = run("compare", llama_folder, llama_folder, *options, "--min-top1", "many")
    assert (refused.exit_code, "expected a number or a percentage, got 'many'" in refused.output) == (2, True)
    as_json = run("compare", llama_folder, llama_folder, *options, "--json")
    document = json.loads(as_json.stdout)
    assert document["candidates"][0]["overall"]["kl_max"] == 0.0
    assert document["command"] == "minifloat compare 'a model'"
    generated = run("generate", tmp_path / "out", "the cat", "-n", "4")
    assert generated.exit_code == 0
    assert generated.stdout.startswith("the cat")


def test_every_option_of_serve_is_an_environment_variable_too() -> None:
    options = [parameter for parameter in serve.params if isinstance(parameter, click.Option)]
    assert len(options) > 20
    for option in options:
        name = next(name for name in option.opts if name.startswith("--"))
        assert option.envvar == "MINIFLOAT_" + name[2:].replace("-", "_").upper()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "{tmp}/missing", "--port", "0"], "missing"),
        (["serve", "{base}", "--kv-cache-memory", "much"], "expected a size"),
        (["serve", "{base}", "--api-key", "short"], "API key 1"),
        (["serve", "{base}", "--chat-template", "{tmp}/missing"], "cannot be read"),
        (["serve", "{base}", "--host", "192.0.2.1", "--port", "0"], "cannot listen there"),
        (["chat", "ftp://x"], "expected a URL"),
        (["chat", "http://127.0.0.1:9"], "minifloat serve"),
    ],
)
def test_a_mistake_in_serving_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(*(text.format(base=BASE, tmp=tmp_path) for text in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.startswith("minifloat: error: ")
    assert result.output.count("\n") == 1


def test_serve_listens_before_it_imports_torch() -> None:
    code = (
        "import sys\n"
        "from minifloat.serve.server.settings import ServerSettings\n"
        "from minifloat.serve.server import listen, start\n"
        "listen(ServerSettings('x', port=0)).close()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "option",
    ["--keep-alive-timeout", "--read-timeout", "--write-timeout", "--request-timeout", "--shutdown-timeout"],
)
def test_a_timeout_of_serve_reaches_the_server(option: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = option.removeprefix("--").replace("-", "_")
    served: list[Any] = []
    monkeypatch.setattr(
        "minifloat.serve.server.start.serve_checkpoint", lambda _, settings, *__, **___: served.append(settings)
    )
    assert run("serve", tmp_path, option, "7.5").exit_code == 0
    (settings,) = served
    assert settings == replace(ServerSettings(settings.model_name), **{name: 7.5})


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], EngineOptions()),
        (["--speculate"], EngineOptions(speculate="self")),
        (["--speculate", "--draft-tokens", "3"], EngineOptions(speculate="self", draft_tokens=3)),
        (["--speculate", "prompt", "--no-prefix-cache"], EngineOptions(speculate="prompt", prefix_cache=False)),
    ],
    ids=str,
)
def test_the_options_of_serve_reach_the_engine(
    arguments: list[str], options: EngineOptions, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("minifloat.serve.server.start.serve_checkpoint", lambda *given, **__: served.append(given[2]))
    assert run("serve", tmp_path, *arguments).exit_code == 0
    assert served == [options]


def test_compare_writes_a_report_and_the_cards_of_candidates(llama_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20)
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        assert run("quantize", llama_folder, out, "-q", "--scheme", "fp8-dynamic").exit_code == 0
    report = tmp_path / "compare.html"
    options = ("--data", text, "--window", "32", "--prompts", "0", "--variants", "--report", report, "--update-card")
    result = run("compare", llama_folder, *outs, *options, "--max-kl", "1e-9")
    assert result.exit_code == 1, result.output
    page = report.read_text(encoding="utf-8")
    assert "first" in page
    assert "second" in page
    cards = [(out / "README.md").read_text(encoding="utf-8") for out in outs]
    assert all("weights only" in card and "failed" in card.lower() for card in cards)
    assert str(outs[1]) not in cards[0]
    assert run("compare", llama_folder, outs[0], *options, "--max-kl", "1e-9").exit_code == 1
    assert (outs[0] / "README.md").read_text(encoding="utf-8").count("minifloat compare: begin") == 1
    refused = run("compare", llama_folder, outs[0], "--report", tmp_path / "absent" / "x.html")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
