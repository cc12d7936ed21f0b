"""Weights of a quantized checkpoint, decoded by the formulas of the formats alone: nothing here comes from minifloat.

Formulas: OCP Microscaling Formats 1.0 for E2M1 and E8M0; compressed-tensors 0.20 for names of tensors, the order of
packed codes (the even column in the low four bits) and the division by the global scale of NVFP4; transformers 5.23 for
gpt-oss' ``_blocks`` and ``_scales``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1 = torch.cat([_E2M1, -_E2M1])
_AUXILIARY = ("input_scale", "k_scale", "v_scale", "weight_shape", "input_global_scale", "activation_scale")


@dataclass
class DecodedCheckpoint:
    """A checkpoint with decoded weights."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    input_scales: dict[str, float] = field(default_factory=dict)
    plain: dict[str, Tensor] = field(default_factory=dict)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def decode_checkpoint(folder: Path) -> DecodedCheckpoint:
    """Read a folder, and decode its quantized weights."""
    tensors = read_tensors(folder)
    result = DecodedCheckpoint()
    used: set[str] = set()
    for name in tensors:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            result.weights[stem] = _decode_blocks(tensors[name], tensors[f"{stem}_scales"])
            used |= {name, f"{stem}_scales"}
            continue
        module = name.removesuffix("_packed").removesuffix(".weight")
        scale_name = next((s for s in (f"{module}.weight_scale", f"{module}.weight_scale_inv") if s in tensors), None)
        if scale_name is None or name not in (f"{module}.weight", f"{module}.weight_packed"):
            continue
        divisor = tensors.get(f"{module}.weight_global_scale")
        if f"{module}.weight_scale_2" in tensors:  # ModelOpt multiplies
            divisor = 1 / tensors[f"{module}.weight_scale_2"].double()
        result.weights[module] = _decode(tensors[name], tensors[scale_name], divisor)
        used |= {name, scale_name, f"{module}.weight_global_scale", f"{module}.weight_scale_2"}
        if f"{module}.input_scale" in tensors:
            result.input_scales[module] = float(tensors[f"{module}.input_scale"])
    for name, tensor in tensors.items():
        if name not in used and name.rpartition(".")[2] not in _AUXILIARY:
            result.plain[name] = tensor
    return result


def _decode(codes: Tensor, scale: Tensor, divisor: Tensor | None) -> Tensor:
    """Return ``[N, K]`` from codes ``[N, K]`` or packed ``[N, K / 2]``, and a grid of scales."""
    values = codes.float() if codes.dtype != torch.uint8 else _unpack(codes)
    scales = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
    if divisor is not None:
        scales = (scales / divisor).float()
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    return values * _spread(scales, values.shape)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Repeat each scale over its block; the last block of a side may be partial."""
    for axis in (0, 1):
        size, count = shape[axis], scales.shape[axis]
        if count not in (1, size):
            block = 128 if scales.dtype == torch.float32 and -(-size // 128) == count else size // count
            scales = scales.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scales


def _unpack(packed: Tensor) -> Tensor:
    """Return the values of E2M1 codes, two in a byte."""
    return torch.stack([_E2M1[(packed & 15).long()], _E2M1[(packed >> 4).long()]], -1).flatten(-2)


def _decode_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return ``[E, N, K]`` from gpt-oss' blocks ``[E, N, K / 32, 16]`` and scales ``[E, N, K / 32]``."""
    values = _unpack(blocks) * torch.exp2(scales.float() - 127)[..., None]
    return values.flatten(-2)


def decoded_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a plain checkpoint, or what the tensors of a quantized one stand for."""
    checkpoint = decode_checkpoint(folder)
    return checkpoint.plain | {f"{module}.weight": weight for module, weight in checkpoint.weights.items()}
