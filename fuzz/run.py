"""Fuzz every target for a while, and print what ran and what failed.

    ./scripts/fuzz 60                        # minutes, shared by all targets
    ./scripts/fuzz 5 --only headers,native

Python targets run under Atheris, guided by the branches of minifloat that an input reaches. The target `native` is a
program with libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer around the C functions. build/fuzz/NAME holds
the corpus that grew, which the next run continues, and `failures`. To mend a failure: copy its input to
fuzz/corpus/NAME, where tests/fuzz replays it, and make that test pass. The exit status is 1 if anything failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from fuzzing.target import NAMES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "fuzz"
NATIVE = "native"
#: Largest input in bytes, seconds after which an input counts as a hang, and megabytes of memory of a process. Targets
#: limit the processor time of an input themselves.
LIMITS = {"max_len": 16384, "timeout": 300, "rss_limit_mb": 6144}
_STATUS = re.compile(r"^#\d+\s+\w+\s+cov: (\d+) .*?corp: (\d+)", re.MULTILINE)


@dataclass
class Result:
    """What a target did.

    Attributes:
        target: Its name.
        seconds: Time that it ran.
        executions: Number of inputs.
        covered: Branches of the code under test that inputs reached.
        corpus: Inputs that reach different branches.
        failures: Names of the files of inputs that failed.
    """

    target: str
    seconds: float = 0.0
    executions: int = 0
    covered: int = 0
    corpus: int = 0
    failures: tuple[str, ...] = ()


def fuzz(target: str, seconds: float, program: Path | None) -> Result:
    """Fuzz a target for some seconds; a process that a failure ended is started again."""
    folder = FOLDER / target
    (folder / "failures").mkdir(parents=True, exist_ok=True)
    for old in (folder / "failures").iterdir():
        old.unlink()
    result = Result(target)
    began = time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 1:
        log = folder / "log.txt"
        _start(target, folder, int(left), program, log)
        _add(result, log.read_text(errors="replace"))
    result.seconds = time.monotonic() - began
    found = (path.name for path in (folder / "failures").iterdir() if path.suffix != ".txt")
    result.failures = tuple(sorted(found))
    return result


def _start(target: str, folder: Path, seconds: int, program: Path | None, log: Path) -> None:
    """Run the process of a target until its time is over, or an input ends it."""
    limits = [f"-{name}={value}" for name, value in LIMITS.items()]
    options = [f"-max_total_time={seconds}", *limits, f"-artifact_prefix={folder / 'failures'}{os.sep}"]
    options += ["-print_final_stats=1", "-detect_leaks=0", "-report_slow_units=1000000"]
    if program is not None:
        (folder / "corpus").mkdir(exist_ok=True)
        seeds = ROOT / "fuzz" / "corpus" / target
        command = [str(program), *options, str(folder / "corpus"), str(seeds)]
    else:
        command = [sys.executable, str(ROOT / "fuzz" / "one_target.py"), target, str(folder), *options]
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as scratch, open(log, "wb") as file:
        environment = os.environ | {"TMPDIR": scratch, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["UBSAN_OPTIONS"] = "print_stacktrace=1:halt_on_error=1"
        done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT)
    text = log.read_text(errors="replace")
    if "Done " not in text and "artifact_prefix" not in text and "Test unit written" not in text:
        raise SystemExit(f"{target} ended with status {done.returncode} before it began:\n{text[-3000:]}")


def _add(result: Result, log: str) -> None:
    """Add the figures of libFuzzer's log."""
    runs = re.findall(r"stat::number_of_executed_units:\s+(\d+)", log)
    result.executions += int(runs[-1]) if runs else max(map(int, re.findall(r"^#(\d+)", log, re.MULTILINE)), default=0)
    for covered, corpus in _STATUS.findall(log):
        result.covered, result.corpus = max(result.covered, int(covered)), int(corpus)


@click.command()
@click.argument("minutes", type=float)
@click.option("--only", help="Names of targets, with commas between.")
@click.option("--native", "program", type=click.Path(exists=True, path_type=Path), help="Program of the native target.")
def main(minutes: float, only: str | None, program: Path | None) -> None:
    """Fuzz for MINUTES."""
    names = only.split(",") if only else [*NAMES, *([NATIVE] if program else [])]
    if unknown := set(names) - {*NAMES, NATIVE}:
        raise click.BadParameter(f"no target {', '.join(sorted(unknown))}; there are {', '.join((*NAMES, NATIVE))}")
    if NATIVE in names and program is None:
        raise click.BadParameter("the target `native` needs its program: --native")
    results = []
    for name in names:
        result = fuzz(name, minutes * 60 / len(names), program if name == NATIVE else None)
        results.append(result)
        click.echo(
            f"{name:<12} {result.executions:>11,} inputs in {result.seconds:>6.0f} s, {result.covered:>6,} branches, "
            f"corpus {result.corpus:>5,}, failures {len(result.failures)}"
        )
        for failure in result.failures:
            click.echo(f"  {FOLDER.relative_to(ROOT) / name / 'failures' / failure}")
    (FOLDER / "results.json").write_text(json.dumps([asdict(result) for result in results], indent=1))
    if any(result.failures for result in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
