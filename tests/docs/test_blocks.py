"""Every block of commands or code in README.md, CONTRIBUTING.md and docs/ runs, and its output is that of the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from doc_blocks import ROOT, RUN, Block, blocks, coverage_table, pages
from doc_session import Session, failure
from modes import full, is_full


def _cases() -> list[object]:
    """The pages that have something to run; those where all of it needs --full, only with it."""
    cases = []
    for page in pages():
        found = [block for block in blocks(page) if block.language in RUN and not block.not_run]
        if found:
            everyday = any(not block.full for block in found)
            cases.append(pytest.param(page, id=page.name) if everyday else full(page))
    return cases


@pytest.mark.skipif(sys.platform == "win32", reason="the commands are those of a Unix shell")
@pytest.mark.parametrize("page", _cases())
def test_blocks_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    failures = []
    with Session(tmp_path) as session:
        for block in blocks(page):
            runs = block.printed or (block.language in RUN and not block.not_run)
            if runs and (is_full() or not block.full):
                problem = failure(session, block)
                if problem:
                    failures.append(f"{page.name}:{block.line}\n{problem}")
    assert not failures, "\n\n" + "\n\n".join(failures)


def test_what_is_not_run_is_counted() -> None:
    assert coverage_table() in (ROOT / "docs" / "tests.md").read_text(), coverage_table()


@pytest.mark.parametrize("page", [page for page in pages() if page.name != "results.md"], ids=lambda page: page.name)
def test_blocks_are_fenced(page: Path) -> None:
    """An indented block would not be found; results.md, a record of commands that were run once, may have them."""
    fenced = False
    before = ""
    indented = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and line.startswith("    ") and not before.strip():
            indented.append(f"{page.name}:{number}: {line}")
        before = line if line.strip() else before if before.startswith(("-", " ", "1")) else ""
    assert indented == []


def _block(tmp_path: Path, text: str) -> Block:
    page = tmp_path / "page.md"
    page.write_text(text)
    (block,) = blocks(page)
    return block


def test_a_false_output_is_found(tmp_path: Path) -> None:
    block = _block(tmp_path, "```console\n$ echo 28 quantized, 1.59 MiB\n28 quantized, 1.90 MiB\n```\n")
    (tmp_path / "folder").mkdir()
    with Session(tmp_path / "folder") as session:
        assert "the page shows\n    28 quantized, 1.90 MiB" in str(failure(session, block))


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    block = _block(tmp_path, "```bash\nfalse    # a comment\n```\n")
    (tmp_path / "folder").mkdir()
    with Session(tmp_path / "folder") as session:
        assert str(failure(session, block)).startswith("$ false\nended with status 1")


def test_a_usage_error_of_minifloat_is_found(tmp_path: Path) -> None:
    block = _block(tmp_path, "```bash\nminifloat quantize --no-such-option\n```\n")
    (tmp_path / "folder").mkdir()
    with Session(tmp_path / "folder") as session:
        assert "no such option" in str(failure(session, block))


def test_a_false_print_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('PASSED')\n```\n\n<!-- test: printed -->\n```text\nFAILED\n```\n")
    code, shown = blocks(page)
    (tmp_path / "folder").mkdir()
    with Session(tmp_path / "folder") as session:
        assert failure(session, code) is None
        assert "the page shows\n    FAILED" in str(failure(session, shown))


def test_python_that_raises_is_found(tmp_path: Path) -> None:
    block = _block(tmp_path, "```python\nassert 1 == 2, 'not so'\n```\n")
    (tmp_path / "folder").mkdir()
    with Session(tmp_path / "folder") as session:
        assert "AssertionError: not so" in str(failure(session, block))
