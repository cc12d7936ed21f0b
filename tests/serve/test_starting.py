from __future__ import annotations

import gc
import sys

import pytest

from minifloat.serve.starting import importing, starting


def test_garbage_is_not_collected_meanwhile() -> None:
    with starting():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_is_collected_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="no"), starting():
        raise ValueError("no")
    assert gc.isenabled()


def test_a_module_is_imported_beside_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    interval = sys.getswitchinterval()
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with importing("colorsys"):
        pass
    assert "colorsys" in sys.modules
    with importing("no_such_module"):
        assert sys.getswitchinterval() < interval
    assert sys.getswitchinterval() == interval
