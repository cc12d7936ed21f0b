"""Options of `plan_model` and `push_checkpoint`. Imports nothing heavy, so that commands can list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from minifloat.errors import UsageError
from minifloat.numerics.ranges import Count, FractionBelowOne, Positive, check_fields


@dataclass(frozen=True)
class PlanOptions:
    """The load and the limits that `plan_model` estimates for.

    Attributes:
        gpus: Devices that share the model by tensor parallelism.
        context: Tokens of every sequence; None: 4096, or the model's positions if they are fewer.
        batch: Sequences that run together.
        kv_cache_dtype: Format of the KV cache.
        keep_free: Share of memory for everything that is not counted.
        bandwidth: GB/s of the device, in place of its data sheet's or the measured one.
        peak: Dense BF16 TFLOP/s of the device, in place of its data sheet's or the measured one.
    """

    gpus: Count = 1
    context: Count | None = None
    batch: Count = 1
    kv_cache_dtype: Literal["bfloat16", "fp8"] = "bfloat16"
    keep_free: FractionBelowOne = 0.1
    bandwidth: Positive | None = None
    peak: Positive | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class PushOptions:
    """How `push_checkpoint` uploads, and metadata for a card that lacks it.

    Attributes:
        private: Make a new repository private; an existing one must be.
        revision: Branch to commit to, created if it does not exist; None: main.
        message: Message of the commit.
        create_pr: Open a pull request instead of committing.
        base_model: The hub id of the model it was made from, if its card does not say.
        license: Its licence, if its card does not say: apache-2.0, mit, other, ...
        dry_run: List what would be uploaded; write and send nothing.
    """

    private: bool = False
    revision: str | None = None
    message: str | None = None
    create_pr: bool = False
    base_model: str | None = None
    license: str | None = None
    dry_run: bool = False

    def __post_init__(self) -> None:
        """Refuse a pull request against a branch."""
        if self.create_pr and self.revision is not None:
            raise UsageError("a pull request is opened against the default branch; leave out the revision")
