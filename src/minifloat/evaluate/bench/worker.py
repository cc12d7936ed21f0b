"""A worker process with one engine, which runs batches on request.

Each engine has a process of its own, because peak memory is known only per process, and because a second engine would
reuse memory that the first left in the allocators. The process reads JSON from its input, one object per line: first
the options of the engine, then batches. It answers each line with one line, and ends with its input.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from minifloat.errors import MinifloatError
from minifloat.evaluate.bench.workload import BatchTimings, run_batch
from minifloat.kernels.processors import bound_spin

_COMMAND = f"from {__name__} import main; main()"
_STATUS = Path("/proc/self/status")


class Worker:
    """An engine in a process of its own. A context manager."""

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any], threads: int | None) -> None:
        self.path = Path(path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            self.info = self._ask({"path": str(path), "options": dict(options), "threads": threads})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, prompts: Sequence[Sequence[int]], output_len: int) -> BatchTimings:
        """Run prompts together, as `run_batch` does, and return their times."""
        return BatchTimings.from_dict(
            self._ask({"prompts": [list(prompt) for prompt in prompts], "output_len": output_len})
        )

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    def state(self) -> dict[str, Any]:
        """Return the state of the process."""
        answer: dict[str, Any] = self._ask({})
        return answer

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()
        self._process.wait()

    def _ask(self, question: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        line = ""
        try:
            stdin.write(json.dumps(question) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            pass  # the process ended; the empty line is handled below
        if not line:
            status = self._process.wait()
            raise MinifloatError(
                f"{self.path}: the process of its engine ended with status {status}"
                + ("; the system was short of memory" if status == -9 else "")
            )
        answer = json.loads(line)
        if "error" in answer:
            raise MinifloatError(answer["error"])
        return answer["answer"]


def peak_rss() -> int:
    """Return the peak resident memory of this process in bytes.

    On Linux `ru_maxrss` includes the memory of the parent before `exec`; the status file does not.
    """
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def main() -> None:
    """Answer requests until the input ends."""
    bound_spin()  # before torch
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print: keep their output apart from the answers

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    first = json.loads(sys.stdin.readline())
    try:
        engine = _create_engine(**first)
    except MinifloatError as error:
        answer({"error": str(error)})
        return
    answer({"answer": engine.info.to_dict()})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer({"answer": run_batch(engine, **question).to_dict() if question else _state(engine)})
        except MinifloatError as error:
            answer({"error": str(error)})


def _create_engine(path: str, options: dict[str, Any], threads: int | None) -> Any:
    from minifloat.engine import Engine, EngineOptions
    from minifloat.kernels.threads import set_threads

    if threads is not None:
        set_threads(threads)
    return Engine(path, EngineOptions(**options))


def _state(engine: Any) -> dict[str, Any]:
    import psutil

    speculator = engine.speculator
    return {
        "rss": int(psutil.Process().memory_info().rss),
        "peak_rss": peak_rss(),
        "speculation": None if speculator is None else (speculator.stats + speculator.last).to_dict(),
    }
