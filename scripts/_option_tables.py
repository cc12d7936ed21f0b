"""Every command with a table of its options, as Markdown: the page commands.md of the site.

python scripts/_option_tables.py          # print the page
"""

from __future__ import annotations

import click

from minifloat.commands.main import COMMANDS, main

_HEAD = """# Commands and options

Made from `minifloat COMMAND --help`. Each option of `serve` is an environment variable too: `--max-model-len` is
`MINIFLOAT_MAX_MODEL_LEN`."""


def option_tables() -> str:
    """Return the page: a section for each command, made from the command itself."""
    context = click.Context(main, info_name="minifloat")
    sections = [_HEAD]
    for name, summary in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        with click.Context(command, info_name=name, parent=context) as inner:
            rows = [_row(option, inner) for option in command.params if isinstance(option, click.Option)]
            usage = " ".join(command.collect_usage_pieces(inner))
        table = ["| option | default | meaning |", "|---|---|---|", *filter(None, rows)] if any(rows) else []
        sections.append(
            "\n".join([f"## minifloat {name}", "", summary, "", f"    minifloat {name} {usage}", "", *table])
        )
    return "\n\n".join(section.rstrip() for section in sections) + "\n"


def _row(option: click.Option, context: click.Context) -> str | None:
    record = option.get_help_record(context)
    if option.hidden or record is None or "--help" in option.opts:
        return None
    names, meaning = record
    default = option.get_help_extra(context).get("default", "")
    meaning = meaning.replace(f"  [default: {default}]", "").replace(f"default: {default}; ", "")
    cells = (f"`{names}`", f"`{default}`" if default else "", meaning)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    click.echo(option_tables(), nl=False)
