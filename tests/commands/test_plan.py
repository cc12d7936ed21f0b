"""`minifloat plan` prints the result of `plan_model`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from click.testing import CliRunner, Result

from minifloat.commands.main import main
from minifloat.deploy.estimate import PlanOptions, plan_model
from minifloat.deploy.estimate.model_plan import known_losses
from minifloat.numerics.scheme import SCHEMES

EXAMPLES = Path(__file__).parents[2] / "examples"
STORYBOOK, LLAMA = EXAMPLES / "storybook-4m", EXAMPLES / "llama-70b"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *(str(argument) for argument in arguments)])


def test_every_scheme_has_a_row_in_every_table() -> None:
    output = run(STORYBOOK, "--hardware", "h100", "--gpus", "2").output
    for name, tables in (("bf16", 2), *((name, 3) for name in SCHEMES)):  # bf16 loses nothing
        assert sum(line.split()[:1] == [name] for line in output.splitlines()) == tables
    assert "minifloat serve OUT --engine vllm --tensor-parallel-size 2" in output


def test_the_json_is_the_result_of_plan_model() -> None:
    result = run(STORYBOOK, "--scheme", "mxfp4", "--bandwidth", "35", "--peak", "0.5", "--json")
    planned = plan_model(STORYBOOK, "mxfp4", options=PlanOptions(bandwidth=35, peak=0.5)).to_dict()
    assert json.loads(result.stdout) == json.loads(json.dumps(planned))


def test_the_printed_serve_command_is_valid() -> None:
    plan = plan_model(STORYBOOK, "fp8-block", "h100", PlanOptions(gpus=2, kv_cache_dtype="fp8"))
    command = shlex.split(plan.schemes[-1].commands[-1])
    assert command[0] == "minifloat"
    result = CliRunner().invoke(main, [*command[1:2], "--print-command", *command[2:]])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("vllm serve OUT --host ")
    assert result.output.endswith("--kv-cache-dtype fp8 --gpu-memory-utilization 0.9\n")


def test_a_model_that_does_not_fit_is_reported() -> None:
    big = run(STORYBOOK, "--hardware", "rtx4090", "--batch", "100000")
    assert "Nothing fits, and no number of devices up to 64 that can share this model holds it" in big.output
    assert big.exit_code == 0


def test_where_nothing_fits_the_number_of_devices_is_said() -> None:
    output = run(LLAMA, "--hardware", "rtx4090").output
    by_number = {
        number: [
            scheme.scheme for scheme in plan_model(LLAMA, hardware="rtx4090").schemes if scheme.needed_gpus == number
        ]
        for number in (2, 4, 8)
    }
    assert by_number[8] == ["bf16"]
    assert f"Nothing fits. It takes 2 devices (--gpus 2) for {', '.join(by_number[2])}, 4 devices" in output
    assert "8 devices (--gpus 8) for bf16; or a shorter context" in output
    on_two = run(LLAMA, "--hardware", "rtx4090", "--gpus", "2").output
    assert f"Fastest of what fits, at the bound: {by_number[2][0]}" in on_two


def test_the_recommended_scheme_comes_with_its_measured_loss_and_with_what_loses_less() -> None:
    output = run(LLAMA, "--hardware", "h100", "--gpus", "2", "--batch", "32").output
    fast, least = (known_losses(scheme)[0] for scheme in ("mxfp4", "fp8"))
    said = "(on SmolLM2-135M: perplexity {:+.2%} ["
    assert f"Fastest of what fits, at the bound: mxfp4 {said.format(fast.ppl_increase.value)}" in output
    assert f"], KL {fast.kl.value:.4f} [{fast.kl.low:.4f}, " in output
    assert f"Least loss of what fits: fp8 {said.format(least.ppl_increase.value)}" in output
    assert "a decode step takes 1.39 x as long" in output
    assert "`minifloat compare` measures it" in output


def test_what_was_not_measured_says_so() -> None:
    output = run(LLAMA, "--scheme", "fp8-static", "--hardware", "h100").output
    (row,) = [line for line in output.splitlines() if line.startswith("fp8-static") and "measured" in line]
    assert row.split()[-4:] == ["not", "measured"] * 2


def test_unknown_hardware_is_one_line_and_status_2() -> None:
    result = run(STORYBOOK, "--hardware", "h300")
    assert result.exit_code == 2
    assert "valid: cpu, a100-40" in result.stderr
