"""What `plan_model` answers, as values and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minifloat.numerics.formats import ElementFormat
from minifloat.plan.hardware import Hardware
from minifloat.plan.roofline import Bound
from minifloat.plan.weights import Counts


@dataclass(frozen=True)
class CachePlan:
    """A KV cache in one format.

    Attributes:
        element: Name of the format.
        per_token: Bytes that one more token takes while no window is full, all devices together counted once.
        per_sequence: Bytes of a sequence of the planned context.
        total: Of the planned batch.
        device: Of the planned batch, on one device.
    """

    element: str
    per_token: int
    per_sequence: int
    total: int
    device: int


@dataclass(frozen=True)
class SchemePlan:
    """The model under one scheme.

    Attributes:
        scheme: Its name; ``"bf16"`` is the model as it is.
        weights: Bytes of the checkpoint's tensors, exactly as `quantize` writes them.
        device_weights: Bytes of weights on one device.
        cache: Bytes of the KV cache on one device.
        activations: Estimated bytes of activations on one device.
        taken: The three together.
        fits: Whether they fit into what may be taken.
        largest_batch: Sequences of the planned context that fit; 0: none.
        largest_batch_fp8: The same with an FP8 KV cache.
        largest_context: Tokens that each sequence of the planned batch may have; 0: they do not fit.
        arithmetic: Name of the format in which quantized weights are multiplied on this hardware.
        decode: The least time of a decode step.
        prefill: The least time of one prompt of the planned context.
        overtaken_from: The batch from which the W8A8 scheme `ModelPlan.overtaking` decodes faster; None: it never does
            (keys and values keep the step memory-bound), or this scheme multiplies in FP8 itself.
        linears_overtaken_from: The same for a step without attention, so in tokens of a step: what prompts count too.
        commands: To run next.
    """

    scheme: str
    weights: int
    device_weights: int
    cache: int
    activations: int
    taken: int
    fits: bool
    largest_batch: int
    largest_batch_fp8: int
    largest_context: int
    arithmetic: str
    decode: Bound
    prefill: Bound
    overtaken_from: int | None
    linears_overtaken_from: int | None
    commands: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: value.to_dict() if isinstance(value, Bound) else value
            for name, value in ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        }


@dataclass(frozen=True)
class ModelPlan:
    """A model on hardware.

    Attributes:
        path: The folder.
        architecture: From the config.
        estimated: Whether the tensors were derived from the config, there being no weights.
        counts: Weights of the model, and those that a token meets.
        hardware: One device.
        gpus: How many of them share the model.
        keep_free: The share of memory that is kept free.
        context: Tokens of a sequence.
        batch: Sequences.
        positions: Tokens of the longest sequence that the model has positions for, where the config says it.
        kv_element: Format of the KV cache that fit and speed are planned for.
        caches: The KV cache in BF16 and in FP8.
        schemes: The model as it is, then the schemes; one that is quantized already is alone.
        refused: Schemes that cannot quantize this model -> why.
        overtaking: The W8A8 scheme of `SchemePlan.overtaken_from`; None where the hardware has no FP8 arithmetic.
        notes: What else is to be known.
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
    caches: tuple[CachePlan, ...]
    schemes: tuple[SchemePlan, ...]
    refused: dict[str, str]
    overtaking: str | None
    notes: tuple[str, ...]

    @property
    def usable(self) -> int:
        """Bytes of a device that may be taken."""
        return int(self.hardware.memory * (1 - self.keep_free))

    @property
    def fastest(self) -> SchemePlan | None:
        """Of what fits, what decodes fastest at the bound; None where nothing fits."""
        return min((plan for plan in self.schemes if plan.fits), key=lambda plan: plan.decode.seconds, default=None)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fastest = self.fastest
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
            "schemes": [plan.to_dict() for plan in self.schemes],
            "refused": self.refused,
            "overtaking": self.overtaking,
            "fastest": None if fastest is None else fastest.scheme,
            "notes": list(self.notes),
        }
