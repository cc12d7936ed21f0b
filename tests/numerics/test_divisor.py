"""Tests of the scalar divisor of NVFP4 against the torch reference."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

from minifloat.numerics.divisor import scalar_global_divisor
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scale_rules import global_divisor

EDGES = [
    0.0,
    FLOAT32.min_positive,
    math.nextafter(FLOAT32.min_normal, 0.0),
    FLOAT32.min_normal,
    7.8e-36,  # the quotient overflows float32
    8.0e-36,  # the quotient is finite
    0.02,
    1.0,
    3.3333,
    2688.0,
    FLOAT32.max,
    1e39,  # infinite in float32
    math.inf,
    math.nan,
]


@pytest.mark.parametrize("amax", EDGES)
def test_the_scalar_divisor_has_the_bits_of_the_torch_reference(amax: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        divisor = scalar_global_divisor(amax)
    reference = global_divisor(torch.tensor(amax, dtype=torch.float32)).numpy()
    assert divisor.dtype == np.float32
    assert divisor.view(np.uint32) == reference.view(np.uint32)


def test_the_scalar_divisor_has_the_bits_of_the_torch_reference_over_all_exponents() -> None:
    bits = np.random.default_rng(0).integers(0, 0x7F800000, 5000, dtype=np.uint32)
    amaxes = bits.view(np.float32)
    divisors = np.array([scalar_global_divisor(float(amax)) for amax in amaxes])
    reference = np.array([global_divisor(torch.tensor(amax)).item() for amax in amaxes], dtype=np.float32)
    np.testing.assert_array_equal(divisors.view(np.uint32), reference.view(np.uint32))
