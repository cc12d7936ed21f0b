"""The command `doctor`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import click


@click.command()
def doctor() -> None:
    """Show what this installation has: versions, the native kernels, and what is slower without them."""
    from minifloat.commands.display.doctor import print_diagnosis
    from minifloat.runtime.diagnosis import doctor as diagnose

    print_diagnosis(diagnose())
