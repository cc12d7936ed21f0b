"""`plain_view`: open a quantized checkpoint as the plain one that it stands for."""

from __future__ import annotations

from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.model.layouts import describe
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.model.layouts.refusal import refuse_unknown_quantization


def plain_view(checkpoint: Checkpoint) -> DecodedCheckpoint:
    """Return the plain checkpoint that a quantized one stands for.

    Raises:
        UsageError: The checkpoint is not quantized.
        ConversionError: Its quantization has parts other than codes and scales.
        CheckpointError: Its quantization_config cannot be understood.
        TensorError: The shapes of codes and scales do not match.
    """
    description = describe(checkpoint)
    if not description.weights:
        raise UsageError(f"{checkpoint.path} is not quantized: leave --from-quantized out")
    refuse_unknown_quantization(checkpoint, description)
    return DecodedCheckpoint(checkpoint, description)
