from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from minifloat.serve.starting import importing, starting


def test_garbage_is_not_collected_meanwhile(tmp_path: Path) -> None:
    with starting(tmp_path):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_is_collected_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), starting(tmp_path):
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
