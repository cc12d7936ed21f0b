"""How often an end of the intervals of `compare` is on the wrong side of the truth: at most 4% a side.

Simulated: windows with a correlation of neighbours (AR(1)), skewed documents (lognormal), tokens that agree with a
probability near 1. Measured: stretches of the windows of a long text, of which the mean over the whole text is known.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --pair MODEL QUANT TEXT --scores /tmp/scores.npz
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from minifloat.evaluate.compare.intervals import Estimate, mean_interval, proportion_interval
from minifloat.evaluate.compare.series import Stratum
from minifloat.evaluate.compare.verdict import FEWEST_EFFECTIVE, FEWEST_UNITS

#: Of fewer units no check passes.
COUNTS = (15, 24, 40, 100)
WINDOW = 255


def autoregressive(rho: float, sigma: float | None) -> Callable[[np.random.Generator, int], np.ndarray]:
    """Return draws of windows with a correlation of neighbours; with a `sigma` they are lognormal."""

    def draw(rng: np.random.Generator, count: int) -> np.ndarray:
        series = rng.normal(size=count)
        for place in range(1, count):
            series[place] = rho * series[place - 1] + math.sqrt(1 - rho * rho) * series[place]
        return series if sigma is None else np.exp(sigma * series)

    return draw


def measure(name: str, draw: Callable[[int], Estimate], truth: float, repetitions: int) -> None:
    """Print the row of a kind of data, with the figures of each number of units.

    They are how often the units are enough to pass, and of these draws how often the interval misses on each side.
    """
    columns: list[list[str]] = []
    for count in COUNTS:
        found = [draw(count) for _ in range(repetitions)]
        enough = [each for each in found if count >= FEWEST_UNITS and (each.effective_units or 0) >= FEWEST_EFFECTIVE]
        above, below = (
            100 * np.mean(misses)
            for misses in ([each.low > truth for each in enough], [each.high < truth for each in enough])
        )
        width = np.median([each.high - each.low for each in found])
        effective = np.median([each.effective_units or 0 for each in found])
        columns.append(
            [
                f"{effective:.0f}",
                f"{100 * len(enough) / repetitions:.0f}",
                f"{above:.1f}",
                f"{below:.1f}",
                f"{width:.2g}",
            ]
        )
    print(f"| {name} | {' | '.join(', '.join(cells) for cells in zip(*columns, strict=True))} |", flush=True)


def simulated(repetitions: int) -> None:
    rng = np.random.default_rng(0)
    for sigma, kind in ((None, "AR(1)"), (0.5, "lognormal (0.5) AR(1)")):
        for rho in (0.0, 0.2, 0.4, 0.6):
            series = autoregressive(rho, sigma)
            truth = 0.0 if sigma is None else math.exp(sigma * sigma / 2)

            def windows(count: int) -> Estimate:
                return mean_interval(series(rng, count), np.ones(count), [Stratum(count, adjacent=True)])  # noqa: B023

            measure(f"{kind}, {rho}, windows", windows, truth, repetitions)
    for sigma in (0.5, 1.0):

        def documents(count: int) -> Estimate:
            return mean_interval(rng.lognormal(0, sigma, count), np.ones(count))  # noqa: B023

        measure(f"lognormal ({sigma}), documents", documents, math.exp(sigma * sigma / 2), repetitions)
    for fraction in (0.99, 0.999):

        def tokens(count: int) -> Estimate:
            hits = rng.binomial(WINDOW, fraction, count).astype(float)  # noqa: B023
            return proportion_interval(hits, np.full(count, float(WINDOW)), [Stratum(count, adjacent=True)])

        measure(f"binomial, {fraction}, windows", tokens, fraction, repetitions)


def scores_of(pair: list[str], scores: Path, max_tokens: int) -> dict[str, np.ndarray]:
    """Return the sums of each window of a text, measured once and kept."""
    if not scores.exists():
        from minifloat.evaluate.compare.models import common_tokenizer
        from minifloat.evaluate.compare.options import CompareOptions
        from minifloat.evaluate.compare.run import cut_text, open_models, opened
        from minifloat.evaluate.compare.scoring import ModelsPass

        options = CompareOptions(max_tokens=max_tokens)
        with opened(pair[0], [pair[1]], options) as checkpoints:
            models = open_models(pair[0], [pair[1]], options, [], checkpoints)
        corpus = cut_text([pair[2]], models, common_tokenizer(models), options)
        scoring = ModelsPass(models[0], models[1:], corpus)
        scoring.run()
        found = scoring.scores(0, 0)
        index = np.unique(found.unit, return_inverse=True)[1]
        values = {"KL": found.kl, "change": found.candidate_nll - found.baseline_nll, "same top-1": found.agree}
        sums: dict[str, Any] = {name: np.bincount(index, value.astype(float)) for name, value in values.items()}
        np.savez(scores, sizes=np.bincount(index), **sums)
    with np.load(scores) as arrays:
        return {name: arrays[name].astype(float) for name in arrays.files}


def stretches(length: int, count: int, repetitions: int) -> Iterator[slice]:
    """Yield places of adjacent windows, anywhere in the text."""
    for start in np.random.default_rng(1).integers(length - count + 1, size=repetitions):
        yield slice(int(start), int(start) + count)


def measured(arrays: dict[str, np.ndarray], repetitions: int) -> None:
    sizes = arrays.pop("sizes")
    for name, sums in arrays.items():
        interval = proportion_interval if name == "same top-1" else mean_interval
        starts = {count: stretches(len(sizes), count, repetitions) for count in COUNTS}

        def draw(count: int) -> Estimate:
            part = next(starts[count])  # noqa: B023
            return interval(sums[part], sizes[part], [Stratum(count, adjacent=True)])  # noqa: B023

        measure(f"{name}, of {len(sizes)} windows", draw, sums.sum() / sizes.sum(), repetitions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repetitions", type=int, default=2000)
    parser.add_argument("--pair", nargs=3, metavar=("MODEL", "QUANT", "TEXT"))
    parser.add_argument("--scores", type=Path, default=Path("coverage-scores.npz"))
    parser.add_argument("--max-tokens", type=int, default=150_000)
    arguments = parser.parse_args()
    started = time.perf_counter()
    print("| units | effective | may pass, % | above the truth, % | below, % | width |\n|---|---|---|---|---|---|")
    if arguments.pair:
        measured(scores_of(arguments.pair, arguments.scores, arguments.max_tokens), arguments.repetitions)
    else:
        simulated(arguments.repetitions)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
