"""Run twins of the most used models, of their true widths, through everything: a Markdown table.

    python benchmarks/hub_shapes.py                      # all, in fp8-block and mxfp4
    python benchmarks/hub_shapes.py --only Qwen2.5 --data self

A twin has one or two layers, a small vocabulary and at most 16 experts (`tests/support/twins.py`). Columns: what
the dry run with data, `plan` and `check` answer; seconds of `quantize` and the peak memory of its process, beside the
bytes of the largest layer; how the engine runs it, seconds to load it and of a step of 16 tokens; and the relative
error of its logits against transformers' code on the decoded weights. The largest twin takes 5 GB on the disk, and
transformers as much memory.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from hub_configs import HUB_CONFIGS
from twins import layer_bytes, quantize_twin, step_of, write_twin

from minifloat import check_checkpoint, plan_model, preview_quantization
from minifloat.errors import MinifloatError

MIB = 1 << 20
HEAD = ["model", "scheme", "dry run", "plan", "check", "quantize s", "peak MiB", "layer MiB", "runner", "load s"]
HEAD += ["step s", "error"]


def answer(ask: Callable[[], object]) -> str:
    """What a command says: a verdict, "ok", or its refusal in short."""
    try:
        value = ask()
    except MinifloatError as error:
        return f"refused: {str(error).partition(': ')[2][:90]}"
    return str(getattr(getattr(value, "verdict", None), "value", "ok"))


def row_of(name: str, scheme: str, twin: Path, out: Path, data: tuple[str, ...]) -> list[str]:
    """The row of a twin in a scheme."""
    dry = answer(lambda: preview_quantization(twin, out, scheme, calibrates=True))
    planned = answer(lambda: plan_model(twin, scheme, "h100"))
    checked = answer(lambda: check_checkpoint(twin, "minifloat:cpu", scheme=scheme))
    row = [name, scheme, dry, planned, checked]
    run = quantize_twin(twin, out, scheme, [option for source in data for option in ("--data", source)])
    if run.problem:
        return [*row, f"refused after {run.seconds:.1f} s", f"{run.peak_bytes / MIB:.0f}", *["-"] * 5]
    step = step_of(out)
    times = f"{step.load_seconds:.2f}", f"{step.step_seconds:.3f}", f"{step.error:.1e}"
    return [
        *row,
        f"{run.seconds:.1f}",
        f"{run.peak_bytes / MIB:.0f}",
        f"{layer_bytes(twin) / MIB:.0f}",
        step.runner,
        *times,
    ]


@click.command()
@click.option("--only", multiple=True, metavar="TEXT", help="Models whose names hold this; repeatable.")
@click.option("--scheme", "schemes", multiple=True, default=("fp8-block", "mxfp4"), show_default=True)
@click.option("--data", multiple=True, metavar="DATA", help="Choose codes with this text, or text of the twin: self.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where twins lie, one at a time.  [default: temporary]")
def main(only: tuple[str, ...], schemes: tuple[str, ...], data: tuple[str, ...], folder: Path | None) -> None:
    """Print the table, a row as soon as it is known."""
    click.echo("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        twin, out = Path(place) / "twin", Path(place) / "out"
        for name in (name for name in HUB_CONFIGS if not only or any(part in name for part in only)):
            write_twin(name, twin)
            for scheme in schemes:
                click.echo("| " + " | ".join(row_of(name, scheme, twin, out, data)) + " |")
                shutil.rmtree(out, ignore_errors=True)
            shutil.rmtree(twin)


if __name__ == "__main__":
    main()
