from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.serve.server import start
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


@pytest.mark.skipif(sys.platform != "linux", reason="loads the library on Linux, which lists what is loaded")
def test_the_library_of_torch_is_loaded_before_torch_is_imported() -> None:
    code = """
from minifloat.serve.starting import import_torch, loading_torch
import sys
with loading_torch():
    pass
print("libtorch_cpu.so" in open("/proc/self/maps").read(), "torch" in sys.modules)
import_torch()
import torch
print(int(torch.ones(2).sum()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == (
        "True False\n2\n"
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_memory_is_touched_for_the_weights_of_a_checkpoint_on_a_machine_of_one_node(
    nodes: int, llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "NODES", tmp_path)
    for node in range(nodes):
        (tmp_path / f"node{node}").mkdir()
    with Checkpoint.open(llama_folder) as checkpoint:
        weights = {name: info.nbytes for name, info in checkpoint.tensors.items()}
        looked_up = weights["model.embed_tokens.weight"]
        assert start._packed_bytes(checkpoint) == (sum(weights.values()) - looked_up if nodes == 1 else 0)
