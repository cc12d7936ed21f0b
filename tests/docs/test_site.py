"""The site of docs/: every page is in its menu, every public name in its reference, and it builds where MkDocs is."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

import minifloat
from minifloat.commands.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


def _menu(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    inner = entries.values() if isinstance(entries, dict) else entries
    return [name for entry in inner for name in _menu(entry)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_menu() -> None:
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(_menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) == pages | {
        "commands.md",
        "contributing.md",
    }


def test_the_tables_of_options_name_every_option_of_every_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from _option_tables import option_tables

    sections = dict(section.split("\n", 1) for section in option_tables().split("\n## minifloat ")[1:])
    assert list(sections) == list(COMMANDS)
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.opts[0] in sections[name], (name, option.opts)


def test_every_public_name_is_in_the_reference() -> None:
    listed = re.findall(r"^::: minifloat\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(minifloat.__all__) - {"__version__"})


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the extra docs: ./scripts/docs installs it"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert (tmp_path / "site" / "contributing" / "index.html").exists()
