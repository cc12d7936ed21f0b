"""The command line: the group of commands and its error handling.

The module of a command is imported when the command is used, so that `--help` and every command start fast. It parses
the options, calls one public function and prints the result. A user's mistake is one line on standard error and exit
status 2 (`--debug` shows the traceback); Ctrl-C is 130.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

from minifloat._version import __version__
from minifloat.errors import MinifloatError
from minifloat.kernels.processors import bound_spin

#: Command -> its line in `--help`, in the order of use. A command and its module have the same name.
COMMANDS = {
    "quantize": "Write a checkpoint with 8- or 4-bit weights.",
    "calibrate": "Record the amax of activations on calibration text.",
    "inspect": "Show what a checkpoint or a file of activation statistics holds.",
    "plan": "Predict memory, latency bounds and fit before anything runs.",
    "convert": "Write a quantized checkpoint in another layout, or in 16 bits.",
    "check": "Say whether an engine will load a checkpoint.",
    "compare": "Decide whether quantized checkpoints are still the same model.",
    "generate": "Continue a prompt.",
    "serve": "Serve a checkpoint behind OpenAI's API.",
    "bench": "Measure the memory and latency that a quantized checkpoint gains.",
    "chat": "Talk to a server in the terminal.",
    "push": "Upload a checkpoint to the hub.",
    "doctor": "Show versions, native kernels, and what is slower without them.",
}


class _Commands(click.Group):
    """A group that imports a command when it is used, and prints minifloat's errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"minifloat.commands.{cmd_name}"), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MinifloatError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"minifloat: error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("\nminifloat: interrupted", err=True)
            sys.exit(130)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="minifloat")
def main(debug: bool) -> None:
    """Quantize language models to FP8 and FP4, and prove that they are still the same models."""
    bound_spin()  # before a command imports torch
