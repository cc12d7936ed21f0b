"""`minifloat plan` prints the result of `plan_model`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from click.testing import CliRunner, Result

from minifloat.commands.main import main
from minifloat.numerics.scheme import SCHEMES
from minifloat.plan import plan_model

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *(str(argument) for argument in arguments)])


def test_every_scheme_has_a_row_in_both_tables() -> None:
    output = run(STORYBOOK, "--hardware", "h100", "--gpus", "2").output
    for name in ("bf16", *SCHEMES):
        assert sum(line.split()[:1] == [name] for line in output.splitlines()) == 2
    assert "minifloat serve OUT --engine vllm --tensor-parallel-size 2" in output


def test_the_json_is_the_result_of_plan_model() -> None:
    result = run(STORYBOOK, "--scheme", "mxfp4", "--bandwidth", "35", "--peak", "0.5", "--json")
    planned = plan_model(STORYBOOK, "mxfp4", bandwidth=35e9, peak=0.5e12).to_dict()
    assert json.loads(result.stdout) == json.loads(json.dumps(planned))


def test_the_printed_serve_command_is_valid() -> None:
    plan = plan_model(STORYBOOK, "fp8-block", "h100", gpus=2, kv_cache_dtype="fp8")
    command = shlex.split(plan.schemes[-1].commands[-1])
    assert command[0] == "minifloat"
    result = CliRunner().invoke(main, [*command[1:2], "--print-command", *command[2:]])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("vllm serve OUT --host ")
    assert result.output.endswith("--kv-cache-dtype fp8 --gpu-memory-utilization 0.9\n")


def test_a_model_that_does_not_fit_is_reported() -> None:
    big = run(STORYBOOK, "--hardware", "rtx4090", "--batch", "100000")
    assert "Nothing fits" in big.output
    assert big.exit_code == 0


def test_unknown_hardware_is_one_line_and_status_2() -> None:
    result = run(STORYBOOK, "--hardware", "h300")
    assert result.exit_code == 2
    assert "valid: cpu, a100-40" in result.stderr
