"""What every scheme costs a real model: perplexity on given texts, KL, agreement and bytes, as a Markdown table.

    python benchmarks/schemes.py MODEL --text A.txt --text B.txt [--override 'down_proj=fp8' ...]

Activations in float32, quantized as each scheme declares (`--weight-only`: never), windows of 256 tokens. `--override`
is handed to `quantize` for the schemes with
groups (mx*, nv*), whose columns have to be a multiple of 32 or 16.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from minifloat import SCHEMES, MinifloatError, compare_models, quantize_checkpoint

FORMATS = [(name, "compressed-tensors") for name in SCHEMES] + [("fp8-block", "fp8")]


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--override", "overrides", multiple=True, help="For schemes with groups.")
@click.option("--window", default=256, show_default=True)
@click.option("--max-tokens", type=int)
@click.option("--weight-only", is_flag=True)
def main(
    model: Path,
    texts: tuple[Path, ...],
    overrides: tuple[str, ...],
    window: int,
    max_tokens: int | None,
    weight_only: bool,
) -> None:
    """Print the table for MODEL."""
    heads = [f"{text.stem}: ppl | change | KL | top-1" for text in texts]
    click.echo(f"| scheme | layout | bytes | bits per weight | inputs | {' | '.join(heads)} |")
    click.echo("|---|---|---|---|---|" + "---|" * 4 * len(texts))
    baseline_shown = False
    for scheme, layout in FORMATS:
        grouped = SCHEMES[scheme].weight.granularity.rows == 1 and SCHEMES[scheme].weight.granularity.cols
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            try:
                report = quantize_checkpoint(model, out, scheme, layout=layout, overrides=overrides if grouped else ())
            except MinifloatError as error:  # the table says why
                click.echo(f"| {scheme} | {layout} | refused: {error} |")
                continue
            comparison = compare_models(
                model, out, texts, window=window, max_tokens=max_tokens, dtype="float32", weight_only=weight_only
            )
        if not baseline_shown:
            cells = [f"{text.baseline_perplexity:.4f} | | | " for text in comparison.texts]
            click.echo(f"| bf16 | | {report.source_bytes:,} | 16 | | {' | '.join(cells)} |")
            baseline_shown = True
        elements = sum(tensor.stats.elements for tensor in report.quantized if tensor.stats)
        bits = 8 * sum(tensor.output_bytes for tensor in report.quantized) / elements
        cells = [
            f"{text.candidate_perplexity:.4f} | {text.candidate_perplexity / text.baseline_perplexity - 1:+.2%} | "
            f"{text.kl_mean:.5f} | {text.top1_agreement:.2%}"
            for text in comparison.texts
        ]
        click.echo(
            f"| {scheme} | {layout} | {report.output_bytes:,} | {bits:.2f} | {comparison.activations} | "
            f"{' | '.join(cells)} |"
        )


if __name__ == "__main__":
    main()
