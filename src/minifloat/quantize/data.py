"""The data that codes are chosen with, as the caller gives it, what was made with it, and what it gains.

The held-out text is a random part of the calibration text, so it cannot show that the calibration text is of another
kind than what the model will see; only `compare` on other text can.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from minifloat.calibration.data import CalibrationSet, SourceLike, interleave
from minifloat.calibration.options import TextOptions
from minifloat.calibration.readers import Source
from minifloat.calibration.result import Calibration
from minifloat.calibration.rules import DEFAULT_RULE
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.model.plan.overrides import Override
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.estimate import DEFAULT_TEXT
from minifloat.quantize.rounding.budget import WithinBudget
from minifloat.quantize.rounding.damage import KLMeans
from minifloat.quantize.rounding.input_choice import InputChoice
from minifloat.quantize.rounding.methods import DEFAULT_ROUNDING, RoundingOptions, get_method
from minifloat.quantize.rounding.rounded_model import RoundedModel
from minifloat.quantize.rounding.texts import SplitText

#: Standard errors that the method must be worse by before a source is named.
_SURE = 2.0


@dataclass(frozen=True)
class SourceGain:
    """The divergence from the original model on the held-out sequences of one source."""

    name: str
    sequences: int
    tokens: int
    nearest: float  # KL of rounding to nearest, in nats per token
    method: float  # KL of the method, in nats per token
    loss: float
    loss_error: float | None  # standard error of `loss`; None: there is one sequence


def source_gains(
    record: Mapping[str, Any], reported: CalibrationSet, fraction: float, found: Mapping[str, Any]
) -> tuple[SourceGain, ...]:
    """Return the divergence on each source; nothing if there is one source."""
    sources = record.get("sources", ())
    if len(sources) < 2 or not found.get("method_by_sequence"):
        return ()
    mixed = interleave([[number] * source["sequences"] for number, source in enumerate(sources)])
    numbers = SplitText.of(CalibrationSet(tuple((number,) for number in mixed)), fraction).reported.sequences
    figures = zip(map(len, reported.sequences), found["nearest_by_sequence"], found["method_by_sequence"], strict=True)
    rows = [(number, *figure) for (number,), figure in zip(numbers, figures, strict=True)]
    return tuple(
        _gain(source["name"], own)
        for number, source in enumerate(sources)
        if (own := [row[1:] for row in rows if row[0] == number])
    )


def _gain(name: str, rows: Sequence[tuple[int, float, float]]) -> SourceGain:
    """Return the divergence on the sequences of one source, given as (tokens, nearest, method)."""
    tokens = [count for count, _, _ in rows]
    nearest, method = (KLMeans(tokens, [row[column] for row in rows]) for column in (1, 2))
    loss = KLMeans([1] * len(rows), [method - nearest for _, nearest, method in rows])
    return SourceGain(name, len(rows), nearest.total, nearest.mean, method.mean, loss.mean, loss.error)


def source_warnings(gains: Sequence[SourceGain], method: str) -> tuple[str, ...]:
    """Return a warning for each source on which a method is surely worse than rounding to nearest."""
    return tuple(
        f"WARNING: on held-out text of {gain.name}, {method} is worse than rounding to nearest "
        f"({gain.method:.4f} against {gain.nearest:.4f} nats): give this source a larger weight, or more text."
        for gain in gains
        if gain.loss_error is not None and gain.loss > _SURE * gain.loss_error
    )


@dataclass(frozen=True)
class DataOptions:
    """Text, and how codes are chosen with it.

    Attributes:
        sources: Files, folders or data sets, or ``"self"`` for text that the model itself writes.
        text: How text becomes sequences. The held-out part must not be empty. With `samples=None`, the default, 284
            sequences, or as many more as the widest linear needs.
        rounding: Method, folding, device.
        minutes: Time for the text that the model writes and for rounding: as many sequences as fit, by an estimate from
            the speed of this machine; needs the source ``"self"`` and `samples=None`.
        announce: Called with one sentence on tokens, time, memory and disk before text is written or read.
    """

    sources: Sequence[SourceLike]
    text: TextOptions = DEFAULT_TEXT
    rounding: RoundingOptions = DEFAULT_ROUNDING
    minutes: float | None = None
    announce: Callable[[str], None] | None = None

    @classmethod
    def of(cls, data: DataOptions | SourceLike | Sequence[SourceLike] | None, method: str | None) -> DataOptions | None:
        """Return the options that the arguments `data` and `method` of `quantize_checkpoint` stand for."""
        chosen = None if method is None else get_method(method)
        if isinstance(data, DataOptions):
            if chosen is not None:
                raise UsageError("give the method either in `data` or as `method`, not in both")
            return data
        if data is None or (not isinstance(data, str | os.PathLike | Source) and not data):
            if chosen is not None and chosen.needs_data:
                raise UsageError(
                    f"the method {chosen.name} needs text: give --data FILE, or --data self for text that the model "
                    "writes itself"
                )
            return None
        sources = [data] if isinstance(data, str | os.PathLike | Source) else list(data)
        return cls(sources, rounding=DEFAULT_ROUNDING if chosen is None else RoundingOptions(method=chosen))


@dataclass(frozen=True)
class RoundedOutput:
    """The output tensors that were made with data."""

    model: RoundedModel
    recipe: dict[str, Any]
    notes: tuple[str, ...]
    within: WithinBudget | None = None
    by_source: tuple[SourceGain, ...] = ()
    inputs: InputChoice | None = None

    @property
    def scheme(self) -> Scheme:
        """The scheme of most weights, as a budget chose it."""
        assert self.within is not None
        return self.within.plan.scheme

    @property
    def overrides(self) -> list[Override]:
        """The overrides for all other weights, as a budget chose them."""
        assert self.within is not None
        return list(self.within.plan.overrides)

    def calibration(self, checkpoint: Checkpoint) -> Calibration | None:
        """Return the ranges of inputs, keys and values as calibration by the rule ``max``; None if there are none."""
        if not self.model.inputs and not self.model.kv:
            return None
        inputs = {
            row["module"]: ModuleStats(
                np.array([row["amax"] if row["tokens"] else 0.0], np.float32), np.array([row["tokens"]], np.int64)
            )
            for row in self.model.inputs
        }
        kv = {
            row["module"]: KVStats(np.array([row["k"]], np.float32), np.array([row["v"]], np.float32))
            for row in self.model.kv
        }
        tokens = int(self.recipe["tokens"])
        stats = ActivationStats(ModelIdentity.of(checkpoint), 1, tokens, self.recipe["data"], inputs, kv)
        return Calibration(stats, DEFAULT_RULE)

    def to_dict(self) -> dict[str, Any]:
        """Return method, text and errors as JSON values."""
        weights = [{key: value for key, value in row.items() if key != "stats"} for row in self.model.weights.values()]
        budget = {} if self.within is None else {"budget": self.within.to_dict()}
        budget |= {} if self.inputs is None else {"inputs": self.inputs.to_dict()}
        held_out = {
            **self.model.held_out,
            **({"by_source": [asdict(g) for g in self.by_source]} if self.by_source else {}),
        }
        rest = {"held_out": held_out, "folds": self.model.folds, "weights": weights}
        if self.model.choosing:
            rest["choosing"] = dict(self.model.choosing)
        if self.model.seen:
            rest["seen"] = dict(self.model.seen)
        return {**self.recipe, **budget, **rest}
