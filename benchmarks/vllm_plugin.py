"""Measure what the plugin for vLLM gains on a CPU: decode step, time to first token and memory.

    python benchmarks/vllm_plugin.py --vllm-python VENV/bin/python BF16 FP8 MXFP4

Each folder is loaded by a vLLM without the plugin (``VLLM_PLUGINS=""``) and by one with it, in processes of their own
that stay loaded and take turns, so that each round measures all of them on the same machine in the same state. A vLLM
that refuses a folder is printed with its reason. vLLM runs eagerly and in one process (`decode_peers.Vllm`). minifloat
must be installed in the environment of vLLM, or be on PYTHONPATH with its entry point.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import psutil

_PEERS = Path(__file__).with_name("decode_peers.py")
_CONTEXT = 256
#: Ids of prompts are below this, which every vocabulary has.
_IDS = 4096


@dataclass
class Contender:
    """A running vLLM.

    Attributes:
        name: The folder's name and whether the plugin is on.
        process: Its process, which answers in JSON.
        log: Its output.
        refusal: The last line of its log if it ended; else empty.
        loaded: Seconds until it was loaded.
        rss: Resident bytes after loading.
        times: Batch -> time to first token and time of a step of each round, in seconds.
    """

    name: str
    process: subprocess.Popen[str]
    log: Path
    refusal: str = ""
    loaded: float = 0.0
    rss: int = 0
    times: dict[int, list[tuple[float, float]]] = field(default_factory=dict)

    def ask(self, request: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Send a request, or none, and return the answer; None if the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if request is not None:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if line:
            return dict(json.loads(line))
        reasons = [text for text in self.log.read_text(errors="replace").splitlines() if "Error" in text]
        self.refusal = reasons[-1].strip()[-160:] if reasons else "ended"
        return None


def start(python: str, folder: Path, plugin: bool, threads: int, batch: int, logs: Path) -> Contender:
    """Start a vLLM and wait until it has loaded a folder or has ended."""
    name = f"{folder.name}, {'with' if plugin else 'without'}"
    log = logs / f"{name}.log"
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | ({} if plugin else {"VLLM_PLUGINS": ""})
    command = [python, str(_PEERS), "vllm", str(folder), str(threads), str(batch), str(_CONTEXT)]
    began = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
    contender = Contender(name, process, log)
    if contender.ask() is not None:
        contender.loaded = time.perf_counter() - began
        contender.rss = psutil.Process(process.pid).memory_info().rss
    return contender


def report(contenders: list[Contender]) -> None:
    """Print a line for each contender and batch."""
    print(f"{'vLLM':34} {'RSS MB':>7} {'load s':>7} {'batch':>5} {'first ms':>9} {'step ms':>8}  steps of the rounds")
    for contender in contenders:
        if contender.refusal:
            print(f"{contender.name:34} refused: {contender.refusal}")
        for batch, times in contender.times.items():
            first, step = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
            rounds = " ".join(f"{each * 1e3:.1f}" for _, each in times)
            size = f"{contender.rss / 1e6:7.0f} {contender.loaded:7.1f}"
            print(f"{contender.name:34} {size} {batch:5} {first:9.1f} {step:8.1f}  {rounds}")


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--vllm-python", required=True, help="Python of an environment with vLLM and minifloat.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8), show_default=True)
@click.option("--prompt-tokens", default=32, show_default=True)
@click.option("--steps", default=8, show_default=True, help="Decode steps of a round.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--without", default="", help="Part of the names of folders that vLLM loads without the plugin too.")
def main(
    folders: tuple[Path, ...],
    vllm_python: str,
    batches: tuple[int, ...],
    prompt_tokens: int,
    steps: int,
    rounds: int,
    threads: int,
    without: str,
) -> None:
    """Load FOLDERS in vLLM without and with the plugin, and print the times of both."""
    contenders: list[Contender] = []
    with tempfile.TemporaryDirectory() as logs:
        try:
            for folder in folders:
                for plugin in (False, True):
                    if plugin or without in folder.name:
                        contenders.append(start(vllm_python, folder, plugin, threads, max(batches), Path(logs)))
            running = [contender for contender in contenders if not contender.refusal]
            draw = random.Random(0)
            for round_number in range(rounds + 1):  # the first one warms up
                for batch in batches:
                    prompts = [[draw.randrange(_IDS) for _ in range(prompt_tokens)] for _ in range(batch)]
                    for contender in running:
                        answer = contender.ask({"prompts": prompts, "output_len": steps + 1})
                        if answer is None:
                            sys.exit(f"{contender.name}: {contender.refusal}")
                        if round_number:
                            contender.times.setdefault(batch, []).append((answer["first"], answer["step"]))
        finally:
            for contender in contenders:
                contender.process.kill()
                contender.process.wait()
        report(contenders)


if __name__ == "__main__":
    main()
