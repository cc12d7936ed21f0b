"""What a fuzz target is, and the outcome of one input."""

from __future__ import annotations

import importlib
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from minifloat.errors import MinifloatError

#: Names of the targets: modules of this package, each with a `TARGET`.
NAMES = ("headers", "configs", "recipes", "statistics", "journals", "requests", "connections", "dialogs")
CORPUS = Path(__file__).parents[1] / "corpus"


@dataclass(frozen=True)
class Target:
    """Code that reads what a stranger wrote.

    Attributes:
        run: Reads the input. It returns, or raises a `MinifloatError`; any other exception is a failure.
        seeds: Returns valid inputs, from which the fuzzer begins.
        mutate: Returns a changed input from an input, the largest size and a source of random numbers; None: bytes are
            changed without knowledge of the format.
        seconds: Processor time that one input may take.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Mapping[str, bytes]]
    seconds: float
    mutate: Callable[[bytes, int, Random], bytes] | None = None


@dataclass(frozen=True)
class Failure:
    """An input that did not pass.

    Attributes:
        where: Exception and the line that raised it: equal for inputs that fail for the same reason.
        details: The traceback.
    """

    where: str
    details: str


def load(name: str) -> Target:
    """Return the target of `NAMES` with this name."""
    assert name in NAMES, name
    target: Target = importlib.import_module(f"fuzzing.{name}").TARGET
    return target


def outcome(target: Target, data: bytes) -> Failure | None:
    """Run an input; return None if it passes."""
    began = time.process_time()
    try:
        target.run(data)
    except MinifloatError:
        pass
    except Exception as error:
        return Failure(_where(error), "".join(traceback.format_exception(error)[-40:]))
    seconds = time.process_time() - began
    if seconds > target.seconds:
        return Failure("slow", f"{seconds:.1f} s of processor time, {target.seconds:g} s are allowed")
    return None


def _where(error: Exception) -> str:
    """Return the exception and the last line of minifloat that its traceback passes through, or of the target."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/minifloat/" in frame.filename] or frames
    frame = ours[-1]
    return f"{type(error).__name__}-{Path(frame.filename).parent.name}-{Path(frame.filename).stem}-{frame.lineno}"


def corpus(name: str) -> dict[str, bytes]:
    """Return the inputs in the repository: each once failed, or reaches code that the seeds do not reach."""
    return {path.name: path.read_bytes() for path in sorted((CORPUS / name).glob("*")) if path.is_file()}
