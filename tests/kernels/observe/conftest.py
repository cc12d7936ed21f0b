"""The kernel of each instruction set."""

from __future__ import annotations

import pytest

from minifloat.kernels import native

LIBRARY = native.load()
ISAS = [*(LIBRARY.isas if LIBRARY else ())]


@pytest.fixture(params=ISAS or [pytest.param("none", marks=pytest.mark.skip(reason=native.why_unavailable()))])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY is not None
    bound = LIBRARY.with_isa(request.param)
    monkeypatch.setattr(native, "require", lambda: bound)
