"""What a quantized model may lose: the bounds of the verdict of `compare`, which the default scheme aims to keep."""

from __future__ import annotations

#: Largest relative increase of perplexity, per text.
MAX_PPL_INCREASE = 0.01
#: Largest mean KL divergence in nats per token.
MAX_KL = 0.02
#: Smallest share of tokens at which both models have the same most probable token.
MIN_SAME_TOP1 = 0.92
