"""Amax, histogram and channels of one activation, on the device it lies on, and the tally of all that was measured.

On the CPU the native kernel measures and NaN is noticed at once. On other devices plain torch does, results stay there,
and one copy per sequence fetches them, so that no layer waits for the one before it.
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


def not_finite(name: str, what: str, sequence: int) -> NonFiniteError:
    """The error for a module whose `what` holds NaN or Inf."""
    cure = "the model overflows in this dtype (try float32), or its weights are damaged"
    return NonFiniteError(name, f"NaN or Inf in its {what} in sequence {sequence}; {cure}")


@dataclass(frozen=True)
class Measurement:
    """What one tensor was like.

    Attributes:
        amax: float32 ``[1]`` on the tensor's device; NaN or Inf where the tensor holds either.
        tokens: Its rows.
        histogram: int64 ``[BINS]`` on the tensor's device, or None.
        channel_amax: float32 ``[K]`` on the tensor's device, or None.
    """

    amax: Tensor
    tokens: int
    histogram: Tensor | None
    channel_amax: Tensor | None


def measure(x: Tensor, *, histogram: bool, per_channel: bool) -> Measurement:
    """Measure ``[..., K]`` of any floating dtype that models compute in."""
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
    """``[B, heads, T, head size]`` to float32 ``[heads]``; NaN spreads."""
    return x.detach().abs().amax((0, 2, 3)).float()


def _histogram(rows: Tensor) -> Tensor:
    """`calibration.stats.count_magnitudes` on the device; neither bins nor counts are read back."""
    magnitude = rows.float().view(torch.int32) & torch.iinfo(torch.int32).max
    bins = magnitude >> (FLOAT32.mantissa_bits - MANTISSA_BITS)
    return torch.histc(bins, BINS, min=0, max=BINS - 1).long()  # of integers: one per bin, the last one included


@dataclass
class Tally:
    """The measurements of all sequences, for slots that each stand for one or several linears.

    Attributes:
        slots: Names in the checkpoint that share a slot.
        widths: Of each slot the input's channels.
        rows: Of each sequence the amax and the tokens of all slots.
        kv: Of each attention the amax of K and V per head, by sequence.
    """

    slots: Sequence[tuple[str, ...]]
    widths: Sequence[int]
    rows: dict[int, tuple[Floats, Counts]] = field(default_factory=dict)
    kv: dict[str, dict[int, tuple[Floats, Floats]]] = field(default_factory=dict)
    _histograms: dict[int, Tensor] = field(default_factory=dict)
    _channels: dict[int, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """One more than the largest index of a sequence."""
        return max(self.rows, default=-1) + 1

    def add(
        self, sequence: int, inputs: Sequence[tuple[int, Measurement]], kv: Sequence[tuple[str, Tensor, Tensor]]
    ) -> None:
        """Add one forward pass (of the model, or of a part of it), or nothing of it.

        Args:
            sequence: Its index; passes with the same index add up.
            inputs: Slots and what went into them, in the order of the computation.
            kv: Names of attentions, and the amax of K and V per head.

        Raises:
            NonFiniteError: A measurement is NaN or Inf.
        """
        fetched = iter(_fetch([item.amax for _, item in inputs] + [t for _, k, v in kv for t in (k, v)]))
        amaxes = [float(next(fetched)[0]) for _ in inputs]
        heads = [(name, next(fetched), next(fetched)) for name, _, _ in kv]
        for (slot, _), amax in zip(inputs, amaxes, strict=True):
            if not math.isfinite(amax):
                raise not_finite(self.slots[slot][0], "input", sequence)
        for name, k, v in heads:
            if not (np.isfinite(k).all() and np.isfinite(v).all()):
                raise not_finite(name, "K or V", sequence)
        row, tokens = self.rows.setdefault(
            sequence, (np.zeros(len(self.slots), np.float32), np.zeros(len(self.slots), np.int64))
        )
        for (slot, item), amax in zip(inputs, amaxes, strict=True):
            row[slot] = max(row[slot], amax)
            tokens[slot] += item.tokens
            _accumulate(self._histograms, slot, item.histogram, torch.add)
            _accumulate(self._channels, slot, item.channel_amax, torch.maximum)
        for name, k, v in heads:
            seen = self.kv.setdefault(name, {}).setdefault(sequence, (np.zeros_like(k), np.zeros_like(v)))
            np.maximum(seen[0], k, out=seen[0])
            np.maximum(seen[1], v, out=seen[1])

    def inputs(self, *, histogram: bool, per_channel: bool) -> dict[str, ModuleStats]:
        """The statistics by name; also those of slots that nothing reached."""
        amax = np.zeros((len(self.slots), self.sequences), np.float32)
        tokens = np.zeros((len(self.slots), self.sequences), np.int64)
        for sequence, row in self.rows.items():
            amax[:, sequence], tokens[:, sequence] = row
        found: dict[str, ModuleStats] = {}
        for slot, names in enumerate(self.slots):
            counts = _host(self._histograms.get(slot), BINS if histogram else None, np.int64)
            channels = _host(self._channels.get(slot), self.widths[slot] if per_channel else None, np.float32)
            found |= dict.fromkeys(names, ModuleStats(amax[slot], tokens[slot], counts, channels))
        return found

    def kv_stats(self) -> dict[str, KVStats]:
        """The statistics of every attention that was seen."""
        found = {}
        for name, by_sequence in self.kv.items():
            heads = len(next(iter(by_sequence.values()))[0])
            k_amax, v_amax = (np.zeros((self.sequences, heads), np.float32) for _ in range(2))
            for sequence, (k, v) in by_sequence.items():
                k_amax[sequence], v_amax[sequence] = k, v
            found[name] = KVStats(k_amax, v_amax)
        return found


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
    """Float vectors as arrays, with one copy per device."""
    fetched: list[Floats] = [np.empty(0, np.float32)] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[index] for index in here]).cpu().numpy()
        ends = np.cumsum([tensors[index].numel() for index in here])
        for index, part in zip(here, np.split(flat, ends[:-1]), strict=True):
            fetched[index] = part
    return fetched
