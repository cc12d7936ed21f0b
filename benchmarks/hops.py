"""Count the modules that a command enters, and the pairs of modules of which one calls the other.

    python benchmarks/hops.py

The script records every call from a function of one module of minifloat to a function of another, in all threads, while
`quantize` runs on the example model, while the engine opens that model and generates one token, and while `compare`
runs over a short text. Imports happen before and are not counted. Two packages call each other where one passes a
callback to the other; imports run in one direction only (tests/test_floors.py).
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import minifloat

ROOT = Path(minifloat.__file__).parent
MODEL = Path(__file__).parents[1] / "examples" / "storybook-4m"
TEXT = MODEL.parent / "texts" / "stories_calibration.txt"


def module_of(frame: FrameType) -> str | None:
    """Return the path of the frame's module inside the package, or None for other code."""
    try:
        return str(Path(frame.f_code.co_filename).relative_to(ROOT).with_suffix(""))
    except ValueError:
        return None


def hops(work: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Count the calls from one module of minifloat to another while `work` runs."""
    counts: Counter[tuple[str, str]] = Counter()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name == "<module>":
            return
        callee = module_of(frame)
        if callee is None or frame.f_back is None:
            return
        caller = module_of(frame.f_back)
        if caller is not None and caller != callee:
            counts[caller, callee] += 1

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return counts


def describe(name: str, counts: Counter[tuple[str, str]]) -> str:
    """Return one row of the table."""
    modules = {module for pair in counts for module in pair}
    packages = {module.split("/")[0] for module in modules}
    between = {(a.split("/")[0], b.split("/")[0]) for a, b in counts}
    between = {(a, b) for a, b in between if a != b}
    mutual = sum((b, a) in between for a, b in between) // 2
    return f"| {name} | {len(modules)} | {len(packages)} | {len(counts)} | {len(between)} | {mutual} |"


def main() -> None:
    """Print the table."""
    from minifloat import Engine, SamplingParams, compare_models, quantize_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        quantize_checkpoint(MODEL, Path(folder) / "first", "mxfp4")  # triggers the lazy imports
        rows = [describe("`quantize`", hops(lambda: quantize_checkpoint(MODEL, out, "mxfp4")))]
        engine = Engine(str(out))
        engine.generate(["Once upon a time"], SamplingParams(max_tokens=2, temperature=0.0))
        params = SamplingParams(max_tokens=1, temperature=0.0)
        rows.append(describe("one token of the engine", hops(lambda: engine.generate(["Once upon"], params))))
        rows.append(describe("opening the engine", hops(lambda: Engine(str(out)))))
        text = Path(folder) / "text.txt"
        text.write_text(TEXT.read_text()[:2000])
        arguments = (MODEL, out, [str(text)])
        compare_models(*arguments)
        rows.append(describe("`compare`", hops(lambda: compare_models(*arguments))))
    print("| work | modules | packages | pairs of modules | pairs of packages | packages that call each other |")
    print("|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
