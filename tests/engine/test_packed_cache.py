"""Engines that keep packed weights: the same answers, and no file that does not fit is used in silence."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from minifloat.engine import Engine, SamplingParams
from minifloat.engine.native.mapped_weights import MappedWeights, contents
from minifloat.errors import UsageError
from minifloat.kernels.pack import pack
from minifloat.model.runtime import packed_cache
from minifloat.model.runtime.ahead import ReadAhead
from minifloat.model.runtime.packed_cache import Contents, UnusableCache
from minifloat.model.runtime.packed_cache.container import read, write
from minifloat.model.runtime.packed_cache.folder import open_folder
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.formats import E4M3, FLOAT32
from minifloat.numerics.granularity import CHANNEL
from minifloat.numerics.scheme import WeightSpec
from minifloat.quantize.job import quantize_checkpoint
from minifloat.serve.starting import starting

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
FP8 = WeightSpec(E4M3, CHANNEL, FLOAT32)
#: Warnings of a file that is not used.
REFUSED = "are not used and made again, because"


@pytest.fixture
def model(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


def answer(model: Path, cache: Path | None, **options: object) -> list[object]:
    engine = Engine(model, kv_cache_memory=1 << 20, packed_cache=cache, **options)  # type: ignore[arg-type]
    assert engine.info.runner == "native"
    (text,) = engine.generate(["Once upon"], GREEDY)
    return [text.text, [choice.logprob for choice in text.logprobs or ()]]


def only(cache: Path) -> Path:
    (file,) = cache.iterdir()
    return file


def refused(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if REFUSED in record.getMessage()]
    caplog.clear()
    return [text.partition(REFUSED)[2].strip() for text in texts]


@pytest.mark.parametrize("scheme", ["fp8-block", "mxfp4", None])
def test_a_second_engine_maps_the_weights_and_gives_the_same_bits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, scheme: str | None
) -> None:
    caplog.set_level(logging.INFO)
    if scheme is not None:
        quantize_checkpoint(model, tmp_path / "out", scheme)
        model = tmp_path / "out"
    expected = answer(model, None)
    assert answer(model, tmp_path / "cache") == expected
    assert "packed weights: wrote" in caplog.text

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read ahead")

    monkeypatch.setattr(ReadAhead, "__init__", refuse)
    assert answer(model, tmp_path / "cache") == expected
    assert "packed weights: mapped" in caplog.text
    assert not refused(caplog)


def test_a_checkpoint_that_changed_is_packed_again(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer(model, tmp_path / "cache")
    (shard,) = model.glob("*.safetensors")
    status = shard.stat()
    data = bytearray(shard.read_bytes())
    values = np.frombuffer(data, dtype=np.uint8)[-4096:]
    values[:] = 0
    shard.write_bytes(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))  # hide it: the time of change cannot be set
    expected = answer(model, None)
    assert answer(model, tmp_path / "cache") == expected
    assert refused(caplog) == ["the checkpoint has changed since it was made"]
    assert answer(model, tmp_path / "cache") == expected
    assert not refused(caplog)


def test_another_config_is_noticed(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer(model, tmp_path / "cache")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    answer(model, tmp_path / "cache")
    assert refused(caplog) == ["the checkpoint has changed since it was made"]


@pytest.mark.parametrize("damage", ["weights", "header", "truncated", "foreign", "writable", "link"])
def test_a_file_that_does_not_fit_is_made_again_with_one_line_in_the_log(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    expected = answer(model, tmp_path / "cache")
    file = only(tmp_path / "cache")
    data = file.read_bytes()
    if damage == "weights":
        file.write_bytes(data[:-5000] + bytes([data[-5000] ^ 64]) + data[-4999:])
    elif damage == "header":
        file.write_bytes(data[:100] + b"?" + data[101:])
    elif damage == "truncated":
        os.truncate(file, len(data) // 2)
    elif damage == "foreign":
        file.write_bytes(b"\x00" * len(data))
    elif damage == "writable":
        file.chmod(0o666)
    else:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    assert answer(model, tmp_path / "cache") == expected
    assert len(refused(caplog)) == 1
    assert answer(model, tmp_path / "cache") == expected
    assert not refused(caplog)


def test_a_weight_of_another_layout_format_or_name_is_not_multiplied_with(tmp_path: Path) -> None:
    folder = open_folder(tmp_path / "cache")
    weight = pack(torch.ones(64, 64, dtype=torch.bfloat16))
    later = weight.data.clone()
    later[4] += 1  # the version of the layout, in the header of the weight
    write(folder, "x", {}, {"a": contents(weight), "b": Contents("packed", (64, 64), later.numpy())})
    mapped = MappedWeights(read(folder, "x", {}))
    assert torch.equal(mapped.weight("a", None, (64, 64)).unpack(), torch.ones(64, 64, dtype=torch.bfloat16))
    with pytest.raises(UnusableCache, match="packed in layout version 2"):
        mapped.weight("b", None, (64, 64))
    with pytest.raises(UnusableCache, match="the packed weight is not of"):
        mapped.weight("a", FP8, (64, 64))
    with pytest.raises(UnusableCache, match="it has no c"):
        mapped.weight("c", None, (64, 64))
    with pytest.raises(UnusableCache, match=r"it has no a \[32, 64\]"):
        mapped.weight("a", None, (32, 64))


def test_options_that_decide_how_weights_are_packed_have_files_of_their_own(model: Path, tmp_path: Path) -> None:
    answer(model, tmp_path / "cache")
    answer(model, tmp_path / "cache", lm_head="fp8")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert answer(model, tmp_path / "cache", lm_head="fp8") == answer(model, None, lm_head="fp8")


def test_a_folder_that_others_can_write_to_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(UsageError, match="can be written by others"):
        Engine(model, packed_cache=tmp_path / "cache")
    with pytest.raises(UsageError, match="can be written by others"), starting(model, packed_cache=tmp_path / "cache"):
        pass


def test_a_cache_that_cannot_be_written_stops_no_server(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", refuse)
    answer(model, tmp_path / "cache")
    assert "the packed weights are not kept: cannot write" in caplog.text
    assert not list((tmp_path / "cache").iterdir())


def test_a_cache_is_verified_while_the_process_starts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = answer(model, tmp_path / "cache")
    verified: list[bool] = []
    verify = packed_cache.Container.verify
    monkeypatch.setattr(packed_cache.Container, "verify", lambda self: (verified.append(True), verify(self))[1])
    with starting(model, packed_cache=tmp_path / "cache"):
        assert answer(model, tmp_path / "cache") == expected
    assert len(verified) == 1  # by the thread, and not again
    file = only(tmp_path / "cache")
    data = file.read_bytes()
    file.write_bytes(data[:-5000] + bytes([data[-5000] ^ 64]) + data[-4999:])
    with starting(model, packed_cache=tmp_path / "cache"):
        assert answer(model, tmp_path / "cache") == expected
    assert refused(caplog) == ["its weights are damaged: their digest differs"]


def test_the_cache_needs_no_torch_until_it_is_used(model: Path, tmp_path: Path) -> None:
    answer(model, tmp_path / "cache")
    code = "import sys; from pathlib import Path; from minifloat.model.runtime import packed_cache\n"
    code += "found = packed_cache.begin(Path(sys.argv[1]), Path(sys.argv[2]), dtype=None, lm_head='auto')\n"
    code += "print(found, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(model)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "True False\n"


@pytest.mark.parametrize("scheme", ["fp8", None])
def test_experts_are_kept_too(
    make_mixtral: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str | None
) -> None:
    model = make_mixtral(tmp_path / "model")
    if scheme is not None:
        quantize_checkpoint(model, tmp_path / "out", scheme)
        model = tmp_path / "out"
    expected = answer(model, tmp_path / "cache")
    monkeypatch.setattr(WeightSource, "experts", None)
    monkeypatch.setattr(WeightSource, "matrix", None)
    assert answer(model, tmp_path / "cache") == expected
