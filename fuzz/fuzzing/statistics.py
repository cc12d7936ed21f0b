"""Files that `calibrate` writes: they are refused, or can be used and written again.

The digests in a changed file are made right again, because a stranger would do that too.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from fuzzing import small
from fuzzing.mutation import (
    change,
    change_bytes,
    decoded,
    encoded,
    join_safetensors,
    split_safetensors,
    words_of,
)
from fuzzing.target import Target
from minifloat import Calibration, Checkpoint, QuantizeOptions, quantize_checkpoint
from minifloat.calibration.result import STATS_FORMAT, read_stats, write_stats
from minifloat.calibration.rules import parse_rule
from minifloat.calibration.stats import ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.calibration.summary import summarize
from minifloat.checkpoint.header import encode_header
from minifloat.checkpoint.tensors import OutputTensor
from minifloat.errors import MinifloatError
from minifloat.numerics.histogram import count_magnitudes

_RULES = ("max", "percentile:99", "mse")


def _run(data: bytes) -> None:
    path = small.fresh("statistics.safetensors")
    path.write_bytes(data)
    stats = read_stats(path)
    copy = small.fresh("copy.safetensors")
    write_stats(stats, copy)
    again = read_stats(copy)
    assert again.inputs == stats.inputs
    assert again.data == stats.data
    for rule in _RULES:
        _unless_refused(lambda rule=rule: summarize(stats, parse_rule(rule), stats))
    calibration = Calibration(stats)
    for scheme in ("fp8-static", "nvfp4-w4a4"):
        output = small.fresh("static")
        _unless_refused(
            lambda output=output, scheme=scheme: quantize_checkpoint(
                small.checkpoint(), output, scheme, QuantizeOptions(kv_cache=True), calibration=calibration
            )
        )
        if output.is_dir():
            _require_scales(output)


def _unless_refused(step: Callable[[], object]) -> None:
    with contextlib.suppress(MinifloatError):
        step()


def _require_scales(folder: Path) -> None:
    """Raise unless every scale of inputs and caches is a positive finite number."""
    with Checkpoint.open(folder) as written:
        for name, info in written.tensors.items():
            if name.endswith(("input_scale", "k_scale", "v_scale", "input_global_scale")):
                bits = written.read(name).tobytes()
                values = np.frombuffer(bits, "<f4") if info.dtype == "F32" else _of_bf16(bits)
                assert np.isfinite(values).all(), name
                assert (values > 0).all(), name


def _of_bf16(bits: bytes) -> np.ndarray:
    return (np.frombuffer(bits, "<u2").astype(np.uint32) << 16).view(np.float32)


def _metadata(header: object) -> dict[str, str]:
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}


def _mutate(data: bytes, largest: int, random: Random) -> bytes:
    parts = split_safetensors(data)
    if parts is None or random.random() < 0.1:
        return change_bytes(data, random)[:largest]
    header, tail = parts
    metadata = _metadata(header)
    content = decoded(str(metadata.get("record", "{}")).encode("utf-8", "surrogatepass"))
    kind = random.randrange(3)
    if kind == 0:
        header = change(header, random, _WORDS)
    elif kind == 1 and content is not None:
        metadata["record"] = encoded(change(content, random, _WORDS | words_of(content))).decode()
    elif tail:
        flipped = bytearray(tail)
        for _ in range(random.choice((1, 1, 2, 4))):
            position = random.randrange(len(flipped))
            flipped[position] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
        tail = bytes(flipped)
    return join_safetensors(_with_digest(header, tail), tail)[:largest]


def _with_digest(header: object, tail: bytes) -> object:
    """Return the header with the digest that it and these data have; a header that can have none, unchanged."""
    metadata = _metadata(header)
    if not isinstance(metadata.get("record"), str) or not isinstance(header, dict):
        return header
    try:
        entries = [(entry["data_offsets"], name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda each: each[0])
        outputs = [OutputTensor(name, entry["dtype"], tuple(entry["shape"])) for _, name, entry in entries]
        plain, _ = encode_header(outputs, {key: value for key, value in metadata.items() if key != "sha256"})
    except Exception:  # the header is not valid
        return header
    metadata["sha256"] = hashlib.sha256(plain + tail).hexdigest()
    return header


def _seeds() -> dict[str, bytes]:
    random = np.random.default_rng(0)

    def module(tokens: list[int], histogram: bool = True) -> ModuleStats:
        counts = np.array(tokens, np.int64)
        amax = np.where(counts > 0, random.random(len(tokens)), 0).astype(np.float32)
        magnitudes = count_magnitudes(random.normal(size=50).astype(np.float32)) if histogram else None
        return ModuleStats(amax, counts, magnitudes, random.random(128, dtype=np.float32))

    with Checkpoint.open(small.checkpoint()) as checkpoint:
        identity = ModelIdentity.of(checkpoint)
        linears = [name.removesuffix(".weight") for name in checkpoint.tensors if "_proj" in name]
    heads = random.random((2, 3, 4), dtype=np.float32)
    shared = module([3, 0, 4])
    inputs = {name: shared if "down" not in name else module([2, 2, 2]) for name in linears}
    kv = {f"model.layers.{layer}.self_attn": KVStats(heads[0], heads[1]) for layer in range(2)}
    stats = ActivationStats(identity, 3, 7, {"source": "text", "seed": 0}, inputs, kv)
    path = small.fresh("seed.safetensors")
    write_stats(stats, path)
    return {"statistics": path.read_bytes()}


_WORDS = {*(STATS_FORMAT.arrays or ()), "F32", "I64", "F16", "U8", "record", "sha256", "version", "format"}
_WORDS |= {"tokens", "channels", "kv", "inputs", "1", "2"}

TARGET = Target(_run, _seeds, seconds=5, mutate=_mutate)
