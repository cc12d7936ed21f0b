"""Frequencies of rotary embeddings that more than one reader of a config needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt


def llama3_frequencies(frequencies: npt.NDArray[Any], rope: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Stretch the wavelengths that exceed the context of training, keep short ones, and interpolate between them.

    Args:
        frequencies: Radians per position, in the float dtype of the result; the bits are those of transformers.
        rope: Parameters of the rotary embedding in a config.

    Source: Llama 3.1, `apply_scaling`.
    """
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context = rope["original_max_position_embeddings"]
    wavelengths = 2 * math.pi * (1 / frequencies)
    is_long, is_short = wavelengths > context / low, wavelengths < context / high
    share = (context * (1 / wavelengths) - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    return np.where(is_long, frequencies / factor, np.where(is_short, frequencies, between))
