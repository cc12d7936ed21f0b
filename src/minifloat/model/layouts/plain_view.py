"""`plain_view`: open a quantized checkpoint as the plain one that it stands for."""

from __future__ import annotations

from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.model.layouts import describe
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.model.layouts.refusal import refuse_unknown_quantization


def plain_view(checkpoint: Checkpoint) -> DecodedCheckpoint:
    """Return the plain checkpoint that a quantized one stands for."""
    description = describe(checkpoint)
    if not description.weights:
        raise UsageError(f"{checkpoint.path} is not quantized: leave --from-quantized out")
    refuse_unknown_quantization(checkpoint, description)
    return DecodedCheckpoint(checkpoint, description)
