"""The command line: the group of commands and its error handling.

Each command parses its options, calls one public function and prints the result. A command imports its modules when
it runs, so `--help` loads neither torch nor rich. A user's mistake is one line on standard error and exit status 2
(`--debug` shows the traceback); Ctrl-C is 130.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from minifloat._version import __version__
from minifloat.commands.bench import bench
from minifloat.commands.calibrate import calibrate
from minifloat.commands.chat import chat
from minifloat.commands.check import check
from minifloat.commands.compare import compare
from minifloat.commands.convert import convert
from minifloat.commands.doctor import doctor
from minifloat.commands.generate import generate
from minifloat.commands.inspect import inspect
from minifloat.commands.plan import plan
from minifloat.commands.push import push
from minifloat.commands.quantize import quantize
from minifloat.commands.serve import serve
from minifloat.errors import MinifloatError
from minifloat.kernels.processors import bound_spin


class _Commands(click.Group):
    """A group that prints minifloat's errors as one line and lists the commands in the order of registration."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

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


# In the order of use, which `--help` keeps.
for _command in (
    quantize,
    calibrate,
    inspect,
    plan,
    convert,
    check,
    compare,
    generate,
    serve,
    bench,
    chat,
    push,
    doctor,
):
    main.add_command(_command)
