"""What a run with data will take, said before it begins, and refused where memory or disk cannot hold it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from minifloat.calibration.data import SourceLike, as_sources
from minifloat.calibration.options import TextOptions
from minifloat.calibration.own_text import own_text_path, sequences_written
from minifloat.calibration.readers import OWN_TEXT, locate
from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.kernels.memory import available_memory
from minifloat.kernels.speed import measure_product_rate
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.roles import expert_group
from minifloat.model.plan.tensor_plan import QuantizationPlan, module_name
from minifloat.quantize.amount import enough_text, fewest_sequences
from minifloat.quantize.data import DataOptions
from minifloat.quantize.estimate import (
    WEIGHTS_SHARE,
    Rates,
    Search,
    Shapes,
    Tokens,
    Work,
    layers_of,
    rounding_disk,
    rounding_memory,
    rounding_work,
    visited_share,
    writing_seconds,
)
from minifloat.quantize.report import duration_text
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.rates import measure_rates
from minifloat.report.text import size_text

#: Suffix of the folder beside the destination in which finished layers are kept.
WORK_SUFFIX = ".minifloat-rounding"
#: A rate that every machine has, and the seconds with it below which rates are not measured.
_SLOW, _NOT_MEASURED = 1e10, 20.0


@dataclass(frozen=True)
class Writing:
    """The text that the model writes."""

    sequences: int
    seconds: float
    memory: int
    copy: int  # bytes of the FP8 copy that writes it where the weights do not fit in memory; 0: there is none


@dataclass(frozen=True)
class Searching:
    """What a run takes beside rounding once."""

    what: str  # is measured first
    seconds: float
    disk: int
    again: int  # roundings after the first, at most


@dataclass(frozen=True)
class DataCost:
    """Tokens, time, memory and disk of a run with data; seconds are estimated."""

    tokens: Tokens
    writing: Writing | None  # None: all text is in files
    seconds: float  # of rounding
    memory: int
    disk: int  # bytes of the work folder
    memory_free: int
    disk_free: int
    searching: Searching | None = None  # None: the model is rounded once

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return {**asdict(self), "problems": list(self.problems())}

    def text(self) -> str:
        tokens, writing = self.tokens, self.writing
        parts = f"{tokens.kept:,} for statistics, {tokens.choosing:,} to choose with, {tokens.reported:,} only reported"
        words = f"Codes are chosen with {tokens.total:,} tokens of text ({parts})"
        if writing is not None:
            words += (
                f", of which the model writes {writing.sequences * tokens.length:,} in about "
                f"{duration_text(writing.seconds)} with {size_text(writing.memory)} of memory"
            )
            words += f" from an FP8 copy that takes {size_text(writing.copy)} of disk meanwhile" if writing.copy else ""
            words += " (--data FILE needs no writing)"
        return (
            f"{words}; rounding takes about {duration_text(self.seconds)}, {size_text(self.memory)} of memory and "
            f"{size_text(self.disk)} of disk beside the output.{self._searching()}"
        )

    def _searching(self) -> str:
        search = self.searching
        if search is None:
            return ""
        disk = f" with up to {size_text(search.disk)} of disk" if search.disk else ""
        words = f" Before it, {search.what} measured, in about {duration_text(search.seconds)}{disk}"
        if not search.again:
            return f"{words}."
        longest = self.seconds * (1 + search.again) + search.seconds
        again = f"the model is rounded up to {search.again} more times"
        return f"{words}; after it, {again}, in {duration_text(longest)} altogether."

    def problems(self) -> tuple[str, ...]:
        """Return why the run cannot end well, each with the cure; nothing if it can."""
        found, writing = [], self.writing
        if writing is not None and writing.memory > self.memory_free:
            found.append(
                f"the model that writes its own text takes {size_text(writing.memory)} of memory, in FP8, and "
                f"{size_text(self.memory_free)} are available: give the text in a file (--data FILE)"
            )
        if writing is not None and writing.copy > self.disk_free:
            found.append(
                f"the FP8 copy that writes the model's own text takes {size_text(writing.copy)} of disk, and "
                f"{size_text(self.disk_free)} are free: give the text in a file (--data FILE)"
            )
        if self.memory > self.memory_free:
            found.append(
                f"rounding with data takes {size_text(self.memory)} of memory for one layer and the statistics of its "
                f"widest linear, and {size_text(self.memory_free)} are available: take a machine with more, or leave "
                "the widest linears out (--exclude)"
            )
        if self.disk > self.disk_free:
            found.append(
                f"rounding with data takes {size_text(self.disk)} of disk beside the output, and "
                f"{size_text(self.disk_free)} are free: choose an output folder on a larger disk"
            )
        return tuple(found)

    def require(self) -> None:
        """Refuse a run that cannot end well."""
        for problem in self.problems():
            raise UsageError(problem)


def cost_of(
    checkpoint: Checkpoint, plan: QuantizationPlan, data: DataOptions, destination: Path, search: Search | None = None
) -> tuple[TextOptions, Path, DataCost]:
    """Return the text with its number of sequences, the file of own text, and what the run takes.

    `search`: what it does beside rounding once.
    """
    for source in as_sources(data.sources):
        if source.name != OWN_TEXT:
            locate(source)  # a name that does not exist is an error before the cost is said
    file = own_text_path(checkpoint.path, destination, data.text.seq_len)
    files = file, beside(destination, WORK_SUFFIX)
    rates, text = None, data.text
    if data.minutes is not None:
        rates, text = _text_in_time(checkpoint, plan, data, data.minutes, files, search)
    text = enough_text(text, plan, checkpoint.config)
    once = data_cost(checkpoint, plan, data.sources, text, data.rounding, destination, files, rates)
    if search is None:
        return text, file, once
    rates = rates or _rates(search.work, checkpoint, plan, 0, text, data.rounding.device)
    return text, file, _with_search(once, search, plan, rates)


def _with_search(once: DataCost, search: Search, plan: QuantizationPlan, rates: Rates) -> DataCost:
    """Return the cost with that of a search; finished layers of each rounding stay until the end."""
    searching = Searching(search.what, search.work.seconds(rates), search.disk, search.again)
    disk = max(once.disk, search.disk) + search.again * _codes_bytes(plan)
    return replace(once, disk=disk, searching=searching)


def _codes_bytes(plan: QuantizationPlan) -> int:
    return sum(out.nbytes for tensor in plan.tensors if tensor.parts for out in tensor.outputs)


def _text_in_time(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    data: DataOptions,
    minutes: float,
    files: tuple[Path, Path],
    search: Search | None,
) -> tuple[Rates, TextOptions]:
    """Return the rates of this machine, and the text that it can write, measure and round once with in so many minutes.

    A run that was interrupted goes on with the text that it wrote.
    """
    if data.text.samples is not None:
        raise UsageError("give the number of sequences (--calibration-samples) or the time (--minutes), not both")
    if all(source.name != OWN_TEXT for source in as_sources(data.sources)):
        raise UsageError("--minutes needs text that the model writes (--data self); files have --calibration-samples")
    rates = measure_rates(plan.scheme, torch.bfloat16, data.rounding.device)
    least = fewest_sequences(data.text, plan)
    written = sequences_written(files[0], data.text.seq_len)
    if files[1].exists() and written >= least:
        return rates, replace(data.text, samples=written)

    def seconds(sequences: int) -> float:
        text = replace(data.text, samples=sequences)
        tokens, missing = Tokens.of(sequences, text), _to_write(data.sources, text, files[0])
        writing = _writing(checkpoint, plan, missing, text, rates).seconds if missing else 0.0
        work = _work(checkpoint, plan, tokens, data.rounding)
        return (work if search is None else work + search.work).seconds(rates) + writing

    samples = least
    while seconds(more := samples + max(samples // 16, 1)) <= 60.0 * minutes:
        samples = more
    return rates, replace(data.text, samples=samples)


def beside(destination: Path, suffix: str) -> Path:
    """Return the path beside the output folder that has its name and a suffix."""
    return destination.absolute().with_name(destination.absolute().name + suffix)


def data_cost(
    checkpoint: Checkpoint,
    plan: QuantizationPlan,
    sources: Sequence[SourceLike],
    text: TextOptions,
    options: RoundingOptions,
    output: Path,
    files: tuple[Path, Path],
    rates: Rates | None = None,
) -> DataCost:
    """Return the cost of a run whose number of sequences is known; `files`: of own text, and the work folder."""
    tokens = Tokens.of(text.samples or 0, text)
    shapes = _shapes(plan)
    itemsize = max((_itemsize(tensor.source.dtype) for tensor in plan.tensors if tensor.parts), default=2)
    work = _work(checkpoint, plan, tokens, options)
    sequences = _to_write(sources, text, files[0])
    rates = rates or _rates(work, checkpoint, plan, sequences, text, options.device)
    return DataCost(
        tokens,
        _writing(checkpoint, plan, sequences, text, rates) if sequences else None,
        work.seconds(rates),
        rounding_memory(shapes, itemsize),
        rounding_disk(shapes, checkpoint.config, tokens, itemsize, _codes_bytes(plan)) + plan.output_bytes,
        available_memory("cpu"),
        shutil.disk_usage(output.absolute().parent).free + _bytes_in(files[1]),
    )


def _shapes(plan: QuantizationPlan) -> Shapes:
    return {part.module: part.shape for tensor in plan.tensors for part in tensor.parts}


def _work(checkpoint: Checkpoint, plan: QuantizationPlan, tokens: Tokens, options: RoundingOptions) -> Work:
    return rounding_work(_shapes(plan), checkpoint.config, tokens, follows=options.method.follows_quantized)


def _itemsize(dtype: str) -> int:
    return 4 if dtype in ("F32", "F64") else 2


def _to_write(sources: Sequence[SourceLike], text: TextOptions, file: Path) -> int:
    """Return the number of sequences that the model has to write, without those that a file has."""
    parsed = as_sources(sources)
    own = sum(source.weight for source in parsed if source.name == OWN_TEXT)
    wanted = round((text.samples or 0) * own / math.fsum(source.weight for source in parsed)) if own else 0
    return max(wanted - sequences_written(file, text.seq_len), 0) if wanted else 0


def _rates(
    work: Work, checkpoint: Checkpoint, plan: QuantizationPlan, sequences: int, text: TextOptions, device: Any
) -> Rates:
    """Return the rates of this machine, measured as exactly as the time is long."""
    slow = Rates.of_product(_SLOW)
    writing = _writing(checkpoint, plan, sequences, text, slow).seconds if sequences else 0.0
    if work.seconds(slow) + writing < _NOT_MEASURED:
        return slow
    usual = Rates.of_product(measure_product_rate())
    return usual if work.seconds(usual) < _NOT_MEASURED else measure_rates(plan.scheme, torch.bfloat16, device)


def _writing(
    checkpoint: Checkpoint, plan: QuantizationPlan, sequences: int, text: TextOptions, rates: Rates
) -> Writing:
    share, weights, nbytes, copied = visited_share(checkpoint.config), 0.0, 0, 0
    for tensor in plan.tensors:
        size, stored = math.prod(tensor.source.shape), checkpoint.stored_bytes(tensor.source)
        nbytes += stored
        copied += size if tensor.parts else stored
        if tensor.role is not Role.EMBEDDING or checkpoint.config.get("tie_word_embeddings"):
            weights += size * (share if expert_group(module_name(tensor.source)) else 1.0)
    fits = nbytes <= WEIGHTS_SHARE * available_memory("cpu")
    layers = layers_of(plan.modules)
    seconds = writing_seconds(weights, nbytes if fits else copied, layers, sequences, text.seq_len, rates)
    return Writing(sequences, seconds, nbytes if fits else copied, 0 if fits else copied)


def _bytes_in(folder: Path) -> int:
    """Return the bytes that an earlier, interrupted run left in its work folder; this run continues or replaces it."""
    return sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
