"""Measure everything on a GPU in one command: limits, correctness, products, peers, a whole model, quantizers.

    PYTHONPATH=src python benchmarks/gpu.py --out DIR [--minutes 9] [--only products,model]
    PYTHONPATH=src python benchmarks/gpu.py --out DIR --dry-run     # the same code on the CPU, tiny: no measurement

Each result is appended to DIR/gpu.jsonl at once, and the tables of DIR/gpu.md are rewritten after each section. The
most important sections run first and each has a share of the minutes, so that a run that is cut off keeps its results.
Products are CUDA graphs over copies of a weight, 256 MB or more of them, so that the weights are read from memory;
times are medians of at least 20 samples. Ratios are to torch BF16 in the same run; each row also has its share of the
measured read bandwidth and of the peak rate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
from gpu_run import Run

from minifloat.errors import UsageError


def sections() -> dict[str, tuple[Callable[[Run], None], float]]:
    """Return the sections in the order in which they run: name -> function, and its share of all minutes."""
    import gpu_ceilings
    import gpu_checks
    import gpu_model
    import gpu_products
    import gpu_quantizers

    return {
        "environment": (gpu_ceilings.environment, 0.02),
        "ceilings": (gpu_ceilings.ceilings, 0.05),
        "checks": (gpu_checks.checks, 0.1),
        "products": (gpu_products.few_rows, 0.3),
        "quantizers": (gpu_quantizers.quantizers, 0.05),
        "model": (gpu_model.model, 0.3),
        "more-rows": (gpu_products.more_rows, 0.2),
        "peers": (gpu_products.peers, 0.15),
        "tests": (gpu_checks.tests, 0.2),
    }


@click.command(help=__doc__.split("\n")[0])
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for the results.")
@click.option("--minutes", default=9.0, show_default=True, help="Time limit of all sections together.")
@click.option("--only", help="Sections, separated by commas.  [default: all]")
@click.option("--dry-run", is_flag=True, help="Run every section on the CPU with tiny sizes, without measuring.")
def main(out: Path, minutes: float, only: str | None, dry_run: bool) -> None:
    """Run the sections and write gpu.jsonl and gpu.md."""
    import torch
    from gpu_report import write_report

    available = sections()
    chosen = list(available) if only is None else only.split(",")
    unknown = [name for name in chosen if name not in available]
    if unknown:
        raise UsageError(f"unknown section {unknown[0]!r}; there are: {', '.join(available)}")
    if not dry_run and not torch.cuda.is_available():
        raise UsageError("no CUDA device; --dry-run goes through everything on the CPU")
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.jsonl").unlink(missing_ok=True)
    run = Run(out, minutes, dry_run)
    command = " ".join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    for name, (work, share) in available.items():
        if name not in chosen:
            continue
        run.until = time.monotonic() + share * minutes * 60
        if run.left <= 0:
            run.log(name, failed="no time left")
        else:
            with run.attempt(name, "the section"):
                work(run)
        report = write_report(out, command)
    click.echo(f"{report}")


if __name__ == "__main__":
    try:
        main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except UsageError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
