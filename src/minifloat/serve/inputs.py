"""What a checkpoint says about the inputs of its quantized weights, and what of it is simulated.

A module whose inputs this package cannot quantize as servers do is computed weight-only, and said to be: a comparison
must not pass for one of W8A8 where it is none.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from minifloat.checkpoint import CONFIG_FILE, Checkpoint
from minifloat.errors import ConfigError, NonFiniteError, ShapeError, UnsupportedTensorError
from minifloat.layouts import StoredWeight
from minifloat.quantize.activation import can_quantize, describe_activation
from minifloat.scheme import ActivationSpec
from minifloat.serve.names import listing

_LOG = logging.getLogger(__name__)
_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class InputQuantization:
    """Decides module by module how inputs are quantized; lives as long as one `load`.

    Args:
        checkpoint: Where static scales are read from.
        weight_only: Leave all inputs as they are, and warn of nothing.
    """

    def __init__(self, checkpoint: Checkpoint, weight_only: bool) -> None:
        self.checkpoint, self.weight_only = checkpoint, weight_only
        self._skipped: dict[str, list[str]] = {}

    def of(self, stored: StoredWeight) -> tuple[ActivationSpec | None, Tensor | None]:
        """How a module quantizes its inputs, and its float32 scalar scale where that is static.

        Raises:
            ConfigError: The config declares static scales and the module has none.
            ShapeError: A scale of more than one element.
            NonFiniteError: A scale that is not positive and finite.
            UnsupportedTensorError: A scale in a dtype that no layout uses.
        """
        spec = stored.activation
        if spec is None or self.weight_only:
            return None, None
        if not can_quantize(spec, stored.spec):
            weight = f"{stored.spec.element.name} weights with {stored.spec.scale.name} scales"
            self.skip(stored, f"inputs in {describe_activation(spec)} of {weight} are not simulated")
            return None, None
        return spec, None if spec.dynamic else self._read_scale(stored, spec)

    def skip(self, stored: StoredWeight, reason: str) -> None:
        """Note a module that is computed weight-only against its config."""
        if stored.activation is not None and not self.weight_only:
            self._skipped.setdefault(reason, []).append(stored.module)

    def warn(self) -> None:
        """Log what was skipped, one warning per reason."""
        for reason, modules in self._skipped.items():
            _LOG.warning("%d modules are computed weight-only, because %s: %s", len(modules), reason, listing(modules))

    def _read_scale(self, stored: StoredWeight, spec: ActivationSpec) -> Tensor:
        name = stored.input_scale
        if name is None:
            raise ConfigError(
                self.checkpoint.path / CONFIG_FILE,
                f"declares inputs in {describe_activation(spec)}, but the checkpoint has no input_scale for "
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
        return scale.reshape(())
