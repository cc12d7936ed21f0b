"""The options of calibrated rounding."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from minifloat.quantize.rounding.methods import METHODS, Method


@dataclass(frozen=True)
class TuneOptions:
    """How codes and norms are tuned."""

    steps: int = 100
    batch: int = 8
    rate: float = 0.003
    norm_rate: float = 0.001
    every: int = 25
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return asdict(self)


DEFAULT_TUNING = TuneOptions()


DEFAULT_METHOD = "match"


@dataclass(frozen=True)
class RoundingOptions:
    """How codes are chosen with data.

    Attributes:
        method: Chooses the codes of each stage.
        fold: Whether to fold scales of input channels into the tensors before, where that lowers the error.
        kv_cache: Whether to record the ranges of keys and values, for the scales of an FP8 KV cache.
        max_memory: Bytes of weights that may be in memory at a time; None: no limit beyond one layer.
        device: Where layers run and statistics are computed.
        tuning: Steps and rates of a method that trains.
    """

    method: Method = METHODS[DEFAULT_METHOD]
    fold: bool = True
    kv_cache: bool = False
    max_memory: int | None = None
    device: str | torch.device = "cpu"
    tuning: TuneOptions = DEFAULT_TUNING

    def to_dict(self) -> dict[str, Any]:
        """Return what determines the result, as JSON values."""
        tuning = {"tuning": self.tuning.to_dict()} if self.method.trains else {}
        return {"method": self.method.name, "fold": self.fold, "kv_cache": self.kv_cache, **tuning}


DEFAULT_ROUNDING = RoundingOptions()
