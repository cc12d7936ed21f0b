"""Measure the time of a comparison against the bare forward passes that it needs, and its peak memory.

    python benchmarks/compare_cost.py MODEL CANDIDATE [CANDIDATE ...] [--tokens 8192] [--window 256]

In every round the models first run over all windows, logits included, and then `compare` scores the same windows in the
same batches. Peak memory is that of the process: when the models are loaded, after the first scoring, and after the
bare forward passes, which hold the logits of one batch.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path

import click
import torch

from minifloat.evaluate.compare.corpus import Corpus
from minifloat.evaluate.compare.models import common_tokenizer
from minifloat.evaluate.compare.scoring import ModelsPass
from minifloat.evaluate.compare.transformers_model import TransformersModel, match_experts_implementation


def peak() -> float:
    """Return the peak memory of this process in MiB."""
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss / 2**20 if sys.platform == "darwin" else max_rss / 2**10


@torch.inference_mode()
def plain_seconds(models: list[TransformersModel], corpus: Corpus) -> float:
    """Return the seconds of the forward passes of all models over all windows."""
    start = time.perf_counter()
    for batch in corpus.batches:
        for model in models:
            model.model(input_ids=batch.ids, use_cache=False)
    return time.perf_counter() - start


def scoring_seconds(models: list[TransformersModel], corpus: Corpus) -> float:
    """Return the seconds of a whole comparison of the same models over the same windows."""
    start = time.perf_counter()
    ModelsPass(models[0], models[1:], corpus).run()
    return time.perf_counter() - start


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("candidates", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--data", multiple=True)
@click.option("--tokens", default=8192, show_default=True, help="Number of tokens of each text.")
@click.option("--window", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def main(
    model: Path, candidates: tuple[Path, ...], data: tuple[str, ...], tokens: int, window: int, rounds: int
) -> None:
    """Print the seconds of both, their ratio and the peak memory."""
    models = [TransformersModel.of(folder) for folder in (model, *candidates)]
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
