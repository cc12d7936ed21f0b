"""The instruction sets of this machine as a fixture."""

from __future__ import annotations

import pytest
from kernel_cases import ISAS, Kernels

from minifloat.kernels import native

_PARAMS = ISAS or [pytest.param("none", marks=pytest.mark.skip(reason=native.why_unavailable()))]


@pytest.fixture(params=_PARAMS, scope="session")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The kernels below the public API, once for each instruction set."""
    return Kernels(request.param)
