"""The command line: the group of commands and its error handling."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

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
    "serve": "Serve a checkpoint behind OpenAI's and Anthropic's APIs.",
    "bench": "Measure the memory and latency that a quantized checkpoint gains.",
    "report": "Show the results of quantize, compare and bench on a checkpoint.",
    "chat": "Talk to a server in the terminal.",
    "push": "Upload a checkpoint to the hub.",
    "completion": "Print the script that completes commands in a shell.",
    "doctor": "Examine this machine: kernels, memory, engines, what to do.",
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS and not ctx.resilient_parsing:
            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            names = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {args[0]!r}; {names}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _one_line_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _one_line_errors():
                return super().invoke(ctx)
        except MinifloatError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"minifloat: error: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("\nminifloat: interrupted", err=True)
            sys.exit(130)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Print a mistake in the command line as one line, in place of click's four, and exit with its status."""
    try:
        yield
    except NoArgsIsHelpError:
        raise  # is shown as the help
    except click.ClickException as error:
        click.echo(f"minifloat: error: {_one_line(error)}", err=True)
        sys.exit(error.exit_code)


def _one_line(error: click.ClickException) -> str:
    """Return the message of a mistake in the command line, with the command whose help answers it."""
    message = " ".join(error.format_message().split()).removesuffix(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None:
        return message
    command = "" if context.parent is None else f"{context.info_name} "
    return f"{message[:1].lower()}{message[1:]} (see: minifloat {command}--help)"


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="minifloat")
def main(debug: bool) -> None:
    """Quantize language models to FP8 and FP4, and prove that they are still the same models."""
    bound_spin()  # before a command imports torch
