"""The work folder of an interrupted run: `quantize` resumes to the bytes of an undisturbed run, or refuses.

An input is JSON: `journal` has the lines of the journal (objects, or texts that are written as they are), and `flips`
are bytes of finished shards that change: shard, position, mask.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from pathlib import Path
from typing import Any

from small_llama import write_safetensors

from fuzzing import small
from fuzzing.mutation import decoded, encoded, json_mutator
from fuzzing.target import Target
from minifloat import QuantizeOptions, quantize_checkpoint
from minifloat.checkpoint.journal import sealed_line
from minifloat.checkpoint.layout import JOURNAL_FILE

_SHARDS = 3


class _Interrupted(Exception):
    """Ends a run after its first shard."""


@functools.cache
def _source() -> Path:
    """A small Llama in three shards."""
    folder = small.scratch() / "shards"
    folder.mkdir()
    (folder / "config.json").write_bytes(encoded(small.LLAMA))
    tensors = small.weights()
    weight_map = {}
    for shard in range(_SHARDS):
        file = f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::_SHARDS]}
        write_safetensors(folder / file, part, "BF16")
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_bytes(encoded({"metadata": {}, "weight_map": weight_map}))
    return folder


@functools.cache
def _expected() -> dict[str, bytes]:
    """The shards of an undisturbed run, by name."""
    folder = small.scratch() / "undisturbed"
    quantize_checkpoint(_source(), folder, "fp8-dynamic")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


@functools.cache
def _interrupted() -> Path:
    """A copy of the work folder of a run that ended after its first shard."""
    output, work = _places()

    def stop(done: int, total: int, message: str) -> None:
        if b'"file"' in (work / JOURNAL_FILE).read_bytes():
            raise _Interrupted

    with contextlib.suppress(_Interrupted):
        quantize_checkpoint(_source(), output, "fp8-dynamic", QuantizeOptions(workers=1), progress=stop)
    copy = small.scratch() / "interrupted"
    shutil.copytree(work, copy)
    shutil.rmtree(work)
    return copy


def _places() -> tuple[Path, Path]:
    return small.scratch() / "resumed", small.scratch() / "resumed.minifloat-work"


def _run(data: bytes) -> None:
    value = decoded(data)
    if not isinstance(value, dict):
        return
    output, work = _places()
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    expected = _expected()
    shutil.copytree(_interrupted(), work)
    lines = value.get("journal")
    (work / JOURNAL_FILE).write_bytes(b"".join(map(_journal_line, lines)) if isinstance(lines, list) else _line(lines))
    _flip(work / "output", value.get("flips"))
    quantize_checkpoint(_source(), output, "fp8-dynamic", QuantizeOptions(workers=1))
    for name, content in expected.items():
        assert (output / name).read_bytes() == content, f"{name} differs from an undisturbed run"
    assert not work.exists(), "the work folder is left behind"


def _line(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return encoded(value) + b"\n"


def _journal_line(value: Any) -> bytes:
    """Return a line of the journal; an object gets its right digest, so that what it says is read."""
    return sealed_line(encoded(value)) if isinstance(value, dict) and value else _line(value)


def _flip(folder: Path, flips: Any) -> None:
    for flip in flips if isinstance(flips, list) else ():
        if not isinstance(flip, list) or len(flip) != 3 or not all(type(item) is int for item in flip):
            continue
        shards = sorted(folder.glob("*.safetensors"))
        path = shards[flip[0] % len(shards)]
        content = bytearray(path.read_bytes())
        content[flip[1] % len(content)] ^= flip[2] & 255
        path.write_bytes(content)


def _seeds() -> dict[str, bytes]:
    folder = _interrupted()
    journal = [json.loads(line) for line in (folder / JOURNAL_FILE).read_text().splitlines()]
    for entry in journal:
        del entry["line"]  # its digest, which `_journal_line` adds
    assert len(journal) > 1, "the run was not interrupted after a shard"
    whole = {"journal": journal, "flips": []}
    return {"interrupted": encoded(whole), "flipped": encoded(whole | {"flips": [[0, 4000, 1]]})}


_WORDS = {
    "file",
    "size",
    "record",
    "discarded",
    "tensors",
    "version",
    "run",
    "source_digest",
    "digest",
    "sha256",
}
_WORDS |= {f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors" for shard in range(_SHARDS)}

TARGET = Target(_run, _seeds, seconds=5, mutate=json_mutator(_WORDS))
