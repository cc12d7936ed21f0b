"""A process with one engine, which runs batches of prompts on request, and the times that the engine reports of them.

Each engine has a process of its own, because peak memory is known only per process, and because a second engine would
reuse memory that the first left in the allocators. The process answers each line of its input, a JSON object, with a
line: first the options of the engine, then batches.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from minifloat.errors import MinifloatError
from minifloat.kernels.processors import TeamOptions, bound_spin
from minifloat.report.json_values import from_values

if TYPE_CHECKING:
    from minifloat.engine import Engine, StepStats, Timings, TokenUsage

_COMMAND = f"from {__name__} import main; main()"
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class EngineStep:
    prompt_tokens: int
    generation_tokens: int
    seconds: float
    draft_tokens: int = 0


@dataclass
class BatchTimings:
    """Times of one batch in seconds, from its arrival to its last token; an observer that the engine reports to."""

    seconds: float = 0.0
    steps: list[EngineStep] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    tpots: list[float] = field(default_factory=list)
    e2els: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    failed: int = 0

    def step(self, stats: StepStats) -> None:
        drafts = 0 if stats.speculation is None else stats.speculation.draft_tokens
        self.steps.append(EngineStep(stats.prompt_tokens, stats.generation_tokens, stats.seconds, drafts))

    def token(self, since_previous: float) -> None:
        self.itls.append(since_previous)

    def first_token(self, seconds: float) -> None:
        self.ttfts.append(seconds)

    def finished(self, reason: str, timings: Timings, usage: TokenUsage) -> None:
        if reason != "length" or timings.finished is None or timings.first_token is None:
            self.failed += 1
            return
        self.input_tokens += usage.prompt_tokens
        self.output_tokens += usage.completion_tokens
        self.e2els.append(timings.finished - timings.arrived)
        self.tpots.append((timings.finished - timings.first_token) / max(usage.completion_tokens - 1, 1))


def run_batch(engine: Engine, prompts: Sequence[Sequence[int]], output_len: int) -> BatchTimings:
    """Run prompts together on an otherwise idle engine, and return their times."""
    from minifloat.engine import SamplingParams

    timings = BatchTimings()
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    before, engine.observer = engine.observer, timings
    try:
        completions = engine.generate(prompts, params)
    finally:
        engine.observer = before
    if timings.failed:
        raise RuntimeError(f"{timings.failed} of {len(prompts)} requests did not run to their end")
    finished = [entry.timings.finished for entry in completions if entry.timings.finished is not None]
    timings.seconds = max(finished) - min(entry.timings.arrived for entry in completions)
    return timings


class Worker:
    """An engine in a process of its own. A context manager."""

    def __init__(self, path: str | os.PathLike[str], options: Mapping[str, Any], team: TeamOptions) -> None:
        self.path = Path(path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            values = {"threads": team.threads, "numa": team.numa}
            self.info = self._ask({"path": str(path), "options": dict(options), "team": values})
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
        question = {"prompts": [list(prompt) for prompt in prompts], "output_len": output_len}
        return from_values(BatchTimings, self._ask(question))

    @property
    def process_id(self) -> int:
        return self._process.pid

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._ask({})
        return answer

    def close(self) -> None:
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
    """Return the peak resident memory of this process in bytes."""
    if _STATUS.exists():  # on Linux `ru_maxrss` includes the memory of the parent before `exec`
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def main() -> None:
    bound_spin()  # before torch
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print: keep their output apart from the answers

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    from minifloat.engine import Engine, EngineOptions
    from minifloat.kernels.threads import set_up

    first = json.loads(sys.stdin.readline())
    try:
        set_up(TeamOptions(**first["team"]))
        engine = Engine(first["path"], EngineOptions(**first["options"]))
    except MinifloatError as error:
        answer({"error": str(error)})
        return
    answer({"answer": engine.info.to_dict()})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer({"answer": asdict(run_batch(engine, **question)) if question else _state(engine)})
        except MinifloatError as error:
            answer({"error": str(error)})


def _state(engine: Any) -> dict[str, Any]:
    import psutil

    speculator = engine.speculator
    return {
        "rss": int(psutil.Process().memory_info().rss),
        "peak_rss": peak_rss(),
        "speculation": None if speculator is None else (speculator.stats + speculator.last).to_dict(),
    }
