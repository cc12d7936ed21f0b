"""The memory that tuning needs, computed before anything runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from minifloat.calibration.model import available_memory
from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.model.architecture.roles import text_config
from minifloat.model.plan.tensor_plan import QuantizationPlan

_LOG = logging.getLogger(__name__)

#: Logits that one forward pass may compute; more sequences of a step run one after the other.
LOGITS_PER_PASS = 1 << 25
#: float32 per weight: latent, gradient, and two moments of Adam.
_FLOATS_PER_WEIGHT = 4
#: float32 per logit: of both models as probabilities, their difference and gradients.
_FLOATS_PER_LOGIT = 6
#: Activations per layer and token that the backward pass needs, in units of the hidden and of the inner width.
_HIDDEN_KEPT, _INNER_KEPT = 16, 4


@dataclass(frozen=True)
class TuneCost:
    """What tuning needs."""

    weights: int
    nbytes: int


def tune_cost(checkpoint: Checkpoint, plan: QuantizationPlan, dtype: torch.dtype, longest: int) -> TuneCost:
    """Return the memory that tuning a plan needs."""
    itemsize = dtype.itemsize
    model = sum(math.prod(info.shape) for info in checkpoint.tensors.values()) * itemsize
    weights = sum(math.prod(part.shape) for tensor in plan.tensors for part in tensor.parts)
    float32 = torch.float32.itemsize
    per_weight = _FLOATS_PER_WEIGHT * float32 + 2 * itemsize  # the folded weight, and the one of the current codes
    config = text_config(checkpoint.config)
    vocabulary = _number(config, "vocab_size")
    tokens = max(LOGITS_PER_PASS // max(vocabulary, 1), longest)
    width = _HIDDEN_KEPT * _number(config, "hidden_size") + _INNER_KEPT * _number(config, "intermediate_size")
    activations = tokens * width * _number(config, "num_hidden_layers") * itemsize
    logits = tokens * vocabulary * _FLOATS_PER_LOGIT * float32
    return TuneCost(weights, model + weights * per_weight + activations + logits)


def require_memory(cost: TuneCost, device: str | torch.device, max_memory: int | None) -> None:
    """Refuse to tune where the memory is too small."""
    available = available_memory(device)
    _LOG.info("tuning trains %s weights in %s bytes of memory on %s", f"{cost.weights:,}", f"{cost.nbytes:,}", device)
    limit = available if max_memory is None else min(available, max_memory)
    if cost.nbytes > limit:
        raise UsageError(
            f"the method tune needs {cost.nbytes:,} bytes of memory on {device} to train {cost.weights:,} weights, and "
            f"{limit:,} bytes are available: take the method match, which holds one layer at a time, or a device with "
            "more memory"
        )


def _number(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0
