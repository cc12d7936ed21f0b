"""`minifloat plan` prints what `plan_model` answers."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from minifloat.cli import main
from minifloat.plan import plan_model
from minifloat.scheme import SCHEMES

STORYBOOK = Path(__file__).parents[1] / "examples" / "storybook-4m"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *(str(argument) for argument in arguments)])


def test_every_scheme_has_a_row_in_both_tables() -> None:
    output = run(STORYBOOK, "--hardware", "h100", "--gpus", "2").output
    for name in ("bf16", *SCHEMES):
        assert sum(line.split()[:1] == [name] for line in output.splitlines()) == 2
    assert "vllm serve OUT --tensor-parallel-size 2" in output


def test_the_json_is_that_of_the_function() -> None:
    result = run(STORYBOOK, "--scheme", "mxfp4", "--bandwidth", "35", "--json")
    planned = plan_model(STORYBOOK, "mxfp4", bandwidth=35e9).to_dict()
    assert json.loads(result.stdout) == json.loads(json.dumps(planned))


def test_what_does_not_fit_is_said() -> None:
    big = run(STORYBOOK, "--hardware", "rtx4090", "--batch", "100000")
    assert "Nothing fits" in big.output
    assert big.exit_code == 0


def test_unknown_hardware_is_one_line_and_status_2() -> None:
    result = run(STORYBOOK, "--hardware", "h300")
    assert result.exit_code == 2
    assert "valid: cpu, a100-40" in result.stderr
