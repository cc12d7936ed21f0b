"""`bench`: memory and latency of a quantized model, compared with the same model in BF16 on the same engine.

The two engines take turns: in every round both run the same prompts, so that a change of the machine's speed affects
both, and gains are ratios within rounds. If memory cannot hold both engines, each turn loads its engine again.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minifloat._version import __version__
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder, model_name
from minifloat.checkpoint.progress import Progress
from minifloat.engine.options import EngineOptions
from minifloat.evaluate.bench.figures import CpuTime, EngineFigures, GainsReport, MachineUse, batch_figures
from minifloat.evaluate.bench.worker import BatchTimings, Worker
from minifloat.evaluate.bench.workload import BenchOptions, Workload
from minifloat.kernels import native, processors
from minifloat.kernels.memory import available_memory
from minifloat.kernels.processors import TeamOptions
from minifloat.kernels.speed import gpu_read_bandwidth, read_bandwidth

if TYPE_CHECKING:
    import torch

#: Bytes that the bandwidth probe reads: far more than any cache holds.
_PROBE_BYTES, _PROBE_PASSES = 1 << 30, 3
_READ_BLOCK = 16 << 20
#: Memory of an engine besides its weights: the interpreter, torch, buffers.
_OVERHEAD_BYTES = 1 << 30


def bench_checkpoint(
    candidate: str | os.PathLike[str],
    baseline: str | os.PathLike[str],
    workload: Workload | None = None,
    options: BenchOptions | None = None,
    *,
    progress: Progress | None = None,
) -> GainsReport:
    """Measure memory and latency of a quantized checkpoint and of its original, and return both with the gains.

    Args:
        candidate: The quantized checkpoint: a folder or a model of the hub.
        baseline: The original checkpoint: a folder or a model of the hub.
        workload: Lengths of prompts and outputs, and batch sizes; None: `Workload()`.
        options: The engines; None: `BenchOptions()`.
        progress: Called from this thread before each turn and at the end.

    Raises:
        UsageError: An argument is out of range.
        CheckpointError: A folder is not a checkpoint.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        MinifloatError: An engine cannot be created, or its process ended; the message states the reason.
    """
    load, options = workload or Workload(), options or BenchOptions()
    threads = options.count
    team = TeamOptions(threads=threads, numa=options.numa)
    baseline_engine, candidate_engine = options.engines(load)
    contenders = (
        _Contender(model_folder(baseline, revision=options.revision), baseline_engine, team),
        _Contender(model_folder(candidate), candidate_engine, team),
    )
    reads = [contender.read_seconds() for contender in contenders]
    needed = sum(contender.nbytes + _OVERHEAD_BYTES for contender in contenders) + _PROBE_BYTES
    gpu = _gpu(options.engine.device)
    together = needed < _free_memory(gpu)
    bandwidths: list[float] = []
    turns = load.rounds * len(contenders)
    with ExitStack() as stack:
        for contender in contenders:
            stack.callback(contender.close)
        before_rounds = CpuTime.now(())
        for number in range(load.rounds):
            bandwidths += _bandwidth(gpu, threads)
            for index, contender in enumerate(contenders):
                if progress is not None:
                    done = number * len(contenders) + index
                    progress(done, turns, f"round {number + 1}: {model_name(contender.path)}")
                contender.turn(load, number)
                if not together:
                    contender.close()
        running = [contender.process_id for contender in contenders if contender.process_id is not None]
        use = MachineUse.between(before_rounds, CpuTime.now(running))
    if progress is not None:
        progress(turns, turns, "done")
    before, after = (
        contender.figures(load, seconds, bandwidths) for contender, seconds in zip(contenders, reads, strict=True)
    )
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return GainsReport(date, _machine(threads, gpu), load, tuple(bandwidths), together, before, after, use)


def _bandwidth(gpu: torch.device | None, threads: int) -> list[float]:
    if gpu is not None:
        return [gpu_read_bandwidth(gpu, _PROBE_BYTES, _PROBE_PASSES).median]
    return [] if native.load() is None else [read_bandwidth(_PROBE_BYTES, threads, _PROBE_PASSES).median]


class _Contender:
    def __init__(self, path: Path, options: EngineOptions, team: TeamOptions) -> None:
        self.path = path
        self._options, self._team = options, team
        with Checkpoint.open(path) as checkpoint:
            self.nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
            self._shards = sorted({checkpoint.shard_path(info.shard) for info in checkpoint.tensors.values()})
        self._worker: Worker | None = None
        self._info: dict[str, Any] = {}
        self._loads: list[float] = []
        self._samples: dict[int, list[BatchTimings]] = {}
        self._state: dict[str, Any] = {"rss": 0, "peak_rss": 0, "speculation": None}

    @property
    def process_id(self) -> int | None:
        return None if self._worker is None else self._worker.process_id

    def read_seconds(self) -> float:
        """Return the seconds to read all files, with the page cache filled by a first read."""
        seconds = 0.0
        buffer = bytearray(_READ_BLOCK)
        for _ in range(2):
            start = time.perf_counter()
            for shard in self._shards:
                with open(shard, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
            seconds = time.perf_counter() - start
        return seconds

    def turn(self, workload: Workload, number: int) -> None:
        if self._worker is None:
            self._worker = Worker(self.path, asdict(self._options), self._team)
            self._info = self._worker.info
            self._loads.append(self._info["load_seconds"])
            self._worker.run(workload.prompts(-1, 1, self._info["vocab_size"]), 2)  # to touch all memory once
        for batch in workload.batch_sizes:
            prompts = workload.prompts(number, batch, self._info["vocab_size"])
            sample = self._worker.run(prompts, workload.output_len)
            self._samples.setdefault(batch, []).append(sample)
        peak, self._state = self._state["peak_rss"], self._worker.state()
        self._state["peak_rss"] = max(peak, self._state["peak_rss"])

    def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def figures(self, workload: Workload, read_seconds: float, bandwidths: Sequence[float]) -> EngineFigures:
        return EngineFigures(
            self._info,
            read_seconds,
            tuple(self._loads),
            self._state["rss"],
            self._state["peak_rss"],
            {
                batch: batch_figures(samples, batch, workload, self._info, bandwidths)
                for batch, samples in self._samples.items()
            },
            self._state["speculation"],
        )


def _gpu(name: str) -> torch.device | None:
    """Return the GPU of that name; None for the CPU, for which torch is not imported."""
    if name == "cpu":
        return None
    from minifloat.model.runtime.tensors import device_named

    return device_named(name)


def _free_memory(gpu: torch.device | None) -> int:
    if gpu is None:
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(gpu)[0]


def _machine(threads: int, gpu: torch.device | None) -> dict[str, Any]:
    import torch

    return {
        "gpu": None if gpu is None else torch.cuda.get_device_name(gpu),
        "minifloat": __version__,
        "cores": processors.available(),
        "threads": threads,
        "instruction_set": native.isa() if native.load() is not None else None,
        "load_average": os.getloadavg()[0],
    }
