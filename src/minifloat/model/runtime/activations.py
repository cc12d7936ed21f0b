"""Inputs of linears in 8 bits, an option of everything that runs a model: which models and devices have it.

On a CPU the kernels round to int8 where that is faster (`minifloat.kernels.linear.int8_inputs`): for prompts and
batches, never for the single row of a decode step of one sequence. The option is off by default, because it changes
results. On a GPU the engine multiplies many rows in FP8 (`minifloat.model.runtime.linear.PREFILL_ROWS`), by default
where the checkpoint declares that its inputs are quantized: that is the model which was calibrated and compared.
"""

from __future__ import annotations

import torch

from minifloat.errors import KernelUnavailable, UnknownNameError, UsageError
from minifloat.kernels.linear import int8_inputs
from minifloat.kernels.linear.int8_reference import GROUP_COLS
from minifloat.model.layouts import Description

#: "bf16": inputs keep the dtype of the activations. "int8": the kernels may round them.
ACTIVATIONS = ("bf16", "int8")
#: Besides, for the engine. "fp8": a GPU multiplies many rows in FP8. "auto": so where the checkpoint declares quantized
#: inputs and the GPU multiplies them, else "bf16".
ENGINE_ACTIVATIONS = ("auto", *ACTIVATIONS, "fp8")
#: What reports call inputs in int8.
INT8_INPUTS = f"INT8 per group 1x{GROUP_COLS} (dynamic, where that is faster)"


def allows_int8(
    choice: str, description: Description, device: torch.device, *, impl: str = "auto", weight_only: bool = True
) -> bool:
    """Return whether inputs may be rounded to int8."""
    if choice not in ACTIVATIONS:
        raise UnknownNameError("activations", choice, ACTIVATIONS)
    if choice != "int8":
        return False
    if device.type != "cpu":
        raise UsageError(f"activations int8: only CPUs have the kernels, and the model goes to {device}")
    if not description.weights:
        raise UsageError("activations int8: the checkpoint has no quantized weights, and no others have the kernels")
    if description.quantizes_inputs and not weight_only:
        raise UsageError(
            "activations int8: the checkpoint declares quantized inputs of its own, which weight_only leaves out "
            "(generate and compare: --weight-only)"
        )
    reason = "" if impl == "reference" else int8_inputs.why_not()
    if reason:
        raise KernelUnavailable(f"activations int8: {reason}")
    return True
