"""Count the greedy answers that depend on what else runs, by default and with `deterministic`, and what that costs.

    python benchmarks/same_answer.py                                  # examples/storybook-4m in BF16, FP8 and MXFP4
    python benchmarks/same_answer.py MODEL QUANTIZED --prompts 16 --output-len 24 --text FILE

Every prompt is answered alone first: no other request, no prefix cache, the prompt in one chunk. Then again in each
situation below; an answer differs if any of its tokens does. Prompts are pieces of a text of 1 to 200 tokens.

    others    all prompts together
    chunks    alone, 8 tokens of the prompt per step
    prefix    alone, the beginning of the prompt from the cache
    drafts    alone, with drafts by what followed the same tokens before
    threads   alone, with one thread (or two, where one is the default)

The second table has the speed of engines with and without `deterministic`, which take turns in every round.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from minifloat import quantize_checkpoint
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.engine.options import Dtype
from minifloat.kernels import native, threads

EXAMPLES = Path(__file__).parents[1] / "examples"
TEXT = EXAMPLES / "texts" / "stories_calibration.txt"
SITUATIONS = ("others", "chunks", "prefix", "drafts", "threads")
CHUNK = 8
LONGEST = 200
#: Sequences of each decode measurement, and tokens of the prompt that is timed.
BATCHES, PREFILL = (1, 8), 512

Answers = list[tuple[int, ...]]


def prompts_of(engine: Engine, text: Path, count: int) -> list[tuple[int, ...]]:
    """Return `count` pieces of a text, of many lengths."""
    tokens = engine.encode(text.read_text(encoding="utf-8")[:200_000])
    step = max(1, (len(tokens) - LONGEST) // count)
    return [tuple(tokens[i * step : i * step + 1 + 37 * i % LONGEST]) for i in range(count)]


class Opened:
    """Engines of one model; each is made when it is needed."""

    def __init__(self, model: Path, dtype: Dtype, deterministic: bool) -> None:
        self.model, self.dtype, self.deterministic = model, dtype, deterministic

    def engine(self, **options: Any) -> Engine:
        """Return a new engine."""
        defaults: dict[str, Any] = {"prefix_cache": False, "max_num_seqs": 64}
        return Engine(
            self.model, EngineOptions(dtype=self.dtype, deterministic=self.deterministic, **defaults | options)
        )


def alone(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams) -> Answers:
    """Return the answers, one request at a time."""
    return [engine.generate([prompt], params)[0].tokens for prompt in prompts]


@contextmanager
def other_threads() -> Iterator[None]:
    """Compute with another number of threads."""
    before = torch.get_num_threads()
    threads.set_threads(2 if before == 1 else 1)
    try:
        yield
    finally:
        threads.set_threads(before)


def situations(opened: Opened, prompts: list[tuple[int, ...]], params: SamplingParams) -> dict[str, int]:
    """Return the number of answers that differ from those alone, by situation."""
    engine = opened.engine()
    expected = alone(engine, prompts, params)
    found: dict[str, Answers] = {"others": [text.tokens for text in engine.generate(prompts, params)]}
    with other_threads():
        found["threads"] = alone(engine, prompts, params)
    del engine
    found["chunks"] = alone(opened.engine(max_num_seqs=1, max_num_batched_tokens=CHUNK), prompts, params)
    cached = opened.engine(prefix_cache=True)
    alone(cached, prompts, SamplingParams(temperature=0.0, max_tokens=1))
    found["prefix"] = alone(cached, prompts, params)
    found["drafts"] = alone(opened.engine(speculate="prompt"), prompts, params)
    return {name: sum(a != b for a, b in zip(found[name], expected, strict=True)) for name in SITUATIONS}


def step_seconds(engine: Engine, batch: int, output_len: int) -> float:
    """Return the median seconds of a step that decodes one token of each of `batch` sequences."""
    vocab = engine.info.vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    prompts = [tuple((7 * i + 13 * n) % vocab for i in range(32)) for n in range(batch)]
    times = [time.perf_counter()]
    for delivery in engine.generate(prompts, params, stream=True):
        if delivery.tokens and delivery.request_id == "0":
            times.append(time.perf_counter())
    return statistics.median(b - a for a, b in itertools.pairwise(times[2:]))


def prefill_seconds(engine: Engine) -> float:
    """Return the seconds of a prompt of `PREFILL` tokens."""
    vocab = engine.info.vocab_size
    started = time.perf_counter()
    engine.generate([tuple(11 * i % vocab for i in range(PREFILL))], SamplingParams(temperature=0.0, max_tokens=1))
    return time.perf_counter() - started


def costs(default: Opened, deterministic: Opened, rounds: int, output_len: int) -> dict[str, tuple[float, float]]:
    """Return the median seconds of the default and of `deterministic` for each measurement."""
    engines = [each.engine(max_model_len=PREFILL + 1, max_num_seqs=max(BATCHES)) for each in (default, deterministic)]
    jobs: dict[str, Callable[[Engine], float]] = {
        f"decode, {batch} at a time": functools.partial(step_seconds, batch=batch, output_len=output_len)
        for batch in BATCHES
    }
    jobs[f"prompt of {PREFILL}"] = prefill_seconds
    found: dict[str, tuple[float, float]] = {}
    for name, job in jobs.items():
        for engine in engines:
            job(engine)  # touches all memory
        samples = [[job(engine) for engine in engines] for _ in range(rounds)]
        one, other = (statistics.median(column) for column in zip(*samples, strict=True))
        found[name] = (one, other)
    return found


def default_models(folder: Path) -> list[Path]:
    """Quantize the example's model."""
    source = EXAMPLES / "storybook-4m"
    for scheme in ("fp8", "mxfp4"):
        quantize_checkpoint(source, folder / scheme, scheme)
    return [source, folder / "fp8", folder / "mxfp4"]


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--text", default=TEXT, type=click.Path(exists=True, path_type=Path), help="Of the prompts.")
@click.option("--prompts", "count", default=200, show_default=True)
@click.option("--output-len", default=48, show_default=True)
@click.option("--rounds", default=5, show_default=True, help="Of the speeds; 0: none.")
@click.option("--answers/--no-answers", default=True, show_default=True, help="Count answers that differ.")
@click.option("--dtype", default="bfloat16", show_default=True, help="Of the activations.")
def main(
    models: tuple[Path, ...], text: Path, count: int, output_len: int, rounds: int, answers: bool, dtype: Dtype
) -> None:
    """Print how many answers differ in each situation, and the speed with and without `deterministic`."""
    print(f"{native.isa()}, {threads.count()} threads, {count} prompts, {output_len} tokens each, {dtype}", flush=True)
    params = SamplingParams(temperature=0.0, max_tokens=output_len)
    with tempfile.TemporaryDirectory() as folder:
        chosen = list(models) or default_models(Path(folder))
        for model in chosen:
            opened = {flag: Opened(model, dtype, flag) for flag in (False, True)}
            for each in opened.values() if answers else ():
                prompts = prompts_of(each.engine(), text, count)
                differing = situations(each, prompts, params)
                row = "  ".join(f"{name} {number:4d}" for name, number in differing.items())
                print(f"{model.name:24} {'deterministic' if each.deterministic else 'default':14} {row}", flush=True)
            if rounds:
                for name, (one, other) in costs(opened[False], opened[True], rounds, output_len).items():
                    print(f"{model.name:24} {name:20} {1e3 * one:9.2f} ms by default, {1e3 * other:9.2f} ms "
                          f"deterministic: {other / one - 1:+.1%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
