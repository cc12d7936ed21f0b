"""What is known of each scheme's loss: the rows of docs/results.md that were measured on one common text."""

from __future__ import annotations

from dataclasses import dataclass

_STORYBOOK, _TINYMIX = "storybook-4m", "tinymix-qwen3-1.8M"
_SCHEMES = "What each scheme costs"
_SEARCH = "What the search for NVFP4's scales gains"
_INPUTS = "What inputs in 4 and 8 bits cost"
_RULES = "What each calibration rule costs"


@dataclass(frozen=True)
class Measured:
    """A measured value and its 95% interval; both ends are None where none was given."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class KnownLoss:
    """The loss of one scheme, as it was measured on one model and one text."""

    scheme: str
    model: str
    ppl_increase: Measured
    kl: Measured | None  # mean KL divergence in nats per token; None: not measured
    section: str
    text: str = "alice.txt"
    date: str = "2026-11-22"


def _row(
    scheme: str, model: str, percent: tuple[float, float, float], kl: tuple[float, float, float], section: str
) -> KnownLoss:
    """Return a row whose perplexity is written in percent, as in the document."""
    value, low, high = (round(number / 100, 6) for number in percent)
    return KnownLoss(scheme, model, Measured(value, low, high), Measured(*kl), section)


_ROWS = (
    _row("fp8-block", _STORYBOOK, (0.21, -0.02, 0.42), (0.0038, 0.0035, 0.0045), _SCHEMES),
    _row("fp8-block", _TINYMIX, (0.32, 0.14, 0.50), (0.0026, 0.0025, 0.0027), _SCHEMES),
    _row("fp8", _STORYBOOK, (0.17, 0.02, 0.37), (0.0018, 0.0016, 0.0034), _SCHEMES),
    _row("fp8", _TINYMIX, (-0.00, -0.10, 0.12), (0.0012, 0.0012, 0.0013), _SCHEMES),
    # The rows of fp8-static beside these are of weights alone; this one has its calibrated inputs (rule max).
    KnownLoss("fp8-static", _STORYBOOK, Measured(0.0035), None, _RULES, date="2026-11-21"),
    _row("fp8-dynamic", _STORYBOOK, (0.25, 0.04, 0.46), (0.0042, 0.0037, 0.0069), _SCHEMES),
    _row("fp8-dynamic", _TINYMIX, (0.22, 0.07, 0.37), (0.0026, 0.0025, 0.0027), _SCHEMES),
    _row("mxfp8", _STORYBOOK, (0.24, 0.12, 0.37), (0.0019, 0.0018, 0.0022), _SCHEMES),
    _row("mxfp8", _TINYMIX, (0.14, 0.02, 0.28), (0.0015, 0.0014, 0.0015), _SCHEMES),
    _row("mxfp4", _STORYBOOK, (2.21, 1.80, 2.67), (0.0311, 0.0297, 0.0335), _SCHEMES),
    _row("mxfp4", _TINYMIX, (3.58, 2.63, 4.10), (0.0258, 0.0245, 0.0283), _SCHEMES),
    _row("nvfp4", _STORYBOOK, (1.39, 1.08, 1.74), (0.0156, 0.0151, 0.0161), _SEARCH),
    _row("nvfp4", _TINYMIX, (0.78, 0.09, 1.22), (0.0129, 0.0124, 0.0136), _SEARCH),
    _row("mxfp8-w8a8", _STORYBOOK, (0.42, 0.17, 0.60), (0.0046, 0.0044, 0.0049), _INPUTS),
    _row("mxfp4-w4a8", _STORYBOOK, (2.24, 1.74, 2.71), (0.0331, 0.0317, 0.0352), _INPUTS),
    _row("mxfp4-w4a4", _STORYBOOK, (6.42, 5.68, 7.15), (0.0753, 0.0728, 0.0788), _INPUTS),
    _row("nvfp4-w4a4", _STORYBOOK, (3.12, 2.53, 3.74), (0.0398, 0.0385, 0.0415), _INPUTS),
)

#: The models of the rows, the one on which most schemes were measured first.
MEASURED_MODELS = (_STORYBOOK, _TINYMIX)


def known_losses(scheme: str) -> tuple[KnownLoss, ...]:
    """Return what was measured of a scheme, at most one row per model of `MEASURED_MODELS`; empty: not measured."""
    return tuple(row for row in _ROWS if row.scheme == scheme)
