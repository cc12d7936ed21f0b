"""Every link of README.md, CONTRIBUTING.md and docs/ leads to a file and, where it names one, to a heading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub and MkDocs give the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere, each with what is missing."""
    broken = []
    for link in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in _anchors(target):
            broken.append(f"{link}: no such heading")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# Here it is, at 1.1B\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md#here-it-is-at-11b) [y](b.md#there) [z](c.md)\n```\n[w](d.md)\n```\n# Own\n[v](#own)\n")
    assert broken_links(page) == ["b.md#there: no such heading", "c.md: no such file"]


def test_every_page_is_linked_from_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in PAGES[2:] if page.name != "index.md" and f"({page.name})" not in index] == []


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_source_files_that_documents_name_exist() -> None:
    places = [ROOT, ROOT / "src" / "minifloat", ROOT / "src" / "minifloat" / "kernels"]
    missing = [
        f"{page.name}: {name}"
        for page in PAGES
        for name in re.findall(r"`(\w+(?:/\w+)+\.(?:py|cpp|h))`", page.read_text(encoding="utf-8"))
        if not any((place / name).exists() for place in places)
    ]
    assert missing == []


def test_the_tests_of_threats_that_the_page_names_exist() -> None:
    named = set(re.findall(r"test_\w+\.py", (ROOT / "docs" / "serving.md").read_text()))
    assert len(named) > 5
    assert named - {path.name for path in (ROOT / "tests").rglob("test_*.py")} == set()
