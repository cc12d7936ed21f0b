"""Figures of a bench, named as in ``vllm bench serve``, and the reasons why they are not to be quoted.

The bound of a decode step is the time to read its bytes at the measured bandwidth: each weight once, and the keys and
values of every sequence. It counts all experts of a mixture, of which a small batch reads only some.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minifloat.checkpoint.files import storage_errors
from minifloat.deploy.estimate.roofline import step_bytes
from minifloat.evaluate.bench.worker import BatchTimings
from minifloat.evaluate.bench.workload import Workload
from minifloat.report.document import ShortReport

_STAT = Path("/proc/stat")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if _STAT.exists() else 1
#: Largest share of the time of all cores that other processes, or a hypervisor, may take.
_OTHERS, _STOLEN = 0.05, 0.02
#: Largest difference between rounds, over their median.
_SPREAD = 0.15
#: Measured ratios and shares may exceed their limit by this factor, the noise of a quiet machine.
_NOISE = 1.05
_FEWEST_ROUNDS = 2
_BYTES = ("weight_bytes", "step_bytes", "kv_bytes_per_token")


@dataclass(frozen=True)
class BatchFigures:
    """Figures of an engine at one batch size. Tuples have an entry per round."""

    batch: int
    decode_ms: tuple[float, ...]
    bound_ms: tuple[float, ...]  # the time to read the bytes of such a step; empty if the bandwidth is unknown
    prefill: tuple[float, ...]
    metrics: dict[str, float]

    @property
    def decode_throughput(self) -> float | None:
        return self.batch * 1e3 / statistics.median(self.decode_ms) if self.decode_ms else None

    @property
    def bound_throughput(self) -> float | None:
        return self.batch * 1e3 / statistics.median(self.bound_ms) if self.bound_ms else None

    @property
    def bandwidth_share(self) -> float | None:
        if not self.decode_ms or not self.bound_ms:
            return None
        return statistics.median(bound / step for bound, step in zip(self.bound_ms, self.decode_ms, strict=True))

    def to_dict(self) -> dict[str, Any]:
        return self.metrics | {
            "max_concurrency": self.batch,
            "decode_step_ms": list(self.decode_ms),
            "decode_step_ms_spread": spread(self.decode_ms),
            "decode_throughput": self.decode_throughput,
            "decode_bound_ms": list(self.bound_ms),
            "decode_bound_throughput": self.bound_throughput,
            "decode_bandwidth_share": self.bandwidth_share,
            "prefill_throughput": statistics.median(self.prefill),
            "prefill_throughput_rounds": list(self.prefill),
        }


@dataclass(frozen=True)
class EngineFigures:
    """Figures of one of the two engines; `rss` is what its process holds after its last turn."""

    info: dict[str, Any]
    read_seconds: float
    load_seconds: tuple[float, ...]
    rss: int
    peak_rss: int
    batches: dict[int, BatchFigures]
    speculation: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
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
        batches = self.workload.batch_sizes
        return (
            *_doubts_of_machine(self.workload, self.use),
            *(f"Batch {batch}: {doubt}" for batch in batches for doubt in _doubts_of_batch(self, batch)),
        )

    def headline(self) -> dict[str, str]:
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
            **{name: before.info[name] / after.info[name] for name in _BYTES},
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


def bytes_of_step(info: Mapping[str, Any], workload: Workload, batch: int) -> float:
    """Return the bytes that a decode step of an engine reads, averaged over the length of the output."""
    length = workload.input_len + workload.output_len / 2
    return step_bytes(info["step_bytes"], batch, length * info["kv_bytes_per_token"])


def batch_figures(
    samples: Sequence[BatchTimings], batch: int, load: Workload, info: Mapping[str, Any], bandwidths: Sequence[float]
) -> BatchFigures:
    decode = [decode_seconds(sample, batch) for sample in samples]
    decode_ms = [1e3 * seconds for seconds in decode if seconds is not None]
    nbytes = bytes_of_step(info, load, batch)
    return BatchFigures(
        batch,
        tuple(decode_ms) if len(decode_ms) == len(samples) else (),
        tuple(1e3 * nbytes / bandwidth for bandwidth in bandwidths),
        tuple(prefill_rate(sample) for sample in samples),
        metrics(samples),
    )


def decode_seconds(sample: BatchTimings, batch: int) -> float | None:
    """Return the seconds in which `batch` sequences get one token each, while no prompt is computed."""
    decoding = [step for step in sample.steps if not step.prompt_tokens]
    if any(step.draft_tokens for step in decoding):  # such steps give different numbers of tokens: their mean
        steps = [step for step in decoding if step.generation_tokens >= batch]
        tokens = sum(step.generation_tokens for step in steps)
        return sum(step.seconds for step in steps) * batch / tokens if tokens else None
    seconds = [step.seconds for step in decoding if step.generation_tokens == batch]
    return statistics.median(seconds) if seconds else None


def prefill_rate(sample: BatchTimings) -> float:
    """Return the prompt tokens per second in the steps up to the first that outputs a token."""
    tokens, seconds = 0, 0.0
    for step in sample.steps:
        tokens, seconds = tokens + step.prompt_tokens, seconds + step.seconds
        if step.generation_tokens:
            break
    return tokens / seconds


def metrics(samples: Sequence[BatchTimings]) -> dict[str, float]:
    duration = sum(sample.seconds for sample in samples)
    inputs, outputs = (sum(getattr(s, name) for s in samples) for name in ("input_tokens", "output_tokens"))
    completed = sum(len(sample.e2els) for sample in samples)
    result: dict[str, float] = {
        "completed": completed,
        "duration": duration,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": completed / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = [1e3 * value for sample in samples for value in getattr(sample, f"{name}s")]
        result |= {
            f"mean_{name}_ms": statistics.fmean(values),
            f"median_{name}_ms": statistics.median(values),
            f"std_{name}_ms": statistics.pstdev(values),
            f"p99_{name}_ms": float(np.percentile(values, 99)),
        }
    return result


def spread(values: Sequence[float]) -> float | None:
    """Return the difference of the largest and the smallest value over the median; None for fewer than two."""
    return (max(values) - min(values)) / statistics.median(values) if len(values) > 1 else None


@dataclass(frozen=True)
class CpuTime:
    """CPU time since the machine started, in seconds summed over its cores."""

    total: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls, processes: Iterable[int]) -> CpuTime | None:
        if not _STAT.exists():
            return None
        user, nice, system, idle, waiting, interrupts, soft, stolen = map(int, _STAT.read_text().split()[1:9])
        busy = user + nice + system + interrupts + soft
        own = sum(map(_ticks, {os.getpid(), *processes}))
        ticks = (busy + idle + waiting + stolen, busy, stolen, own)
        return cls(*(count / _TICKS_PER_SECOND for count in ticks))


@dataclass(frozen=True)
class MachineUse:
    """What else used the machine, as shares of the time of all its cores."""

    others: float
    stolen: float

    @classmethod
    def between(cls, before: CpuTime | None, after: CpuTime | None) -> MachineUse | None:
        if before is None or after is None or after.total <= before.total:
            return None
        total = after.total - before.total
        others = (after.busy - before.busy) - (after.own - before.own)
        return cls(max(0.0, others / total), (after.stolen - before.stolen) / total)


def _ticks(process: int) -> int:
    """Return the CPU time of a process and of its ended children, in clock ticks."""
    stat = Path(f"/proc/{process}/stat").read_text()
    return sum(map(int, stat.rpartition(")")[2].split()[11:15]))


def _doubts_of_machine(load: Workload, use: MachineUse | None) -> Iterator[str]:
    if use is not None and use.others > _OTHERS:
        yield f"Other processes used {use.others:.0%} of the machine."
    if use is not None and use.stolen > _STOLEN:
        yield f"The hypervisor gave {use.stolen:.0%} of the machine's time to others (steal)."
    if load.rounds < _FEWEST_ROUNDS:
        yield "One round has no spread: nothing tells how much of a gain is chance (--rounds 3)."


def _doubts_of_batch(report: GainsReport, batch: int) -> Iterator[str]:
    sides = {"baseline": report.baseline, "candidate": report.candidate}
    before, after = (side.batches[batch].decode_ms for side in sides.values())
    gains = report.decode_gains(batch)
    spreads = {"baseline": spread(before), "candidate": spread(after), "gain": spread(gains)}
    wide = [f"{name} {value:.0%}" for name, value in spreads.items() if value is not None and value > _SPREAD]
    if wide:
        yield f"decode steps of different rounds differ by more than {_SPREAD:.0%}: {', '.join(wide)}."
    read = [bytes_of_step(side.info, report.workload, batch) for side in sides.values()]
    ratio = read[0] / read[1]
    if gains and report.candidate.speculation is None and statistics.median(gains) > max(ratio, 1.0) * _NOISE:
        yield (
            f"a gain of {statistics.median(gains):.2f}x is more than the {ratio:.2f}x fewer bytes of a step explain: "
            "caches, or a baseline that is slower than it could be."
        )
    for name, side in sides.items():
        share = side.batches[batch].bandwidth_share
        if share is not None and share > _NOISE and side.speculation is None:
            yield (
                f"the {name} reads at {share:.0%} of the measured bandwidth: its bytes come from caches, or other work "
                "slowed the measurement of the bandwidth."
            )
