"""`Method`: how the codes of a weight are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from minifloat.quantize.rounding.factor import Feedback
from minifloat.quantize.rounding.grid import Grid
from minifloat.quantize.rounding.statistics import Rows, Statistics


@dataclass(frozen=True)
class Inputs:
    """What is known about the input that some linears share.

    Attributes:
        feedback: From the Hessian of `statistics`; None for a method that needs no data.
        held_out: float32 rows of text that is in no statistic; None: there are none.
    """

    statistics: Statistics
    feedback: Feedback | None
    held_out: Rows | None = None

    @property
    def required_feedback(self) -> Feedback:
        """The feedback, for methods that need data."""
        assert self.feedback is not None
        return self.feedback


@dataclass(frozen=True)
class Rounded:
    """The codes that a method chose.

    Attributes:
        codes: For each weight uint8 ``[N, K]``, one per byte.
    """

    codes: list[Tensor]
    details: dict[str, float] = field(default_factory=dict)


class Method(Protocol):
    """Chooses the codes of weights that share their input."""

    @property
    def name(self) -> str:
        """Name on the command line."""

    @property
    def summary(self) -> str:
        """One line for `--help` and reports."""

    @property
    def needs_data(self) -> bool:
        """Whether it chooses codes with the inputs of the weights."""

    @property
    def follows_quantized(self) -> bool:
        """Whether the inputs are those that the layers quantized before give, beside the original ones."""

    @property
    def trains(self) -> bool:
        """Whether codes and norms are trained on the logits of the original model after the last layer."""

    def round(self, weights: Sequence[Tensor], grids: Sequence[Grid], inputs: Inputs) -> Rounded:
        """Return the codes of each weight.

        Args:
            weights: The original weights, float32 ``[N_i, K]``.
            grids: Scales of each weight; all of one storage format.
            inputs: Of these weights.
        """
