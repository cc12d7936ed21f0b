"""How the inputs of quantized weights are quantized: as the checkpoint declares, or in 8 bits where a caller asks.

A module whose inputs cannot be quantized as servers do is computed weight-only, with a warning, so that nobody takes
the result for one of W8A8. Rounding to int8 on a CPU (`kernels.linear.int8`) changes results and is off by
default; FP8 for many rows on a GPU (`linear.PREFILL_ROWS`) is the default where the checkpoint declares it.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.errors import (
    ConfigError,
    KernelUnavailable,
    NonFiniteError,
    ShapeError,
    UnknownNameError,
    UnsupportedTensorError,
    UsageError,
)
from minifloat.kernels.linear import int8
from minifloat.kernels.linear.int8 import GROUP_COLS
from minifloat.model.layouts import Description, StoredWeight
from minifloat.model.runtime.tensors import listing
from minifloat.numerics.activation import can_quantize
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, GROUP_128, TENSOR, TOKEN
from minifloat.numerics.scheme import ActivationSpec, WeightSpec

#: "bf16": inputs keep the dtype of the activations. "int8": the kernels may round them.
ACTIVATIONS = ("bf16", "int8")
#: What reports call inputs in int8.
INT8_INPUTS = f"INT8 per group 1x{GROUP_COLS} (dynamic, where that is faster)"


def allows_int8(
    choice: str, description: Description, device: torch.device, *, impl: str = "auto", weight_only: bool = True
) -> bool:
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
    reason = "" if impl == "reference" else int8.why_not()
    if reason:
        raise KernelUnavailable(f"activations int8: {reason}")
    return True


_LOG = logging.getLogger(__name__)
#: The value of `prefill`.
W8A8 = "w8a8"
#: Granularity of weights -> quantization of inputs of many rows, if the checkpoint declares none.
PREFILL_INPUTS = {
    TENSOR: ActivationSpec(E4M3, TOKEN, dynamic=True),
    CHANNEL: ActivationSpec(E4M3, TOKEN, dynamic=True),
    BLOCK_128: ActivationSpec(E4M3, GROUP_128, dynamic=True),
}
_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class InputQuantization:
    """Decides for each module of one model how its inputs are quantized."""

    def __init__(self, checkpoint: Checkpoint, weight_only: bool, prefill: str | None = None) -> None:
        if prefill not in (None, W8A8):
            raise UnknownNameError("prefill", prefill, (W8A8,))
        self.checkpoint, self.weight_only, self.prefill = checkpoint, weight_only, prefill
        self._not_prefilled: list[str] = []
        self._skipped: dict[str, list[str]] = {}

    def of(self, stored: StoredWeight) -> tuple[ActivationSpec | None, Tensor | None]:
        """Return how a module quantizes its inputs, and their static scale; None: not at all."""
        spec = stored.activation
        if spec is None or self.weight_only:
            return None, None
        if not can_quantize(spec, stored.spec):
            weight = f"{stored.spec.element.name} weights with {stored.spec.scale.name} scales"
            self.skip(stored, f"inputs in {spec} of {weight} are not simulated")
            return None, None
        return spec, self._read_scale(stored, spec) if spec.needs_calibration else None

    def prefill_of(self, stored: StoredWeight) -> tuple[ActivationSpec, Tensor | None] | None:
        """Return how a weight-only module quantizes inputs of many rows; None: not at all."""
        if self.prefill is None:
            return None
        spec = stored.activation or PREFILL_INPUTS.get(stored.spec.granularity)
        if spec is None or not _is_fp8(spec) or not _is_fp8(stored.spec) or not can_quantize(spec, stored.spec):
            self._not_prefilled.append(stored.module)
            return None
        return spec, None if spec.dynamic else self._read_scale(stored, spec)

    def skip(self, stored: StoredWeight, reason: str) -> None:
        """Note a module that is computed weight-only although its config declares quantized inputs."""
        if stored.activation is not None and not self.weight_only:
            self._skipped.setdefault(reason, []).append(stored.module)

    def warn(self) -> None:
        """Log the modules that are computed weight-only, one warning per reason."""
        for reason, modules in self._skipped.items():
            _LOG.warning("%d modules are computed weight-only, because %s: %s", len(modules), reason, listing(modules))
        if self._not_prefilled:
            _LOG.warning(
                "%d modules are computed weight-only at any number of rows, because their weights are not E4M3 with "
                "float32 scales that FP8 inputs go with: %s",
                len(self._not_prefilled),
                listing(self._not_prefilled),
            )

    def _read_scale(self, stored: StoredWeight, spec: ActivationSpec) -> Tensor:
        """Read the static scale of a module's inputs, with the errors of `of`."""
        name = stored.input_scale
        if name is None:
            raise ConfigError(
                self.checkpoint.path / CONFIG_FILE,
                f"declares inputs in {spec}, but the checkpoint has no input_scale for "
                f"{stored.module}; load it weight-only, or calibrate it",
            )
        info = self.checkpoint.tensors[name]
        if info.dtype not in _SCALE_DTYPES:
            raise UnsupportedTensorError(name, f"expected one of {', '.join(_SCALE_DTYPES)}; found {info.dtype}")
        scale = torch.from_numpy(self.checkpoint.read(name)).view(_SCALE_DTYPES[info.dtype]).float()
        if scale.numel() != 1:
            raise ShapeError(name, f"expected one scale for the whole input, found shape {list(info.shape)}")
        if not (scale.isfinite() & (scale > 0)).all():
            raise NonFiniteError(name, f"expected a positive, finite scale, found {scale.item()}")
        inverted = spec.has_global_scale and not stored.global_divides
        return scale.reshape(()).reciprocal() if inverted else scale.reshape(())


def _is_fp8(spec: ActivationSpec | WeightSpec) -> bool:
    """Return whether elements are E4M3 with float32 scales."""
    return spec.element is E4M3 and spec.scale is FLOAT32
