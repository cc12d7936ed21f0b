"""Measure perplexity, KL divergence, same top-1 and bits per weight of a model in every scheme, as a Markdown table.

    python benchmarks/schemes.py MODEL --data A.txt --data B.txt [--override 'down_proj=fp8' ...]

All schemes are compared with the BF16 model in one pass over windows of 256 tokens, with 95% intervals. Activations are
float32, quantized as each scheme declares (with `--weight-only` never quantized). `--override` is passed to `quantize`
for the schemes with groups (mx*, nv*), which need a number of columns that is a multiple of 32 or 16.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from minifloat import SCHEMES, CompareOptions, MinifloatError, QuantizeOptions, compare_models, quantize_checkpoint
from minifloat.evaluate.compare.result import CandidateResult
from minifloat.evaluate.compare.summary import Summary
from minifloat.quantize.report import QuantizeReport

FORMATS = [(name, "compressed-tensors") for name in SCHEMES] + [("fp8-block", "fp8")]


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--data", multiple=True, required=True)
@click.option("--override", "overrides", multiple=True, help="Override for schemes with groups.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-tokens", type=int)
@click.option("--weight-only", is_flag=True)
def main(
    model: Path,
    data: tuple[str, ...],
    overrides: tuple[str, ...],
    window: int,
    max_tokens: int | None,
    weight_only: bool,
) -> None:
    """Print the table for MODEL."""
    reports: list[tuple[str, str, QuantizeReport]] = []
    with tempfile.TemporaryDirectory() as folder:
        for scheme, layout in FORMATS:
            grouped = SCHEMES[scheme].weight.granularity.rows == 1 and SCHEMES[scheme].weight.granularity.cols
            out = Path(folder) / f"{scheme}-{layout}"
            try:
                report = quantize_checkpoint(
                    model, out, scheme, QuantizeOptions(layout=layout, overrides=overrides if grouped else ())
                )
            except MinifloatError as error:
                click.echo(f"{scheme} in layout {layout} is refused: {error}\n")
                continue
            reports.append((scheme, layout, report))
        options = CompareOptions(
            window=window,
            max_tokens=max_tokens,
            dtype="float32",
            weight_only=weight_only,
            prompts=0,
            lm_head="bf16",
        )
        comparison = compare_models(model, [report.destination for _, _, report in reports], data, options)
    first = comparison.candidates[0].texts
    heads = [f"{text.name}: change | KL | top-1" for text in first]
    click.echo(f"| scheme | layout | bits per weight | inputs | {' | '.join(heads)} | verdict |")
    click.echo("|---|---|---|---|" + "---|---|---|" * len(first) + "---|")
    base = [f"ppl {text.baseline_perplexity:.4f}, {text.tokens:,} tokens | | " for text in first]
    click.echo(f"| bf16 | | 16 | | {' | '.join(base)} | |")
    for (scheme, layout, report), candidate in zip(reports, comparison.candidates, strict=True):
        click.echo(f"| {scheme} | {layout} | {_bits(report):.2f} | {_row(candidate)} |")


def _bits(report: QuantizeReport) -> float:
    elements = sum(tensor.stats.elements for tensor in report.quantized if tensor.stats)
    return 8 * sum(tensor.output_bytes for tensor in report.quantized) / elements


def _row(candidate: CandidateResult) -> str:
    cells = [_cells(text) for text in candidate.texts]
    return " | ".join([candidate.model.activations, *cells, candidate.verdict.outcome.value])


def _cells(text: Summary) -> str:
    ratio, kl, top1 = text.perplexity_ratio, text.kl_mean, text.same_top1
    return (
        f"{ratio.value - 1:+.2%} [{ratio.low - 1:+.2%}, {ratio.high - 1:+.2%}] | "
        f"{kl.value:.4f} [{kl.low:.4f}, {kl.high:.4f}] | {top1.value:.2%}"
    )


if __name__ == "__main__":
    main()
