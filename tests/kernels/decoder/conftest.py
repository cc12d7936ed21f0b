from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernel_cases import ISAS

from minifloat.kernels import native


@pytest.fixture(params=ISAS or ["none"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this processor can run, used while the test runs."""
    if request.param == "none":
        pytest.skip(native.why_unavailable())
    with native.using(request.param):
        yield request.param
