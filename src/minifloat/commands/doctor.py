"""The command `doctor`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import click

from minifloat.commands.options import json_option, show


@click.command()
@json_option()
def doctor(as_json: bool) -> None:
    """Show what this machine and installation have, what is missing and what it costs, and what suits it.

    Processor and kernels, GPUs, memory, disk, threads and limits, versions, extras, engines. The last line is "all
    good", or what to do.
    """
    from minifloat.deploy.diagnosis import doctor as examine
    from minifloat.deploy.diagnosis import document

    diagnosis = examine()
    show(diagnosis, document, as_json=as_json)
