"""Reading weights ahead: in the order in which they are placed, few at a time, and with the reader's own errors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minifloat.checkpoint import Checkpoint
from minifloat.errors import NonFiniteError
from minifloat.kernels import native
from minifloat.model.layouts import StoredWeight, describe, read_weight
from minifloat.model.runtime import tensors as ahead
from minifloat.model.runtime.load import load
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]
INTEROP = Path(__file__).parents[2] / "data" / "interop"


class Watch:
    """Stands in for `read_weight`: which thread read what, and how many weights as stored were alive then."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.most = 0
        self._codes: list[weakref.ref[torch.Tensor]] = []

    def __call__(self, checkpoint: Checkpoint, stored: StoredWeight, *empty: Any) -> QuantizedTensor:
        weight = read_weight(checkpoint, stored, *empty)
        self.threads.append(threading.current_thread().name)
        self._codes.append(weakref.ref(weight.codes))
        self.most = max(self.most, sum(codes() is not None for codes in self._codes))
        return weight


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    watch = Watch()
    monkeypatch.setattr(ahead, "read_weight", watch)
    return watch


@pytest.fixture
def checkpoint(llama_folder: Path, tmp_path: Path) -> Iterator[Checkpoint]:
    quantize_checkpoint(llama_folder, tmp_path / "q", "fp8")
    with Checkpoint.open(tmp_path / "q") as opened:
        yield opened


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_load_reads_every_weight_ahead(make_model: MakeModel, tmp_path: Path, watch: Watch, model_type: str) -> None:
    quantize_checkpoint(make_model(tmp_path / "plain", model_type), tmp_path / "q", "mxfp4")
    load(tmp_path / "q")
    assert watch.threads
    assert all(name.startswith("minifloat-read") for name in watch.threads)


def test_fused_experts_are_read_ahead(watch: Watch) -> None:
    load(INTEROP / "gpt-oss-mxfp4")
    assert watch.threads
    assert all(name.startswith("minifloat-read") for name in watch.threads)


@pytest.mark.skipif(native.load() is None, reason=native.why_unavailable())
@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_only_a_few_weights_are_ever_held_as_they_are_stored(
    make_model: MakeModel, tmp_path: Path, watch: Watch, model_type: str
) -> None:
    quantize_checkpoint(make_model(tmp_path / "plain", model_type, num_hidden_layers=4), tmp_path / "q", "fp8")
    load(tmp_path / "q")
    assert len(watch.threads) > 20
    assert watch.most <= ahead.DEPTH + 2  # one that is being packed, and one on its way there


def test_an_order_that_was_not_announced_gives_the_same_weights(checkpoint: Checkpoint) -> None:
    weights = list(describe(checkpoint).weights.values())
    with ahead.ReadAhead(checkpoint, weights[:5]) as reader:
        for stored in (weights[3], weights[0], weights[7], weights[1], weights[0], weights[2], weights[3]):
            assert torch.equal(reader.read(stored).codes, read_weight(checkpoint, stored).codes)


def test_an_error_of_reading_comes_where_the_weight_is_asked_for(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = list(describe(checkpoint).weights.values())

    def read(checkpoint: Checkpoint, stored: StoredWeight, *empty: Any) -> QuantizedTensor:
        if stored is weights[1]:
            raise NonFiniteError(stored.scale, "a scale is NaN")
        return read_weight(checkpoint, stored, *empty)

    monkeypatch.setattr(ahead, "read_weight", read)
    with ahead.ReadAhead(checkpoint, weights) as reader:
        reader.read(weights[0])
        with pytest.raises(NonFiniteError, match=weights[1].scale):
            reader.read(weights[1])


def test_memory_of_dropped_weights_is_read_into_again(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [weight for weight in describe(checkpoint).weights.values() if "up_proj" in weight.module] * 20
    nbytes = weights[0].shape[0] * weights[0].shape[1]
    made, empty = [], np.empty

    def count(shape: Any, *arguments: Any) -> Any:
        made.append(shape)
        return empty(shape, *arguments)

    monkeypatch.setattr(np, "empty", count)
    with ahead.ReadAhead(checkpoint, weights) as reader:
        for stored in weights:
            assert reader.read(stored).codes.nbytes == nbytes
    assert 1 <= made.count(nbytes) <= ahead.DEPTH + 3  # the memory of the first one is not kept


def test_memory_of_weights_in_use_is_never_read_into(checkpoint: Checkpoint) -> None:
    weights = list(describe(checkpoint).weights.values())
    with ahead.ReadAhead(checkpoint, weights) as reader:
        rows = [reader.read(stored).codes[1:] for stored in weights]  # views, which outlive their tensors
    for stored, view in zip(weights, rows, strict=True):
        assert torch.equal(view, read_weight(checkpoint, stored).codes[1:])
        assert view.untyped_storage().nbytes() == view.nbytes + view.shape[1]
