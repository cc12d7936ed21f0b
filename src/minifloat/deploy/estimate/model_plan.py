"""`ModelPlan`: the result of `plan_model`, as values and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.roofline import Bound
from minifloat.deploy.estimate.weights import Counts
from minifloat.numerics.formats import ElementFormat
from minifloat.report.document import ShortReport

#: A model of 135 million parameters: weights rounded to nearest, and codes chosen with text of its own.
_NEAREST, _WITH_DATA = "SmolLM2-135M", "with --data self"


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
    kl: Measured  # mean KL divergence in nats per token
    section: str = "What each scheme costs"
    text: str = "wikitext2_test.raw.txt"
    date: str = "2026-11-28"


def _row(scheme: str, model: str, percent: tuple[float, float, float], kl: tuple[float, float, float]) -> KnownLoss:
    """Return a row whose perplexity is written in percent, as in the document."""
    value, low, high = (round(number / 100, 6) for number in percent)
    return KnownLoss(scheme, model, Measured(value, low, high), Measured(*kl))


_ROWS = (
    _row("fp8-block", _NEAREST, (4.54, 2.91, 5.88), (0.0301, 0.0254, 0.0539)),
    _row("fp8-block", _WITH_DATA, (2.12, 0.5, 4.06), (0.0220, 0.0185, 0.0403)),
    _row("fp8", _NEAREST, (2.37, 1.23, 3.46), (0.0208, 0.0175, 0.0377)),
    _row("fp8", _WITH_DATA, (0.41, -0.29, 1.42), (0.0084, 0.0071, 0.0156)),
    _row("fp8-static", _NEAREST, (4.40, 0.62, 6.84), (0.0417, 0.0334, 0.0805)),
    _row("fp8-dynamic", _NEAREST, (3.49, 1.32, 5.81), (0.0361, 0.0305, 0.0638)),
    _row("mxfp8", _NEAREST, (3.32, -1.67, 4.27), (0.0200, 0.0164, 0.0394)),
    _row("mxfp8-w8a8", _NEAREST, (4.84, -5.18, 7.01), (0.0391, 0.0321, 0.0771)),
    _row("mxfp4", _NEAREST, (57.83, 52.20, 64.49), (0.5432, 0.4620, 0.6997)),
    _row("mxfp4", _WITH_DATA, (15.26, 11.83, 18.30), (0.1497, 0.1261, 0.1957)),
    _row("mxfp4-w4a8", _NEAREST, (63.11, 55.46, 70.03), (0.5745, 0.4850, 0.7190)),
    _row("mxfp4-w4a4", _NEAREST, (247.51, 180.18, 360.92), (1.3124, 1.0614, 1.5558)),
    _row("nvfp4", _NEAREST, (20.66, 15.93, 25.78), (0.2327, 0.2119, 0.3404)),
    _row("nvfp4", _WITH_DATA, (8.15, 4.37, 10.07), (0.0765, 0.0644, 0.1409)),
    _row("nvfp4-w4a4", _NEAREST, (51.59, 42.86, 59.58), (0.4570, 0.4130, 0.6871)),
)

#: KL divergences up to this ratio are alike: on another text or model their order is another.
_ALIKE = 1.1
#: The columns of what is known.
MEASURED_MODELS = (_NEAREST, _WITH_DATA)


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
        return next((loss.kl.value for loss in self.losses if loss.model == MEASURED_MODELS[0]), None)

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
        least = min((kl for kl, _ in known), default=0.0)
        alike = [plan for kl, plan in known if kl <= _ALIKE * least]
        return min(alike, key=lambda plan: plan.decode.seconds, default=None)

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
