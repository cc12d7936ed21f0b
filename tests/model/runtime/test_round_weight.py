"""`round_weight`: slabs on several threads against the quantization of whole tensors in PyTorch."""

from __future__ import annotations

import pytest
import torch

from minifloat.model.runtime import lm_head as module
from minifloat.model.runtime.lm_head import FP8, round_weight
from minifloat.numerics.scheme import get_scheme
from minifloat.numerics.tensor import quantize_tensor

SPECS = {"fp8": FP8, "mxfp4": get_scheme("mxfp4").weight}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_slabs_of_rows_have_the_codes_and_scales_of_the_oracle(
    dtype: torch.dtype, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLAB_ELEMENTS", 7 * 64)
    weight = torch.randn(61, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[3] = 0
    expected, found = quantize_tensor(weight, SPECS[spec]), round_weight(weight, SPECS[spec], "weight")
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scale, expected.scale)
    assert (found.spec, found.shape) == (SPECS[spec], (61, 64))
