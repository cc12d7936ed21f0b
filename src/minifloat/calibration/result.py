"""`Calibration`: the statistics of a calibration, the rule that turns them into scales, and their files.

The statistics are two files beside each other, ``NAME.safetensors`` and ``NAME.held-out.safetensors``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.calibration.rules import Rule, parse_rule
from minifloat.calibration.stats import SCHEMA_VERSION, ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.checkpoint.array_file import (
    ArrayContent,
    ArrayFile,
    ArrayFormat,
    read_arrays,
    write_arrays,
)
from minifloat.checkpoint.schema import any_object, exact_fields, integer, list_of, map_of, text
from minifloat.errors import DestinationError, StatsError
from minifloat.numerics.histogram import BINS
from minifloat.report.document import ShortReport

_index = integer(0, 2**63)

#: Rows of amax and tokens are `[S]`, rows of histogram `[used bins]`; channel_amax holds its rows end to end; k_amax
#: and v_amax are `[S, heads of all attentions]`. The record names the rows of each module.
STATS_FORMAT = ArrayFormat(
    "activation statistics",
    SCHEMA_VERSION,
    exact_fields(
        {
            "model": exact_fields({field.name: text for field in fields(ModelIdentity)}),
            "sequences": _index,
            "tokens": _index,
            "data": any_object,
            "inputs": map_of(list_of(_index, 4, nullable=True)),
            "channels": list_of(_index),
            "kv": map_of(_index),
        }
    ),
    "calibrate again",
    {
        "amax": ("F32", 2),
        "tokens": ("I64", 2),
        "histogram": ("I64", 2),
        "bins": ("I64", 1),
        "channel_amax": ("F32", 1),
        "k_amax": ("F32", 2),
        "v_amax": ("F32", 2),
    },
)

_Arrays = Mapping[str, npt.NDArray[Any]]


class _Rows:
    """A list of distinct arrays."""

    def __init__(self) -> None:
        self.rows: list[npt.NDArray[Any]] = []
        self._index: dict[bytes, int] = {}

    def add(self, row: npt.NDArray[Any] | None) -> int | None:
        """Add a row unless an equal one exists, and return its index; return None for None."""
        if row is None:
            return None
        index = self._index.setdefault(row.tobytes(), len(self.rows))
        if index == len(self.rows):
            self.rows.append(row)
        return index


def write_stats(stats: ActivationStats, path: str | os.PathLike[str]) -> None:
    """Write the statistics to a file in one step: write a temporary file beside it, sync the file, and rename it."""
    write_arrays(Path(path), STATS_FORMAT, encode_stats(stats))


def read_stats(path: str | os.PathLike[str]) -> ActivationStats:
    try:
        return decode_stats(read_arrays(Path(path), STATS_FORMAT))
    except FileNotFoundError:
        raise StatsError(Path(path), "no such file; `minifloat calibrate` writes one") from None


def encode_stats(stats: ActivationStats) -> ArrayContent:
    amax, tokens, histograms, channels = _Rows(), _Rows(), _Rows(), _Rows()
    inputs = {
        name: [
            amax.add(module.amax),
            tokens.add(module.tokens),
            histograms.add(module.histogram),
            channels.add(module.channel_amax),
        ]
        for name, module in sorted(stats.inputs.items())
    }
    kv = sorted(stats.kv.items())
    no_heads = np.empty((stats.sequences, 0), np.float32)
    counts = _stack(histograms.rows, BINS, np.int64)
    bins = np.flatnonzero(counts.any(axis=0))
    arrays = {
        "amax": _stack(amax.rows, stats.sequences, np.float32),
        "tokens": _stack(tokens.rows, stats.sequences, np.int64),
        "histogram": counts[:, bins],
        "bins": bins,
        "channel_amax": np.concatenate([*channels.rows, np.empty(0, np.float32)]),
        "k_amax": np.concatenate([*(entry.k_amax for _, entry in kv), no_heads], axis=1),
        "v_amax": np.concatenate([*(entry.v_amax for _, entry in kv), no_heads], axis=1),
    }
    record = {
        "model": asdict(stats.model),
        "sequences": stats.sequences,
        "tokens": stats.tokens,
        "data": dict(stats.data),
        "inputs": inputs,
        "channels": [len(row) for row in channels.rows],
        "kv": {name: entry.heads for name, entry in kv},
    }
    return ArrayContent(record, arrays)


def _stack(rows: list[npt.NDArray[Any]], columns: int, dtype: type) -> npt.NDArray[Any]:
    return np.stack(rows) if rows else np.empty((0, columns), dtype)


def decode_stats(file: ArrayFile) -> ActivationStats:
    try:
        return _decode(file.record, {name: file.array(name) for name in file.names})
    except (ValueError, IndexError, TypeError) as error:
        raise StatsError(file.path, f"not valid: {type(error).__name__}: {error}; calibrate again") from None


def _decode(record: Mapping[str, Any], arrays: _Arrays) -> ActivationStats:
    """Return the statistics that `encode_stats` encoded; an exception means that they are not valid."""
    histograms = np.zeros((len(arrays["histogram"]), BINS), np.int64)
    histograms[:, _ascending(arrays["bins"])] = arrays["histogram"]
    channels = _cut(arrays["channel_amax"], record["channels"])
    inputs = {
        name: ModuleStats(
            arrays["amax"][amax],
            arrays["tokens"][tokens],
            None if histogram is None else histograms[histogram],
            None if channel is None else channels[channel],
        )
        for name, (amax, tokens, histogram, channel) in record["inputs"].items()
    }
    heads = record["kv"]
    k_amax = _cut(arrays["k_amax"], list(heads.values()))
    v_amax = _cut(arrays["v_amax"], list(heads.values()))
    kv = {name: KVStats(k, v) for name, k, v in zip(heads, k_amax, v_amax, strict=True)}
    identity = ModelIdentity(**record["model"])
    return ActivationStats(identity, record["sequences"], record["tokens"], dict(record["data"]), inputs, kv)


def _cut(array: npt.NDArray[Any], lengths: list[int]) -> list[npt.NDArray[Any]]:
    """Return consecutive pieces of the last axis with these lengths, which must add up to its size."""
    ends = list(itertools.accumulate(lengths, initial=0))
    if ends[-1] != array.shape[-1]:
        raise ValueError(f"pieces of {ends[-1]} columns, expected {array.shape[-1]}")
    return [array[..., begin:end] for begin, end in itertools.pairwise(ends)]


def _ascending(bins: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if bins.size and (bins[0] < 0 or (np.diff(bins) <= 0).any()):
        raise ValueError("the bins of the histograms are not ascending")
    return bins


@dataclass(frozen=True, repr=False)
class Calibration(ShortReport):
    """Activation statistics, and how `quantize_checkpoint` turns them into static scales.

    Attributes:
        stats: Statistics of the calibration set.
        rule: Computes the amax of a module from its statistics.
        held_out: Statistics of other text, with histograms; None: there is no held-out text.
        max_saturation: Largest fraction of held-out elements of any module that may saturate; None: no limit.
    """

    stats: ActivationStats
    rule: Rule = field(default_factory=lambda: parse_rule("max"))
    held_out: ActivationStats | None = None
    max_saturation: float | None = None

    def headline(self) -> dict[str, str]:
        """Return the first things to know, for `ShortReport`."""
        held_out = "none" if self.held_out is None else f"{self.held_out.tokens:,} tokens"
        return {
            "text": f"{self.stats.sequences:,} sequences, {self.stats.tokens:,} tokens",
            "held out": held_out,
            "rule": str(self.rule),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the rule and the calibration set as JSON values."""
        return {
            "rule": str(self.rule),
            "data": dict(self.stats.data),
            "sequences": self.stats.sequences,
            "tokens": self.stats.tokens,
            "held_out_tokens": None if self.held_out is None else self.held_out.tokens,
        }

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write the statistics, with those of the held-out text in a file beside them, and return the paths.

        The rule is not written: the statistics serve every rule.

        Raises:
            DestinationError: A file exists and `overwrite` is False, or the folder does not exist.
            StorageError: The system refused to write.
        """
        target = Path(path)
        pairs = [(target, self.stats)] + ([(held_out_path(target), self.held_out)] if self.held_out else [])
        require_free([file for file, _ in pairs], overwrite=overwrite)
        for file, stats in pairs:
            write_stats(stats, file)
        return tuple(file for file, _ in pairs)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], rule: str | Rule = "max", *, max_saturation: float | None = None
    ) -> Calibration:
        """Return the statistics that `save` wrote; the held-out file may be missing.

        Args:
            path: The file.
            rule: A `Rule`, or the text of one, such as ``percentile``.
            max_saturation: As the attribute.

        Raises:
            StatsError: A file is damaged, or has another version.
            UnknownNameError: There is no such rule.
        """
        held_out = held_out_path(Path(path))
        return cls(
            read_stats(path),
            parse_rule(rule) if isinstance(rule, str) else rule,
            read_stats(held_out) if held_out.exists() else None,
            max_saturation,
        )


def held_out_path(path: Path) -> Path:
    """Return the file of the held-out statistics beside a file of statistics."""
    return path.with_name(f"{path.stem}.held-out{path.suffix}")


def require_free(files: Sequence[Path], *, overwrite: bool) -> None:
    """Raise an error if a file cannot be written; call it before the work, not after an hour of it."""
    for file in files:
        if not file.parent.is_dir():
            raise DestinationError(f"{file}: the folder to write it in does not exist; create that one first")
        if file.is_dir() or (file.exists() and not overwrite):
            raise DestinationError(f"{file}: exists already; choose another name or use --overwrite")
