"""Where the damage comes from: which modules of a quantized model make it differ from its baseline."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.compare.suggestion import Suggestion

__all__ = ["Attribution", "ModuleDamage", "Suggestion"]


@dataclass(frozen=True)
class ModuleDamage:
    """What one module does to the model.

    Attributes:
        module: Its name in the model.
        sqnr_db: Signal to quantization noise of its output, both models' module given the baseline's inputs; Inf where
            the outputs are the same, NaN where the sample never ran it.
        kl_alone: Mean KL divergence in nats per token of the baseline with this module exchanged; None: not measured.
        kl_without: The same of the candidate with this module alone the baseline's: what remains; None: not measured.
        extra_bytes: By how much the baseline's module is larger.
    """

    module: str
    sqnr_db: float
    kl_alone: float | None
    kl_without: float | None
    extra_bytes: int


@dataclass(frozen=True)
class Attribution:
    """The result of `attribute`.

    Attributes:
        rows: All modules that differ, the worst first: those with a `kl_alone` by it, then the others by their SQNR.
        tokens: Scored tokens of the sample that `rows` are of.
        seconds: That it took.
        measured: How many rows have a `kl_alone`.
        of: How many rows there are.
        suggestion: None where the candidate is within the tolerance already, where no override can help (the
            difference is not one of quantization), or where the time was up before it could be looked for.
    """

    rows: tuple[ModuleDamage, ...]
    tokens: int
    seconds: float
    measured: int
    of: int
    suggestion: Suggestion | None
