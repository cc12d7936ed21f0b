"""Hooks of mkdocs.yml: CONTRIBUTING.md and the commands' options become pages; links to source code become plain text.

The documents are read in the repository too, where these links lead to the files; the site has no copy of them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_LINK_OUT = re.compile(r"\[([^\]]+)\]\(\.\./(?!CONTRIBUTING\.md)[^)]+\)")


def on_files(files: Files, config: Any) -> Files:
    """Add CONTRIBUTING.md, with its links seen from docs/, and the tables of options."""
    with open("CONTRIBUTING.md", encoding="utf-8") as file:
        text = file.read().replace("](docs/", "](")
    files.append(File.generated(config, "contributing.md", content=text))
    sys.path.insert(0, str(Path(__file__).parent))
    from _option_tables import option_tables

    files.append(File.generated(config, "commands.md", content=option_tables()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links that leave docs/."""
    return _LINK_OUT.sub(r"\1", markdown).replace("](../CONTRIBUTING.md", "](contributing.md")
