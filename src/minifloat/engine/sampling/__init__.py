"""Sampling parameters, and the choice of the next token.

The order is vLLM's, so that the same parameters have the same effect: logit_bias, the penalties of repetition (Keskar
et al., CTRL, 2019), presence and frequency (OpenAI), forbidden tokens (a grammar, min_tokens), temperature, min_p
(Nguyen et al., 2024), top_k, top_p (Holtzman et al., 2019). Log-probabilities are those of the model, before any of
these steps.

A draw takes its numbers from a counter-based generator (Philox; Salmon et al., SC 2011), keyed by the request's seed,
at the token's position: a draw depends neither on the other sequences nor on how often its own sequence was preempted.

There are two ways to draw. An engine that does not speculate inverts the cumulative probabilities at one number. One
that does lets all tokens race: each gets an exponentially distributed time with its probability as the rate, and the
first wins, which is the Gumbel-max trick (Maddison et al., "A* Sampling", NeurIPS 2014). Two models that race with the
same times agree nearly as often as their probabilities allow (Daliri et al., "Coupling without communication and
drafter-invariant speculative decoding", 2024), and the result does not depend on what a draft model proposed.
"""

from __future__ import annotations

from minifloat.engine.sampling.choose import (
    Choices,
    NonFiniteLogits,
    Postponed,
    TokenChoice,
    TokenLogprob,
    choose,
    sample,
    verify,
)
from minifloat.engine.sampling.draw import Logits, draw, race
from minifloat.engine.sampling.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MODEL_DEFAULTS,
    SamplingParams,
)
from minifloat.engine.sampling.state import SamplingState, await_grammars

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_STOPS",
    "MAX_STOP_LENGTH",
    "MODEL_DEFAULTS",
    "Choices",
    "Logits",
    "NonFiniteLogits",
    "Postponed",
    "SamplingParams",
    "SamplingState",
    "TokenChoice",
    "TokenLogprob",
    "await_grammars",
    "choose",
    "draw",
    "race",
    "sample",
    "verify",
]
