"""`round_weight`: a weight of a loaded model, rounded to the nearest codes of a format by all threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from minifloat.errors import NonFiniteError, UnsupportedTensorError
from minifloat.kernels.quantize import QuantizedRows, quantize_rows
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
_SLAB_ELEMENTS = 1 << 22


def round_weight(weight: Tensor, spec: WeightSpec, name: str, *, cure: str = "") -> QuantizedTensor:
    """Round a weight to nearest. The codes and scales are those of `minifloat quantize`."""
    if weight.dtype not in _DTYPES:
        raise UnsupportedTensorError(name, f"expected one of {', '.join(_DTYPES.values())}, found {weight.dtype}")
    rows, cols = weight.shape
    step = max(_SLAB_ELEMENTS // max(cols, 1), 1)

    def quantize(start: int) -> QuantizedRows:
        slab = weight[start : start + step].cpu().contiguous()
        values = slab.view(torch.uint8).flatten().numpy()
        return quantize_rows(values, _DTYPES[weight.dtype], (len(slab), cols), spec)

    starts = range(0, rows, step)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = list(pool.map(quantize, starts))
    nonfinite = sum(part.nonfinite for part in parts)
    if nonfinite:
        raise NonFiniteError(name, f"holds {nonfinite} NaN or Inf{cure and '; '}{cure}")
    codes = torch.from_numpy(np.concatenate([part.codes for part in parts]))
    scales = torch.from_numpy(np.concatenate([part.scales for part in parts]))
    return QuantizedTensor(spec, (rows, cols), codes.to(weight.device), scales.to(weight.device))
