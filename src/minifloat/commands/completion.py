"""The command `completion`. The script and the answers to it are click's."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_PROGRAM, _VARIABLE = "minifloat", "_MINIFLOAT_COMPLETE"


_WHERE = "\n".join(
    (
        "\b",
        "bash: minifloat completion bash >> ~/.bashrc",
        "zsh:  minifloat completion zsh >> ~/.zshrc",
        "fish: minifloat completion fish > ~/.config/fish/completions/minifloat.fish",
    )
)


@click.command(epilog=_WHERE)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that makes SHELL complete commands, options, schemes and folders."""
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # click has all three
    root = click.get_current_context().find_root().command
    click.echo(completion_class(root, {}, _PROGRAM, _VARIABLE).source())
