"""Weights of an arena lie in a few mappings, and loading a mixture makes few, however many experts it has."""

from __future__ import annotations

import itertools
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import model_of, write

from minifloat.engine import Engine, EngineOptions
from minifloat.kernels import pack as packing
from minifloat.kernels.pack import Arena, pack
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint

#: Weights of DeepSeek-V3's experts, 58 layers of 3 * 256, each of the size of one of Qwen3-30B in FP8.
LAYERS, WEIGHTS, NBYTES = 58, 3 * 256, 1600 << 10
#: Of 65,530 that Linux allows; all others of a process are some hundreds.
FEW = 400

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts the mappings that Linux lists")


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def status(field: str) -> int:
    """Return a field of the process's status in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) << 10


def is_huge(address: int) -> bool:
    """Return whether the mapping of an address asks for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no mapping has this address")


def test_44000_weights_take_a_few_hundred_mappings_and_free_them() -> None:
    before = mappings()
    arena, weights = Arena(), []
    for _ in range(LAYERS):
        arena = arena.next_layer()
        weights.append([arena.allocate(NBYTES) for _ in range(WEIGHTS)])  # untouched, they take no memory
    assert LAYERS * WEIGHTS > 44_000
    assert mappings() - before < FEW
    spans = sorted((data.data_ptr(), data.data_ptr() + NBYTES) for layer in weights for data in layer)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    full = status("VmSize")
    del weights[: LAYERS // 2]
    assert status("VmSize") <= full - LAYERS // 2 * WEIGHTS * NBYTES
    del weights, arena
    assert mappings() - before < LAYERS


def test_weights_of_an_arena_are_in_huge_pages_and_hold_their_own_bytes_only() -> None:
    arena = Arena()
    weights = [pack(torch.randn(70, 96).to(torch.bfloat16), arena=arena) for _ in range(3)]
    for weight in weights:
        assert weight.address % packing.STEPS_ALIGNMENT == 0
        assert is_huge(weight.address)
        assert weight.data.untyped_storage().nbytes() == weight.nbytes  # of which pickle writes all
    copied = pickle.loads(pickle.dumps(weights[1]))
    assert torch.equal(copied.dequantize(), weights[1].dequantize())


def test_small_layers_share_an_arena_and_large_ones_have_one_each() -> None:
    arena = Arena()
    arena.allocate(1 << 20)
    assert arena.next_layer() is arena
    arena.allocate(64 << 20)
    assert arena.next_layer() is not arena


def test_an_arena_takes_at_most_one_huge_page_more_than_its_weights() -> None:
    arena, nbytes = Arena(), 100 << 10
    before = status("RssAnon")
    weights = [arena.allocate(nbytes).fill_(1) for _ in range(200)]
    assert status("RssAnon") - before <= sum(weight.nbytes for weight in weights) + packing.HUGE_PAGE + (1 << 20)


def opened(folder: Path) -> Any:
    return Engine(folder, EngineOptions(kv_cache_memory=1 << 20))


def loaded(folder: Path) -> Any:
    return load(folder, LoadOptions(dtype=torch.bfloat16))


@pytest.mark.parametrize("opens", [opened, loaded])
def test_opening_a_mixture_makes_few_mappings(
    opens: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = write(model_of("qwen3_moe", num_experts=64), tmp_path / "plain")
    quantize_checkpoint(plain, tmp_path / "q", "fp8")
    monkeypatch.setattr(packing, "HUGE_PAGE", 4096)  # so that tiny weights count as large ones
    before = mappings()
    model = opens(tmp_path / "q")
    assert mappings() - before < 2 * 64
    del model
