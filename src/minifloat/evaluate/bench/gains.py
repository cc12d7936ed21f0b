"""`bench`: memory and latency of a quantized model, compared with the same model in BF16 on the same engine.

The baseline runs on packed BF16 kernels, so that a gain comes from the format and not from a slow baseline. Each engine
has a process of its own, and the two take turns: in every round both run the same prompts, so that a change of the
machine's speed affects both, and gains are ratios within rounds. If memory cannot hold both engines, each turn loads
its engine again. The machine's read bandwidth is measured in every round.

Not measured: accuracy (`minifloat compare`) and the overhead of a server (``benchmarks/serve.py``).
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minifloat._version import __version__
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.hub import model_folder, model_name
from minifloat.checkpoint.progress import Progress
from minifloat.engine.options import EngineOptions
from minifloat.evaluate.bench.doubts import CpuTime, MachineUse, Side, find_doubts
from minifloat.evaluate.bench.figures import BatchFigures, StepBytes, batch_figures, spread
from minifloat.evaluate.bench.worker import Worker
from minifloat.evaluate.bench.workload import BatchTimings, BenchOptions, Workload
from minifloat.kernels import native, processors
from minifloat.kernels.bandwidth import gpu_read_bandwidth, read_bandwidth
from minifloat.kernels.memory import available_memory
from minifloat.report.document import ShortReport

#: Bytes that the bandwidth probe reads: far more than any cache holds.
_PROBE_BYTES, _PROBE_PASSES = 1 << 30, 3
_READ_BLOCK = 16 << 20
#: Memory of an engine besides its weights: the interpreter, torch, buffers.
_OVERHEAD_BYTES = 1 << 30


@dataclass(frozen=True)
class EngineFigures:
    """Figures of one of the two engines.

    Attributes:
        rss: Resident bytes of the process after its last turn.
        peak_rss: Peak resident bytes of the process.
        speculation: Counts of drafts as `SpeculationStats.to_dict`; None if the engine did not speculate.
    """

    info: dict[str, Any]
    read_seconds: float
    load_seconds: tuple[float, ...]
    rss: int
    peak_rss: int
    batches: dict[int, BatchFigures]
    speculation: dict[str, Any] | None

    @property
    def side(self) -> Side:
        """The part of the figures that decides whether they may be quoted."""
        read = StepBytes(self.info["step_bytes"], self.info["kv_bytes_per_token"])
        return Side(read, self.batches, drafts=self.speculation is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "model_id": self.info["name"],
            "info": self.info,
            "read_seconds": self.read_seconds,
            "load_seconds": statistics.median(self.load_seconds),
            "load_seconds_all": list(self.load_seconds),
            "rss_bytes": self.rss,
            "peak_rss_bytes": self.peak_rss,
            "batches": {str(batch): figures.to_dict() for batch, figures in self.batches.items()},
            "speculation": self.speculation,
        }


@dataclass(frozen=True, repr=False)
class GainsReport(ShortReport):
    """The result of `bench`.

    Attributes:
        date: Date and time, ISO 8601.
        machine: GPU, cores, threads, instruction set, versions.
        workload: Lengths of prompts and outputs, and batch sizes.
        bandwidths: Read bandwidth of the machine in each round, bytes per second; empty without native kernels.
        together: Whether both engines stayed in memory during all rounds.
        baseline: Figures of the original model.
        candidate: Figures of the quantized model.
        use: What else used the machine during the rounds; None where the system does not say.
    """

    date: str
    machine: dict[str, Any]
    workload: Workload
    bandwidths: tuple[float, ...]
    together: bool
    baseline: EngineFigures
    candidate: EngineFigures
    use: MachineUse | None = None

    @property
    def doubts(self) -> tuple[str, ...]:
        """Reasons not to quote the figures, as sentences; empty if there is none."""
        return find_doubts(self.workload, self.use, self.baseline.side, self.candidate.side)

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        gains = self.gains
        shown = {"memory of weights": gains["weight_bytes"], "load time": gains["load_seconds"]}
        shown |= {f"decode, batch {size}": gains[f"decode_batch_{size}"] for size in self.workload.batch_sizes[:3]}
        models = f"{self.candidate.info['name']} over {self.baseline.info['name']}"
        return {"gains of": models, **{name: f"{gain:.2f}x" for name, gain in shown.items() if gain is not None}}

    def decode_gains(self, batch: int) -> list[float]:
        """Return the baseline's time of a decode step over the candidate's, per round."""
        pair = (self.baseline.batches[batch].decode_ms, self.candidate.batches[batch].decode_ms)
        return [] if not all(pair) else [before / after for before, after in zip(*pair, strict=True)]

    def prefill_gains(self, batch: int) -> list[float]:
        """Return the candidate's prefill throughput over the baseline's, per round."""
        pair = (self.candidate.batches[batch].prefill, self.baseline.batches[batch].prefill)
        return [after / before for after, before in zip(*pair, strict=True)]

    @property
    def gains(self) -> dict[str, float | None]:
        """Ratios of the baseline's bytes or seconds to the candidate's: above 1 the candidate is better."""
        before, after = self.baseline, self.candidate
        gains: dict[str, float | None] = {
            "weight_bytes": before.info["weight_bytes"] / after.info["weight_bytes"],
            "step_bytes": before.info["step_bytes"] / after.info["step_bytes"],
            "kv_bytes_per_token": before.info["kv_bytes_per_token"] / after.info["kv_bytes_per_token"],
            "peak_rss": before.peak_rss / after.peak_rss,
            "load_seconds": statistics.median(before.load_seconds) / statistics.median(after.load_seconds),
        }
        for batch in self.workload.batch_sizes:
            decode = self.decode_gains(batch)
            gains[f"decode_batch_{batch}"] = statistics.median(decode) if decode else None
            gains[f"decode_batch_{batch}_spread"] = spread(decode)
            gains[f"prefill_batch_{batch}"] = statistics.median(self.prefill_gains(batch))
            for name in ("median_ttft_ms", "median_itl_ms"):
                pair = (before.batches[batch].metrics[name], after.batches[batch].metrics[name])
                gains[f"{name.removesuffix('_ms')}_batch_{batch}"] = pair[0] / pair[1]
        return gains

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {
            "date": self.date,
            "machine": self.machine,
            "workload": asdict(self.workload),
            "read_bandwidth_bytes_per_second": list(self.bandwidths),
            "both_in_memory": self.together,
            "baseline": self.baseline.to_dict(),
            "candidate": self.candidate.to_dict(),
            "gains": self.gains,
            "machine_use": None if self.use is None else asdict(self.use),
            "doubts": list(self.doubts),
        }

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the report as JSON into a new file named after the candidate and the date, and return its path.

        Args:
            folder: Folder of the file; created if it does not exist.

        Raises:
            StorageError: The system refused to write.
        """
        stamp = self.date.replace(":", "").replace("-", "").partition("+")[0]
        path = Path(folder) / f"minifloat-bench-{self.candidate.info['name'].replace('/', '--')}-{stamp}.json"
        with storage_errors(path, "write"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        return path


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
    threads = min(options.threads or processors.limit(), processors.limit())
    baseline_engine, candidate_engine = options.engines(load)
    contenders = (
        _Contender(model_folder(baseline, revision=options.revision), baseline_engine, threads),
        _Contender(model_folder(candidate), candidate_engine, threads),
    )
    reads = [contender.read_seconds() for contender in contenders]
    needed = sum(contender.nbytes + _OVERHEAD_BYTES for contender in contenders) + _PROBE_BYTES
    device = options.engine.device
    gpu = None if device == "cpu" else _gpu(device)
    together = needed < (available_memory() if gpu is None else gpu.free)
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


def _bandwidth(gpu: _Gpu | None, threads: int) -> list[float]:
    """Measure the read bandwidth in bytes per second; nothing without native kernels."""
    if gpu is not None:
        return [gpu_read_bandwidth(gpu.device, _PROBE_BYTES, _PROBE_PASSES).median]
    return [] if native.load() is None else [read_bandwidth(_PROBE_BYTES, threads, _PROBE_PASSES).median]


class _Contender:
    """A checkpoint, its engine while it is loaded, and its measurements."""

    def __init__(self, path: Path, options: EngineOptions, threads: int) -> None:
        self.path = path
        self._options, self._threads = options, threads
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
        """Id of the engine's process; None while there is none."""
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
        """Run all batch sizes once."""
        if self._worker is None:
            self._worker = Worker(self.path, asdict(self._options), self._threads)
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
        """End the engine's process."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def figures(self, workload: Workload, read_seconds: float, bandwidths: Sequence[float]) -> EngineFigures:
        """Return the figures of all turns."""
        read = StepBytes(self._info["step_bytes"], self._info["kv_bytes_per_token"])
        return EngineFigures(
            self._info,
            read_seconds,
            tuple(self._loads),
            self._state["rss"],
            self._state["peak_rss"],
            {
                batch: batch_figures(samples, batch, workload, read, bandwidths)
                for batch, samples in self._samples.items()
            },
            self._state["speculation"],
        )


@dataclass(frozen=True)
class _Gpu:
    """A GPU: its torch device, its name, and the free bytes of its memory."""

    device: Any
    name: str
    free: int


def _gpu(name: str) -> _Gpu:
    """Return the GPU of that name; raises the errors of `device_named`."""
    import torch

    from minifloat.model.runtime.devices import device_named

    device = device_named(name)
    return _Gpu(device, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0])


def _machine(threads: int, gpu: _Gpu | None) -> dict[str, Any]:
    return {
        "gpu": None if gpu is None else gpu.name,
        "minifloat": __version__,
        "cores": processors.available(),
        "threads": threads,
        "instruction_set": native.isa() if native.load() is not None else None,
        "load_average": os.getloadavg()[0],
    }
