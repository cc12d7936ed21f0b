"""Where `linear(int8_inputs=True)` rounds its inputs, and why it does not elsewhere."""

from __future__ import annotations

import torch

from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.pack import PackedWeight
from minifloat.kernels.pack.layout import BLOCK, STEP_COLS
from minifloat.numerics.formats import BFLOAT16

#: The instruction sets that have the kernels.
ISAS = ("avx512_bf16", "avx512_vnni")


def why_not(weight: PackedWeight | None = None) -> str:
    """Return why inputs are never rounded to int8; empty if they are."""
    if native.load() is None:
        return native.why_unavailable()
    if native.isa() not in ISAS:
        return (
            f"there are kernels for {' and '.join(ISAS)} (AVX-512 VNNI without AMX); this process uses {native.isa()}"
        )
    if weight is None:
        return ""
    form = weight.form
    if form.format is BFLOAT16:
        return "the weight is bfloat16, not quantized"
    if form.grid == BLOCK and form.block[1] % STEP_COLS:
        return f"the weight has scales of {form.block[1]} columns; expected a multiple of {STEP_COLS}"
    return ""


def rounds(weight: PackedWeight, m: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether `linear(int8_inputs=True)` rounds `m` rows of `dtype`: where this is measured to be faster."""
    library = native.load()
    return library is not None and library.rounds_inputs(weight.address, m, DTYPES[dtype])
