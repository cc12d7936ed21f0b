"""Inputs of linears, checkpoints and calibration texts that the tests of calibrated rounding share."""

from __future__ import annotations

import torch
from torch import Tensor


def correlated_inputs(tokens: int, width: int, seed: int = 1) -> Tensor:
    """Inputs ``[tokens, width]`` of one distribution, whose channels are correlated and of different sizes."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=generator) * width**-0.5 + 0.5 * torch.eye(width)
    sizes = torch.rand(width, generator=generator) + 0.1
    return torch.randn(tokens, width, generator=generator.manual_seed(seed)) @ mixing * sizes


def hessian_of(inputs: Tensor) -> Tensor:
    """The mean of products X'X / tokens, computed in float64."""
    return (inputs.double().T @ inputs.double() / len(inputs)).float()
