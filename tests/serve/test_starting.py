from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from minifloat.kernels import prepared_memory
from minifloat.serve.starting import importing, starting


def test_memory_for_the_weights_of_a_folder_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(prepared_memory, "prepare", asked.append)
    (tmp_path / "a.safetensors").write_bytes(b"1" * 100)
    (tmp_path / "tokenizer.json").write_bytes(b"1" * 1000)
    with starting(tmp_path):
        assert not gc.isenabled()
    assert gc.isenabled()
    with starting(tmp_path / "none"):
        pass
    with starting(tmp_path, "cuda"):
        pass
    assert asked == [100, 0]


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
