"""The matrix of architectures: ./scripts/architectures runs it.

    ./scripts/architectures                       every architecture, four schemes
    ./scripts/architectures --only llama,gemma3   some of them
    ./scripts/architectures --write               and write docs/architectures.md

The exit status is 1 where a cell is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parent)]

from cases import all_cases  # noqa: E402
from page import write_page  # noqa: E402
from row import Row, run_rows  # noqa: E402

_PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"


def main() -> int:
    """Run the matrix and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="run some rows")
    parser.add_argument("--schemes", default="fp8-block,mxfp8,mxfp4,nvfp4", metavar="NAME,...")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the checkpoints and the output of the rows")
    parser.add_argument("--write", action="store_true", help=f"write {_PAGE.name}")
    parser.add_argument("--all", action="store_true", dest="show_all", help="print every cell, not only the wrong ones")
    arguments = parser.parse_args()
    cases = all_cases()
    if arguments.only:
        names = arguments.only.split(",")
        unknown = set(names) - {case.name for case in cases}
        if unknown:
            parser.error(f"no row has the name {', '.join(sorted(unknown))}")
        cases = [case for case in cases if case.name in names]
    started, rows = time.perf_counter(), []
    for row in run_rows(cases, arguments.schemes.split(","), arguments.workers, arguments.keep):
        rows.append(row)
        print(_line(row, show_all=arguments.show_all), flush=True)
    wrong = sum(bool(row.wrong) for row in rows)
    left_out = sum(bool(row.reason) for row in rows)
    print(
        f"{len(rows) - left_out} architectures, {wrong} with wrong cells; {left_out} left out; "
        f"{time.perf_counter() - started:.0f} s"
    )
    if arguments.write:
        write_page(_PAGE, sorted(rows, key=lambda row: row.name), time.perf_counter() - started, _command())
    return 1 if wrong else 0


def _command() -> str:
    return " ".join(["./scripts/architectures", *sys.argv[1:]])


def _line(row: Row, *, show_all: bool) -> str:
    if row.reason:
        return f"{row.name}: left out: {row.reason[:160]}"
    head = f"{row.name}: {'WRONG' if row.wrong else 'right'} ({row.seconds:.1f} s)"
    shown = [
        f"    {cell:24} {status:8} {detail[:200]}"
        for cell, (status, detail) in row.cells.items()
        if show_all or status in ("WRONG", "refused")
    ]
    return "\n".join([head, *shown])


if __name__ == "__main__":
    sys.exit(main())
