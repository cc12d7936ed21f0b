"""Quantize the example model, compare it with BF16, let each version tell a story, and sum up.

    python examples/demo.py [OUT]

The same commands of the command line:

    minifloat quantize examples/storybook-4m OUT/mxfp4 --scheme mxfp4 --data self --calibration-samples 128
    minifloat compare  examples/storybook-4m OUT/mxfp4
    minifloat generate OUT/mxfp4 "Once upon a time"
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import minifloat
from minifloat.calibration.session import TextOptions
from minifloat.commands.display.compare import print_comparison
from minifloat.commands.display.quantize import print_quantize_report

HERE = Path(__file__).parent
MODEL = HERE / "storybook-4m"
#: FP8 is rounded to nearest; the codes of MXFP4 are chosen with text that the model writes itself.
SAMPLES = 128
DATA = {"fp8-block": None, "mxfp4": minifloat.DataOptions(["self"], TextOptions(samples=SAMPLES, seq_len=256))}
PROMPT = "Once upon a time, there was a little girl named Lily."


def heading(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text} {'=' * (100 - len(text))}\n", flush=True)


def story(model: Path) -> None:
    """Stream a continuation of the prompt."""
    print(PROMPT, end="", flush=True)
    for piece in minifloat.generate(model, PROMPT, max_new_tokens=80):
        print(piece, end="", flush=True)
    print()


def main(out: Path) -> None:
    """Run the demo, which writes its checkpoints into `out`."""
    heading("The BF16 model tells a story")
    story(MODEL)
    rows = []
    for scheme, data in DATA.items():
        options = "" if data is None else f" --data self --calibration-samples {SAMPLES}"
        heading(f"minifloat quantize storybook-4m {scheme} --scheme {scheme}{options}")
        report = minifloat.quantize_checkpoint(MODEL, out / scheme, scheme, data=data, overwrite=True)
        print_quantize_report(report, verbose=False)
        heading(f"minifloat compare storybook-4m {scheme}")
        comparison = minifloat.compare_models(MODEL, out / scheme)
        print_comparison(comparison)
        heading(f"The {scheme} model tells a story")
        story(out / scheme)
        rows.append((scheme, report, comparison.candidates[0]))
    heading("Summary")
    print(
        f"{'scheme':<10} {'weights':>10} {'smaller':>8} {'SQNR dB':>8} {'perplexity':>11} {'KL':>8} {'top-1':>7}"
        "  verdict"
    )
    baseline = rows[0][2].overall.baseline_perplexity
    source = rows[0][1].source_bytes
    print(f"{'bf16':<10} {source / 2**20:>6.2f} MiB {1:>7.2f}x {'':>8} {baseline:>11.3f} {'':>8} {'':>7}")
    for scheme, report, candidate in rows:
        overall = candidate.overall
        print(
            f"{scheme:<10} {report.output_bytes / 2**20:>6.2f} MiB {source / report.output_bytes:>7.2f}x "
            f"{report.total.sqnr_db:>8.2f} {overall.candidate_perplexity:>11.3f} {overall.kl_mean.value:>8.5f} "
            f"{overall.same_top1.value:>7.2%}  {candidate.verdict.outcome.name}"
        )
    print(f"\nThe checkpoints are in {out}; each has a README.md (model card) and minifloat.json (every tensor).")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "minifloat-demo"
    if len(sys.argv) == 1:
        shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    main(target)
