"""`ModelPlan`: the result of `plan_model`, as values and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.roofline import Bound
from minifloat.deploy.estimate.weights import Counts
from minifloat.numerics.formats import ElementFormat
from minifloat.report.document import ShortReport

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


@dataclass(frozen=True)
class CacheEstimate:
    """A KV cache in one format."""

    element: str
    per_token: int
    per_sequence: int
    total: int
    device: int


@dataclass(frozen=True)
class SchemeEstimate:
    """The model under one scheme."""

    scheme: str
    weights: int
    device_weights: int
    cache: int
    activations: int  # estimated bytes of activations on one device
    taken: int
    fits: bool
    needed_gpus: int | None  # smallest number that holds the batch, if these do not; None also where no number does
    largest_batch: int
    largest_batch_fp8: int
    largest_context: int
    arithmetic: str
    decode: Bound
    prefill: Bound
    commands: tuple[str, ...]
    losses: tuple[KnownLoss, ...]

    @property
    def measured_kl(self) -> float | None:
        """The mean KL divergence on the first model of `MEASURED_MODELS`, in nats per token; None: not measured."""
        values = (loss.kl for loss in self.losses if loss.model == MEASURED_MODELS[0])
        return next((kl.value for kl in values if kl is not None), None)

    def to_dict(self) -> dict[str, Any]:
        values = {
            name: value.to_dict() if isinstance(value, Bound) else value
            for name, value in ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        }
        return values | {"losses": [asdict(loss) for loss in self.losses]}


@dataclass(frozen=True, repr=False)
class ModelPlan(ShortReport):
    """A model on one kind of machine, under every scheme.

    Attributes:
        path: The folder, or the model of the hub, as the caller named it.
        architecture: Name of the architecture in the config.
        estimated: Whether the tensors were derived from the config, because there are no weights.
        counts: Number of parameters, all and active.
        hardware: One device.
        gpus: Number of devices that share the model.
        keep_free: Share of memory that is kept free.
        context: Tokens of a sequence.
        batch: Number of sequences.
        positions: Tokens of the longest sequence; None: the config does not say.
        kv_element: Format of the KV cache that fit and speed are estimated for.
        caches: The KV cache in BF16 and in FP8.
        state: Bytes of the states of a sequence (linear attention, Mamba), over all devices.
        schemes: The model as it is, then the schemes; a model that is already quantized has one entry.
        refused: Scheme that cannot quantize this model -> the reason.
        notes: Sentences for the user.
    """

    path: str
    architecture: str
    estimated: bool
    counts: Counts
    hardware: Hardware
    gpus: int
    keep_free: float
    context: int
    batch: int
    positions: int | None
    kv_element: ElementFormat
    caches: tuple[CacheEstimate, ...]
    state: int
    schemes: tuple[SchemeEstimate, ...]
    refused: dict[str, str]
    notes: tuple[str, ...]

    def headline(self) -> dict[str, str]:
        fitting = [plan.scheme for plan in self.schemes if plan.fits]
        return {
            "model": f"{self.path} ({self.architecture})",
            "on": f"{self.gpus} x {self.hardware.name}",
            "tokens": f"{self.batch} x {self.context}",
            "fits": ", ".join(fitting) or "nothing",
        }

    @property
    def usable(self) -> int:
        """Bytes of a device for weights, KV cache and activations."""
        return int(self.hardware.memory * (1 - self.keep_free))

    @property
    def fastest(self) -> SchemeEstimate | None:
        """The fitting scheme with the fastest decode step, by its bound; None: nothing fits."""
        return min((plan for plan in self.schemes if plan.fits), key=lambda plan: plan.decode.seconds, default=None)

    @property
    def least_loss(self) -> SchemeEstimate | None:
        """The fitting scheme with the smallest measured KL; None: no scheme that fits was measured."""
        measured = [(plan.measured_kl, plan) for plan in self.schemes if plan.fits]
        known = [(kl, plan) for kl, plan in measured if kl is not None]
        return min(known, key=lambda pair: pair[0])[1] if known else None

    def to_dict(self) -> dict[str, Any]:
        fastest, least_loss = self.fastest, self.least_loss
        return {
            "path": self.path,
            "architecture": self.architecture,
            "estimated": self.estimated,
            "weights": self.counts.total,
            "active_weights": self.counts.active,
            "hardware": self.hardware.to_dict(),
            "gpus": self.gpus,
            "keep_free": self.keep_free,
            "usable": self.usable,
            "context": self.context,
            "batch": self.batch,
            "positions": self.positions,
            "kv_element": self.kv_element.name,
            "caches": [asdict(cache) for cache in self.caches],
            "state": self.state,
            "schemes": [plan.to_dict() for plan in self.schemes],
            "refused": self.refused,
            "fastest": None if fastest is None else fastest.scheme,
            "least_loss": None if least_loss is None else least_loss.scheme,
            "notes": list(self.notes),
        }
