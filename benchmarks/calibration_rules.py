"""Measure the perplexity of fp8-static under simulated W8A8 for each calibration rule, in domain and out of domain.

    python benchmarks/calibration_rules.py MODEL --data stories.txt --data gsm8k.jsonl#column=question \
        --text stories_eval.txt --text prose.txt

The model is calibrated once per data set, with histograms; every rule computes its scales from the same statistics. The
saturated fraction is the largest of all modules, on text held out from the same data set. The row `weight-only` is the
best result that any activation scale could reach.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from minifloat import CompareOptions, compare_models, quantize_checkpoint
from minifloat.calibration.calibrate import calibrate
from minifloat.calibration.options import CalibrateOptions
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import parse_rule
from minifloat.evaluate.compare.summary import Summary

RULES = ("max", "percentile:percentile=99.99", "mse")


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--data", "sources", multiple=True, required=True)
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--samples", default=128, show_default=True)
@click.option("--seq-len", default=256, show_default=True)
@click.option("--max-tokens", default=8000, show_default=True)
def main(
    model: Path, sources: tuple[str, ...], texts: tuple[Path, ...], samples: int, seq_len: int, max_tokens: int
) -> None:
    """Print the table for MODEL."""
    click.echo(
        f"| calibrated on | rule | worst saturated | {' | '.join(f'{text.stem}: ppl | change' for text in texts)} |"
    )
    click.echo("|---|---|---|" + "---|---|" * len(texts))
    floor_shown = False
    for source in sources:
        collected = calibrate(model, [source], CalibrateOptions(samples, seq_len, histogram=True))
        for rule in RULES:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "out"
                calibration = Calibration(collected.stats, parse_rule(rule), collected.held_out)
                report = quantize_checkpoint(model, out, "fp8-static", calibration=calibration)
                if not floor_shown:
                    weights = CompareOptions(max_tokens=max_tokens, weight_only=True, prompts=0)
                    (floor,) = compare_models(model, out, texts, weights).candidates
                    base = [f"{text.baseline_perplexity:.3f} | " for text in floor.texts]
                    click.echo(f"| | BF16 | | {' | '.join(base)} |")
                    click.echo(f"| | weight-only | | {' | '.join(_cells(floor.texts))} |")
                    floor_shown = True
                comparison = compare_models(model, out, texts, CompareOptions(max_tokens=max_tokens, prompts=0))
            saturated = max(activation.saturated or 0.0 for activation in report.activations)
            name = Path(source.partition("#")[0]).name
            click.echo(f"| {name} | {rule} | {saturated:.1e} | {' | '.join(_cells(comparison.candidates[0].texts))} |")


def _cells(summaries: Sequence[Summary]) -> list[str]:
    return [f"{text.candidate_perplexity:.3f} | {text.perplexity_ratio.value - 1:+.2%}" for text in summaries]


if __name__ == "__main__":
    main()
