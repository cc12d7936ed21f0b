"""What `--data self` would bring for a checkpoint that was quantized without data, and about how long it would take.

The time is an estimate with three terms: products, whose rate on this machine is measured; factorizations of Hessians,
which grow with the cube of the input channels; and the time between products, which is most of it for models of a few
million weights. The factors were fitted to two runs on an otherwise idle machine with AVX-512 BF16 (a model of 4M
weights, and two layers of a 1.1B one in `benchmarks/rounding.py`). Elsewhere it may take half or twice as long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from minifloat.kernels.product_rate import measure_product_rate
from minifloat.numerics.formats import E2M1
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.report import QuantizeReport

#: Sequences and tokens of the default text, the held-out part included.
_SEQUENCES, _TOKENS = 284, 284 * 256
#: The operations that grow with the text, over those of one forward pass; one pass is for writing the text.
_PASSES = 5.5
#: Factorizations are in float64: the time of K^3 operations of the measured product, times this.
_FACTORIZATION = 20.0
#: Seconds between products for each weight and each sequence.
_SECONDS_BETWEEN = 0.004
_MINUTE, _HOUR = 60.0, 3600.0


def data_hint(report: QuantizeReport) -> str:
    """Return a sentence on `--data self`; an empty string if the codes were chosen with data, or have eight bits."""
    weights = [tensor for tensor in report.quantized if _is_four_bit(tensor.detail)]
    if report.rounding is not None or not weights:
        return ""
    seconds = estimate_seconds([tensor.shape for tensor in report.quantized], measure_product_rate())
    return (
        "With --data self the codes are chosen with text that the model writes itself: KL from the original was 0.2 to "
        f"0.5 of this on the models measured so far. It would take about {duration_text(seconds)} here."
    )


def _is_four_bit(scheme: str) -> bool:
    return scheme in SCHEMES and SCHEMES[scheme].weight.element is E2M1


def estimate_seconds(shapes: Sequence[tuple[int, ...]], rate: float) -> float:
    """Return the estimated time of a run with the default text."""
    products = _PASSES * 2.0 * sum(map(math.prod, shapes)) * _TOKENS
    factorizations = _FACTORIZATION * sum(shape[-1] ** 3 for shape in shapes)
    return (products + factorizations) / rate + _SECONDS_BETWEEN * len(shapes) * _SEQUENCES


def duration_text(seconds: float) -> str:
    """Return a time in minutes or hours, rounded as an estimate is."""
    if seconds < 1.5 * _MINUTE:
        return "a minute"
    if seconds < 1.5 * _HOUR:
        return f"{seconds / _MINUTE:.0f} minutes"
    return f"{seconds / _HOUR:.0f} hours" if seconds >= 10 * _HOUR else f"{seconds / _HOUR:.1f} hours"
