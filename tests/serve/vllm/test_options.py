"""Translation of the options of `minifloat serve` into vLLM's commands. No test starts vLLM."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from minifloat.commands.main import main
from minifloat.commands.serve import serve as serve_command
from minifloat.serve.vllm import command_text
from minifloat.serve.vllm_options import ACCEPTED, ONLY_VLLM, TRANSLATED, VllmOptions

#: Options of minifloat's engine that vLLM lacks or defines differently.
ONLY_MINIFLOAT = {
    "deterministic",
    "task",
    "allowed_hosts",
    "device",
    "draft",
    "draft_tokens",
    "lm_head",
    "activations",
    "max_body_bytes",
    "max_connections",
    "max_num_queued_reqs",
    "max_prompt_characters",
    "numa",
    "keep_alive_timeout",
    "read_timeout",
    "reasoning_format",
    "request_timeout",
    "speculate",
    "threads",
    "tool_format",
    "write_timeout",
}


def serve(*arguments: str, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, ["serve", *arguments])


def printed(*arguments: str, **environment: str) -> str:
    result = serve("a model", "--engine", "vllm", "--print-command", *arguments, **environment)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_options_that_are_not_given_are_left_to_vllm() -> None:
    assert printed() == (
        "vllm serve 'a model' --host 127.0.0.1 --port 8000 --served-model-name 'a model' --shutdown-timeout 30\n"
    )


def test_every_option_is_translated_or_refused_by_name() -> None:
    options = {parameter.name for parameter in serve_command.params if isinstance(parameter, click.Option)}
    assert options - ACCEPTED - {"print_command"} == ONLY_MINIFLOAT
    assert {*TRANSLATED, *ONLY_VLLM} <= options


@pytest.mark.parametrize(
    ("option", "translated"),
    [
        ("--dtype float16", "--dtype float16"),
        ("--max-num-seqs 64", "--max-num-seqs 64"),
        ("--max-num-batched-tokens 1024", "--max-num-batched-tokens 1024"),
        ("--kv-cache-memory 4GiB", "--kv-cache-memory-bytes 4294967296"),
        ("--kv-cache-dtype fp8", "--kv-cache-dtype fp8"),
        ("--no-prefix-cache", "--no-enable-prefix-caching"),
        ("--chat-template a.jinja", "--chat-template a.jinja"),
        ("--tensor-parallel-size 4", "--tensor-parallel-size 4"),
        ("--shutdown-timeout 1.5", "--shutdown-timeout 2"),
        ("-- --enforce-eager --seed 3", "--enforce-eager --seed 3"),
    ],
)
def test_an_option_that_was_given_is_translated(option: str, translated: str) -> None:
    words = shlex.split(printed(*option.split()))
    expected = translated.split()
    assert any(words[start : start + len(expected)] == expected for start in range(len(words))), words


def test_an_option_from_the_environment_counts_as_given() -> None:
    assert "--max-model-len 512" in printed(MINIFLOAT_MAX_MODEL_LEN="512")
    refused = serve("a model", "--engine", "vllm", "--print-command", MINIFLOAT_LM_HEAD="fp8")
    assert (refused.exit_code, "--lm-head: not with --engine vllm" in refused.output) == (2, True)


def test_vllm_python_replaces_the_vllm_command() -> None:
    line = printed("--vllm-python", "/v/bin/python")
    assert line.startswith("/v/bin/python -m vllm.entrypoints.openai.api_server --model 'a model' --host ")


def test_a_model_of_the_hub_is_fetched_by_vllm() -> None:
    result = serve("org/name@v2", "--engine", "vllm", "--print-command")
    assert result.stdout.startswith("vllm serve org/name --revision v2 --host ")
    assert "--served-model-name org/name " in result.stdout


def test_the_flags_of_several_machines_are_vllms_own() -> None:
    line = printed("--tensor-parallel-size", "16", "--api-key", "12345678", "--", "--nnodes", "2", "--node-rank", "0")
    assert line.startswith("VLLM_API_KEY=... vllm serve 'a model' --host ")
    assert line.endswith("--tensor-parallel-size 16 --nnodes 2 --node-rank 0\n")
    worker = printed("--api-key", "12345678", "--", "--nnodes", "2", "--node-rank", "1", "--headless")
    assert worker.startswith("vllm serve 'a model' ")  # without a key, which only the API needs
    assert worker.endswith("--nnodes 2 --node-rank 1 --headless\n")


def test_vllm_in_this_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    start = f"{sys.executable} -m vllm.entrypoints.openai.api_server --model 'a model' --host "
    assert printed().startswith(start)
    assert printed("--vllm-bin", "/v/bin/vllm").startswith("/v/bin/vllm serve 'a model' ")
    assert printed("--vllm-python", "/v/bin/python").startswith("/v/bin/python -m vllm.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allowed-host", "x", "--threads", "2"], "--allowed-host, --threads: not with --engine vllm"),
        (["--max-num-queued-reqs", "9"], "defines it differently"),
        (["--port", "0"], "known before it starts"),
        (["--api-key", "12345678", "--api-key", "87654321"], "one API key, got 2"),
        (["--api-key", "short"], "API key 1"),
        (["--vllm-bin", "v", "--vllm-python", "p"], "give one"),
        (["--", "--api-key=12345678"], "--api-key after --: other users see arguments"),
        (["--", "--api_key", "12345678"], "--api-key after --"),
        (["--", "--port", "9"], "--port after --: minifloat sets it already"),
        (["--dtype", "float16", "--", "--dtype=float32"], "--dtype after --: minifloat sets it already"),
        (["--", "--model", "other"], "--model after --: the argument MODEL names the model"),
    ],
)
def test_a_contradiction_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    result = serve("a model", "--engine", "vllm", "--print-command", *arguments)
    assert result.exit_code == 2, result.output
    assert result.output.startswith("minifloat: error: ")
    assert message in result.output
    assert result.output.count("\n") == 1
    assert "12345678" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [["--tensor-parallel-size", "2"], ["--print-command"], ["--hardware", "h100"], ["--", "--enforce-eager"]],
)
def test_options_of_vllm_are_refused_for_minifloats_engine(arguments: list[str]) -> None:
    result = serve("a model", *arguments)
    assert result.exit_code == 2
    refused = " ".join(argument for argument in arguments if argument.startswith("--")).removeprefix("-- ")
    assert result.output == f"minifloat: error: {refused}: only with --engine vllm\n"


def test_options_of_vllm_in_the_environment_are_ignored_for_minifloats_engine(tmp_path: Path) -> None:
    result = serve("a model", "--chat-template", str(tmp_path / "missing"), MINIFLOAT_VLLM_BIN="/v/bin/vllm")
    assert "the chat template cannot be read" in result.output
    assert printed(MINIFLOAT_VLLM_BIN="/v/bin/vllm").startswith("/v/bin/vllm serve ")


def test_the_text_of_options_and_commands_has_no_key() -> None:
    options = VllmOptions("m", api_key="a-secret-key")
    assert "a-secret-key" not in f"{options} {command_text(options)}"
