"""What a comparison costs beside the forward passes that it cannot do without, and the memory that it takes.

    python benchmarks/compare_cost.py MODEL CANDIDATE [CANDIDATE ...] [--tokens 8192] [--window 256]

In every round the models run plainly over all windows, logits and all, and then the same windows are scored; both see
the same batches. Peaks of memory are those of the process: when the models are loaded, after the first scoring, and
after plain passes, which hold the logits of a batch.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path

import click
import torch

from minifloat.compare.corpus import Corpus
from minifloat.compare.models import Predictor, common_tokenizer, match_experts_implementation
from minifloat.compare.scoring_pass import ScoringPass


def peak() -> float:
    """MiB."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**20 if sys.platform == "darwin" else most / 2**10


@torch.inference_mode()
def plain_seconds(models: list[Predictor], corpus: Corpus) -> float:
    """All models over all windows."""
    start = time.perf_counter()
    for batch in corpus.batches():
        for model in models:
            model.model(input_ids=batch.ids, use_cache=False)
    return time.perf_counter() - start


def scoring_seconds(models: list[Predictor], corpus: Corpus) -> float:
    """The same, and scored."""
    start = time.perf_counter()
    ScoringPass(models[0], models[1:], corpus).run()
    return time.perf_counter() - start


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("candidates", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--data", multiple=True)
@click.option("--tokens", default=8192, show_default=True, help="Of each text.")
@click.option("--window", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(
    model: Path, candidates: tuple[Path, ...], data: tuple[str, ...], tokens: int, window: int, rounds: int
) -> None:
    """Print seconds, their ratio and memory."""
    models = [Predictor.of(folder, {}) for folder in (model, *candidates)]
    match_experts_implementation(models)
    corpus = Corpus(data, common_tokenizer(models), window, tokens)
    ratios, loaded = [], peak()
    click.echo(f"{corpus.tokens:,} tokens, vocabulary {models[0].vocab_size:,}, {torch.get_num_threads()} threads")
    for _ in range(rounds):
        scored = scoring_seconds(models, corpus)
        after_scoring = peak()
        plain = plain_seconds(models, corpus)
        ratios.append(scored / plain)
        click.echo(f"forward passes {plain:.2f} s, scored {scored:.2f} s: {ratios[-1]:.3f}x")
        if len(ratios) == 1:
            click.echo(f"peak memory: loaded {loaded:,.0f} MiB, scoring {after_scoring:,.0f}, plain {peak():,.0f}")
    click.echo(f"median {statistics.median(ratios):.3f}x")


if __name__ == "__main__":
    main()
