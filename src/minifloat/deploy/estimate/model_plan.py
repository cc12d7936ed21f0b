"""`ModelPlan`: the result of `plan_model`, as values and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.known_loss import MEASURED_MODELS, KnownLoss
from minifloat.deploy.estimate.roofline import Bound
from minifloat.deploy.estimate.weights import Counts
from minifloat.numerics.formats import ElementFormat
from minifloat.report.document import ShortReport


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
