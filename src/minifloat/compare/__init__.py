"""Is it still the same model? A quantized model against its baseline, on the same tokens."""

from minifloat.compare.evaluate import Comparison, compare_models
from minifloat.compare.metrics import Summary, TokenScores

__all__ = ["Comparison", "Summary", "TokenScores", "compare_models"]
