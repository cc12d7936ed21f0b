"""Completion in shells: the script, and the answers that it asks for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from minifloat.commands.main import COMMANDS, main
from minifloat.numerics.scheme import SCHEMES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_calls_this_program_with_the_variable_of_click(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert f"_MINIFLOAT_COMPLETE={shell}_complete" in result.output


def complete(*words: str) -> list[str]:
    """Return what bash would offer for the last word."""
    environment = {
        "_MINIFLOAT_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("minifloat", *words)),
        "COMP_CWORD": str(len(words)),
    }
    code = "from minifloat.commands.main import main; main(prog_name='minifloat')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_options_choices_and_schemes_are_completed() -> None:
    assert complete("c") == [name for name in COMMANDS if name.startswith("c")]
    assert complete("quantize", "m", "o", "--dry") == ["--dry-run"]
    assert complete("serve", "m", "--engine", "v") == ["vllm"]
    for command in ("quantize", "plan", "check", "bench"):
        assert complete(command, "--scheme", "mx") == [name for name in SCHEMES if name.startswith("mx")]
