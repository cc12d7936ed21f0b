"""Fuzz one Python target with Atheris, in this process. `run.py` starts it.

    python fuzz/one_target.py NAME FOLDER [options of libFuzzer]

FOLDER/corpus grows by inputs that reach new branches. FOLDER/failures gets one input for each reason of failure, with
the traceback beside it; a failure does not end the process, unless it is a crash or a limit of libFuzzer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import atheris
from fuzzing.target import NAMES as NAMES
from fuzzing.target import Failure, corpus, load, outcome

_LARGEST_MESSAGE = 20_000


class _Failures:
    """A folder with one input per reason of failure.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, failure: Failure, data: bytes) -> None:
        """Keep the input, unless a shorter one failed for the same reason."""
        path = self._folder / failure.where
        if path.exists() and path.stat().st_size <= len(data):
            return
        path.write_bytes(data)
        path.with_suffix(".txt").write_text(failure.details[:_LARGEST_MESSAGE], errors="backslashreplace")
        print(f"FAILURE {failure.where}", file=sys.stderr, flush=True)


def main() -> None:
    """Fuzz until libFuzzer's time is over."""
    name, folder, *options = sys.argv[1:]
    packages = ["minifloat", "h11", "uvicorn.protocols"]
    with atheris.instrument_imports(include=packages, enable_loader_override=False):
        target = load(name)
        seeds = target.seeds()
        for data in [*seeds.values(), *corpus(name).values()]:
            outcome(target, data)  # what a target imports on first use is instrumented too
    failures = _Failures(Path(folder) / "failures")
    found = Path(folder) / "corpus"
    found.mkdir(exist_ok=True)
    for title, data in [*seeds.items(), *corpus(name).items()]:
        (found / f"seed-{title}").write_bytes(data)

    def once(data: bytes) -> None:
        failure = outcome(target, data)
        if failure is not None:
            failures.add(failure, data)

    def mutate(data: bytes, largest: int, seed: int) -> bytes:
        assert target.mutate is not None
        random = Random(seed)
        return target.mutate(data, largest, random) if data else random.choice(list(seeds.values()))[:largest]

    changes = {"custom_mutator": mutate} if target.mutate else {}
    atheris.Setup([sys.argv[0], *options, str(found)], once, internal_libfuzzer=True, **changes)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
