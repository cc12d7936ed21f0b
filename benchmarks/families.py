"""Measure decode steps of other families than Llama beside transformers and llama.cpp, interleaved in one run.

    python benchmarks/families.py --models-dir /tmp/families --prepare      # writes the models
    python benchmarks/families.py --models-dir /tmp/families --family gpt-oss --llama-cpp-python L/bin/python

Shapes: gpt-oss-20b cut to 3 layers (1.6 GB; experts in MXFP4 as stored), Gemma 3 1B, Qwen3.5 0.8B; random weights
(`family_models.py`). transformers is plain: BF16, its own code, the faster of its two KV caches. llama.cpp reads the
same MXFP4 codes; its file is written by `family_models.py` in its own environment, as OUT = MODELS-DIR/gpt-oss-ggml.
Every engine is a process of its own, all are loaded before the first round, and in a round each engine runs one
prompt of 64 tokens in turn. A step's time is the median over a run. "of bound" is the time in which the machine
reads the bytes of a step (weights that one token is multiplied with; of experts those that are chosen), divided by
the step's time. Ratios are medians of the ratios inside rounds; spread is that of the times over the rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import family_models
import instruction_sets
from decode_engines import Engine, Ours, Peer, Sizes

from minifloat.errors import MinifloatError
from minifloat.evaluate.bench.figures import CpuTime, MachineUse
from minifloat.evaluate.bench.workload import Workload
from minifloat.kernels.processors import bound_spin
from minifloat.kernels.speed import read_bandwidth

PROMPT_TOKENS = 64
PROBE_BYTES = 1 << 29
BASELINE = "transformers BF16"
#: Bytes of the cache of the engine's room; the sizes of these models' caches differ and do not matter.
KV_BYTES = 256 << 10
#: Our engines: the scheme of the checkpoint (None: as written) and the engine's `lm_head`.
OURS: dict[str, dict[str, tuple[str | None, str]]] = {
    "gpt-oss": {"minifloat": (None, "bf16"), "minifloat, FP8 head": (None, "fp8")},
    "gemma-3-1b": {"minifloat FP8": ("fp8", "auto"), "minifloat MXFP4": ("mxfp4", "auto")},
    "qwen3.5-0.8b": {"minifloat FP8": ("fp8", "auto"), "minifloat MXFP4": ("mxfp4", "auto")},
}
LLAMA_CPP = {"llama.cpp MXFP4, BF16 rest": "BF16", "llama.cpp MXFP4, Q8_0 rest": "Q8_0"}


def checkpoint(folder: Path, family: str, scheme: str | None) -> Path:
    """Return a model's folder; it is written if it is missing."""
    from minifloat import quantize_checkpoint

    base = family_models.make(folder, family)
    if scheme is None:
        return base
    quantized = folder / f"{family}-{scheme}"
    if not quantized.exists():
        quantize_checkpoint(base, quantized, scheme)
    return quantized


def loaders(folder: Path, family: str, sizes: Sizes, llama_python: str) -> dict[str, Callable[[], Engine]]:
    """Return functions that load the engines of a family."""

    def ours(scheme: str | None, lm_head: str) -> Callable[[], Engine]:
        return lambda: Ours(checkpoint(folder, family, scheme), sizes, lm_head, "bf16")

    def llama(kind: str) -> Callable[[], Engine]:
        return lambda: Peer(llama_python, "llama.cpp", f"{folder}/gpt-oss-ggml-{kind}.gguf", sizes)

    base = str(checkpoint(folder, family, None))
    found: dict[str, Callable[[], Engine]] = {BASELINE: lambda: Peer(sys.executable, "transformers", base, sizes)}
    found |= {name: ours(*options) for name, options in OURS[family].items()}
    if family == "gpt-oss" and llama_python:
        found |= {name: llama(kind) for name, kind in LLAMA_CPP.items()}
    return found


def report(
    steps: dict[str, list[float]], engines: dict[str, Engine], bandwidths: list[float], use: MachineUse | None
) -> None:
    """Print a table of all engines."""
    bandwidth = statistics.median(bandwidths)
    others = "unknown" if use is None else f"{use.others:.0%}"
    click.echo(f"memory read {bandwidth / 1e9:.1f} GB/s; CPU time of other processes: {others}")
    columns = [name for name in steps if not name.startswith("minifloat")]
    click.echo(f"{'engine':<28} {'ms/step':>8} {'spread':>7} {'GB/step':>8} {'of bound':>9}  "
               + "  ".join(f"over {name}" for name in columns))  # fmt: skip
    for name, times in steps.items():
        median = statistics.median(times)
        spread = (max(times) - min(times)) / median
        nbytes = engines[name].nbytes if name.startswith("minifloat") else 0
        bound = f"{nbytes / bandwidth / median:>9.0%}" if nbytes else f"{'':>9}"
        ratios = [statistics.median(b / a for a, b in zip(times, steps[column], strict=True)) for column in columns]
        click.echo(
            f"{name:<28} {1e3 * median:>8.2f} {spread:>7.0%} {nbytes / 1e9:>8.3f} {bound}  "
            + "  ".join(f"{ratio:>{5 + len(column)}.2f}" for ratio, column in zip(ratios, columns, strict=True))
        )


@click.command()
@click.option("--models-dir", "models", type=click.Path(path_type=Path), required=True)
@click.option("--family", default="gpt-oss", show_default=True, type=click.Choice(list(OURS)))
@click.option("--prepare", is_flag=True, help="Only write the models, of all families.")
@click.option("--threads", default=2, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--output-len", default=16, show_default=True)
@click.option("--only", multiple=True, help="An engine's name; repeatable.")
@click.option("--llama-cpp-python", default="", help="The Python of an environment with llama-cpp-python.")
def main(models: Path, family: str, prepare: bool, only: tuple[str, ...], **options: Any) -> None:
    """Print the times of decode steps at batch 1."""
    bound_spin()
    threads, rounds, output_len = (options[name] for name in ("threads", "rounds", "output_len"))
    if prepare:
        for name, engines_of in OURS.items():
            for scheme, _ in engines_of.values():
                click.echo(checkpoint(models, name, scheme))
        return
    click.echo(instruction_sets.describe(instruction_sets.machine(threads)))
    sizes = Sizes(threads, 1, PROMPT_TOKENS + output_len, KV_BYTES)
    vocab = int(family_models.SHAPES[family]["vocab_size"])
    load = Workload(PROMPT_TOKENS, output_len, (1,))
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, loader in loaders(models, family, sizes, options["llama_cpp_python"]).items():
            if not only or name in only:
                click.echo(f"loading {name}", err=True)
                engines[name] = loader()
                stack.callback(engines[name].close)
                engines[name].run(load.prompts(rounds, 1, vocab), 4)
        before = CpuTime.now([engine.process for engine in engines.values()])
        steps: dict[str, list[float]] = {name: [] for name in engines}
        bandwidths = []
        for number in range(rounds):
            bandwidths.append(read_bandwidth(PROBE_BYTES, threads, 3).median)
            for name, engine in engines.items():
                steps[name].append(engine.run(load.prompts(number, 1, vocab), output_len)[1])
        use = MachineUse.between(before, CpuTime.now([engine.process for engine in engines.values()]))
    report(steps, engines, bandwidths, use)


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
