"""Run the blocks of pages and write what the commands print into the pages.

    PYTHONPATH=src:tests/support python -m doc_update README.md docs/quickstart.md [--full]

Outputs within the tolerance of the test are left as they are. Beside lines ``...`` a line is replaced by the one with
the same words; where none has, the block is left and named. Look at the change before you commit it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import doc_matching
from doc_blocks import ROOT, RUN, Block, Step, blocks, coverage_table, pages
from doc_session import Session


def _without_numbers(line: str) -> list[str]:
    return doc_matching._words(doc_matching.normalized(line)[0]) if line.strip() else []


def renewed(step: Step, printed: str, allowed: doc_matching.Tolerance) -> tuple[str, str | None]:
    """Return the output to show for a step, and what could not be renewed."""
    shown = step.output or ""
    if doc_matching.difference(shown, printed, allowed) is None:
        return shown, None
    if shown.strip() and "error:" in printed and "error:" not in shown:
        return shown, printed
    blank = len(shown) - len(shown.rstrip("\n"))
    if "..." not in [line.strip() for line in shown.splitlines()]:
        return "\n".join(line.rstrip() for line in printed.rstrip().splitlines()) + "\n" * max(blank, 1), None
    lines, rest = [], printed.splitlines()
    for line in shown.splitlines():
        if line.strip() not in ("", "..."):
            place = next((n for n, other in enumerate(rest) if _without_numbers(other) == _without_numbers(line)), None)
            if place is None:
                return shown, f"no line like {line!r} in\n{printed}"
            line, rest = rest[place].rstrip(), rest[place + 1 :]
        lines.append(line)
    return "\n".join(lines) + "\n", None


def update(page: Path, full: bool) -> None:
    """Renew the outputs of one page."""
    text = page.read_text(encoding="utf-8")
    pieces: list[tuple[Block, str]] = []
    with tempfile.TemporaryDirectory() as folder, Session(Path(folder)) as session:
        for block in blocks(page):
            if block.printed:
                pieces.append((block, "\n".join(line.rstrip() for line in session.printed.splitlines()) + "\n"))
            if block.language not in RUN or block.not_run or (block.full and not full):
                continue
            where = f"{page.relative_to(ROOT)}:{block.line}"
            if block.language == "python":
                output, error = session.python(block.first + "\n" + block.text)
                print(f"{where}: {error or 'python, ok'}\n{output}")
                continue
            for line in block.first.splitlines():
                print(*session.run(line))
            shown = []
            for step in block.steps:
                printed, status = session.run(step.command)
                print(f"{where}: status {status}: {step.command}")
                if step.output is None:
                    if status:
                        print(printed)
                    continue
                output, problem = renewed(step, printed, doc_matching.tolerance(block.tolerance))
                if problem:
                    print(f"{where}: {problem}")
                shown.append(f"$ {step.command}\n{output}")
            if shown:
                pieces.append((block, "".join(shown).rstrip("\n") + "\n"))
    for block, new in reversed(pieces):
        start, end = block.span
        indent = " " * (len(text[:start].splitlines()[-1]) - len(text[:start].splitlines()[-1].lstrip()))
        new = "".join(f"{indent}{line}".rstrip() + "\n" for line in new.splitlines())
        text = text[:start] + new + text[end:]
    page.write_text(text, encoding="utf-8")


def update_table() -> None:
    """Renew the table of docs/tests.md."""
    page = ROOT / "docs" / "tests.md"
    text = page.read_text(encoding="utf-8")
    start = text.index("| page | run |")
    end = text.index("\n", text.index("| all |", start)) + 1
    page.write_text(text[:start] + coverage_table() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    for chosen in [Path(name).resolve() for name in names] or pages():
        update(chosen, "--full" in sys.argv)
    update_table()
