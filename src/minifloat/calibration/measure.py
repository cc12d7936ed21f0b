"""Amax, histogram and amax per channel of an activation, measured on its device, and the tally of all measurements.

On the CPU the native kernel measures, and NaN is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minifloat.calibration.stats import KVStats, ModuleStats
from minifloat.errors import NonFiniteError
from minifloat.kernels.observe import observe
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.histogram import BINS, MANTISSA_BITS, Counts, Floats


def non_finite_error(module: str, tensor: str, sequence: int) -> NonFiniteError:
    """Return the error for a module with NaN or Inf in a tensor, such as ``"input"`` or ``"K or V"``."""
    cure = "the model overflows in this dtype (try float32), or its weights are damaged"
    return NonFiniteError(module, f"NaN or Inf in its {tensor} in sequence {sequence}; {cure}")


@dataclass(frozen=True)
class Measurement:
    """The statistics of one tensor."""

    amax: Tensor  # float32 ``[1]`` on the tensor's device; NaN or Inf if the tensor holds either
    tokens: int
    histogram: Tensor | None  # int64 ``[BINS]`` on the tensor's device, or None
    channel_amax: Tensor | None  # float32 ``[K]`` on the tensor's device, or None


def measure(x: Tensor, *, histogram: bool, per_channel: bool) -> Measurement:
    """Return the statistics of a tensor ``[..., K]`` of any floating-point dtype that models compute in."""
    rows = x.detach().reshape(-1, x.shape[-1])
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device) if histogram else None
    if not rows.numel():
        amax = torch.zeros(1, device=x.device)
    elif x.device.type == "cpu":
        largest, nonfinite = observe(rows.contiguous(), None if counts is None else counts.numpy())
        amax = torch.tensor([math.nan if nonfinite else largest])
    else:
        amax = torch.linalg.vector_norm(rows, math.inf, dtype=torch.float32).view(1)
        if counts is not None:
            counts = _histogram(rows)
    channels = None
    if per_channel:
        empty = torch.zeros(rows.shape[1], device=x.device)
        channels = torch.maximum(rows.amax(0), -rows.amin(0)).float() if rows.numel() else empty
    return Measurement(amax, len(rows), counts, channels)


def head_amax(x: Tensor) -> Tensor:
    """Return the amax of each head, float32 ``[heads]``, of a tensor ``[B, heads, T, head size]``; NaN gives NaN."""
    return x.detach().abs().amax((0, 2, 3)).float()


def _histogram(rows: Tensor) -> Tensor:
    """Return the counts of `numerics.histogram.count_magnitudes`, computed on the device without reading back."""
    magnitude = rows.float().view(torch.int32) & torch.iinfo(torch.int32).max
    bins = magnitude >> (FLOAT32.mantissa_bits - MANTISSA_BITS)
    return torch.histc(bins, BINS, min=0, max=BINS - 1).long()  # one integer value per bin, including the last bin


@dataclass
class Tally:
    """The measurements of all sequences. A slot is one measured input, which several linears may share."""

    slots: Sequence[tuple[str, ...]]
    widths: Sequence[int]
    rows: dict[int, tuple[Floats, Counts]] = field(default_factory=dict)
    kv: dict[str, dict[int, tuple[Floats, Floats]]] = field(default_factory=dict)
    _histograms: dict[int, Tensor] = field(default_factory=dict)
    _channels: dict[int, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """Number of sequences: one more than the largest index."""
        return max(self.rows, default=-1) + 1

    def add(
        self, sequence: int, inputs: Sequence[tuple[int, Measurement]], kv: Sequence[tuple[str, Tensor, Tensor]]
    ) -> None:
        """Add one forward pass of the model, or of a part of it; on an error nothing is added."""
        fetched = iter(_fetch([entry.amax for _, entry in inputs] + [t for _, k, v in kv for t in (k, v)]))
        amaxes = [float(next(fetched)[0]) for _ in inputs]
        heads = [(name, next(fetched), next(fetched)) for name, _, _ in kv]
        for (slot, _), amax in zip(inputs, amaxes, strict=True):
            if not math.isfinite(amax):
                raise non_finite_error(self.slots[slot][0], "input", sequence)
        for name, k, v in heads:
            if not (np.isfinite(k).all() and np.isfinite(v).all()):
                raise non_finite_error(name, "K or V", sequence)
        row, tokens = self.rows.setdefault(
            sequence, (np.zeros(len(self.slots), np.float32), np.zeros(len(self.slots), np.int64))
        )
        for (slot, measurement), amax in zip(inputs, amaxes, strict=True):
            row[slot] = max(row[slot], amax)
            tokens[slot] += measurement.tokens
            _accumulate(self._histograms, slot, measurement.histogram, torch.add)
            _accumulate(self._channels, slot, measurement.channel_amax, torch.maximum)
        for name, k, v in heads:
            k_total, v_total = self.kv.setdefault(name, {}).setdefault(sequence, (np.zeros_like(k), np.zeros_like(v)))
            np.maximum(k_total, k, out=k_total)
            np.maximum(v_total, v, out=v_total)

    def inputs(self, *, histogram: bool, per_channel: bool) -> dict[str, ModuleStats]:
        """Return the statistics of each linear's input by name, including slots that no token reached."""
        amax = np.zeros((len(self.slots), self.sequences), np.float32)
        tokens = np.zeros((len(self.slots), self.sequences), np.int64)
        for sequence, row in self.rows.items():
            amax[:, sequence], tokens[:, sequence] = row
        stats: dict[str, ModuleStats] = {}
        for slot, names in enumerate(self.slots):
            counts = _host(self._histograms.get(slot), BINS if histogram else None, np.int64)
            channels = _host(self._channels.get(slot), self.widths[slot] if per_channel else None, np.float32)
            stats |= dict.fromkeys(names, ModuleStats(amax[slot], tokens[slot], counts, channels))
        return stats

    def kv_stats(self) -> dict[str, KVStats]:
        """Return the statistics of each attention that ran."""
        stats = {}
        for name, by_sequence in self.kv.items():
            heads = len(next(iter(by_sequence.values()))[0])
            k_amax, v_amax = (np.zeros((self.sequences, heads), np.float32) for _ in range(2))
            for sequence, (k, v) in by_sequence.items():
                k_amax[sequence], v_amax[sequence] = k, v
            stats[name] = KVStats(k_amax, v_amax)
        return stats


def _accumulate(totals: dict[int, Tensor], slot: int, new: Tensor | None, combine: Any) -> None:
    if new is None:
        return
    total = totals.get(slot)
    totals[slot] = new.clone() if total is None else combine(total, new.to(total.device), out=total)


def _host(total: Tensor | None, size: int | None, dtype: type) -> Any:
    if size is None:
        return None
    return np.zeros(size, dtype) if total is None else total.cpu().numpy().copy()


def _fetch(tensors: Sequence[Tensor]) -> list[Floats]:
    """Return float vectors as arrays, with one copy per device."""
    fetched: list[Floats] = [np.empty(0, np.float32)] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        on_device = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[index] for index in on_device]).cpu().numpy()
        ends = np.cumsum([tensors[index].numel() for index in on_device])
        for index, part in zip(on_device, np.split(flat, ends[:-1]), strict=True):
            fetched[index] = part
    return fetched
