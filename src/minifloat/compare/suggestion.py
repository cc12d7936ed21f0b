"""Which modules to keep in 16 bits so that a quantized model is the same model again, for the fewest extra bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suggestion:
    """Modules to leave in the baseline's precision, and what the model is then, measured.

    Figures are of a sample of the text and have no interval.

    Attributes:
        overrides: As ``minifloat quantize --override`` takes them, ``"REGEX=bf16"``.
        modules: The modules that these match, by their names in the baseline's checkpoint.
        extra_bytes: What that costs.
        kl_before: Mean KL divergence of the candidate in nats per token.
        kl_after: The same with the suggestion.
        ppl_increase_before: Perplexity over the baseline's, less 1, of the candidate.
        ppl_increase_after: The same with the suggestion.
        agreement_before: Fraction of tokens at which the candidate's first choice is the baseline's.
        agreement_after: The same with the suggestion.
        reaches: Whether the model is then within the tolerance.
        everything: Whether nothing would stay quantized; another scheme is the better answer then.
        tokens: Scored tokens of the sample.
    """

    overrides: tuple[str, ...]
    modules: tuple[str, ...]
    extra_bytes: int
    kl_before: float
    kl_after: float
    ppl_increase_before: float
    ppl_increase_after: float
    agreement_before: float
    agreement_after: float
    reaches: bool
    everything: bool
    tokens: int
