"""A GPU as products see it, and the tiles of a product, by arithmetic or from a table measured on a device."""

from __future__ import annotations

import functools
import json
import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.errors import ConfigError
from minifloat.kernels.linear.triton.layout import TILE_COLS, GpuForm
from minifloat.kernels.triton_runtime import why_unavailable

#: The first compute capability with bfloat16 tensor cores and asynchronous copies.
MIN_CAPABILITY = (8, 0)
#: Shared memory available to one CTA. Source: CUDA programming guide, technical specifications per compute capability.
_SHARED_BYTES = {
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (12, 0): 99 << 10,
}
#: Maximum number of tiles of the result with counters in one launch.
MAX_TILES = 1 << 12
_STREAMS = 128
#: Counters tell a CTA whether it is the last of its tile; the last sets them to zero again. Each stream has a row of
#: them, zeroed once: a captured graph could not zero new ones, and uses the row of the stream that it was captured on.
#: For each device: the rows of counters, and the index of the row by stream.
_ROWS: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that determine the configuration."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int
    name: str = ""

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> Device:
        properties = torch.cuda.get_device_properties(device)
        return cls(
            (properties.major, properties.minor),
            properties.multi_processor_count,
            _SHARED_BYTES.get((properties.major, properties.minor), min(_SHARED_BYTES.values())),
            properties.name,
        )


def why_not(device: torch.device | str = "cuda") -> str:
    """Return why the kernels cannot compute on a device; empty if they can."""
    return _why_not(torch.device(device))


# `torch.compile` cannot trace the search for triton. This mark is what `torch.compiler.assume_constant_result` sets,
# which imports the compiler: that takes longer than the rest of the package.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return f"Triton kernels run on CUDA devices, not on {device}"
    reason = why_unavailable(str(device))
    if reason:
        return reason
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels decode with instructions of NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        name, needed = torch.cuda.get_device_name(device), ".".join(map(str, MIN_CAPABILITY))
        return f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need {needed}"
    return ""


def prepare(device: torch.device) -> None:
    if device not in _ROWS:
        _ROWS[device] = torch.zeros((_STREAMS, MAX_TILES), dtype=torch.int32, device=device), {}
        torch.cuda.synchronize(device)


def take(device: torch.device, tiles: int) -> Tensor:
    """Return at least `tiles` zeros, int32, for a launch on the current stream."""
    if device.type != "cuda":  # Triton's interpreter
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    prepare(device)
    counters, rows = _ROWS[device]
    row = rows.setdefault(torch.cuda.current_stream(device).cuda_stream, len(rows))
    if row < _STREAMS and tiles <= MAX_TILES:
        return counters[row]
    return torch.zeros(tiles, dtype=torch.int32, device=device)


# The arithmetic wants CTAs that are all on the device at once, with as many loads in flight as shared memory holds; K
# is split where tiles are too few to fill the device. Its numbers for Hopper and Blackwell are those measured on an
# H100.

#: The environment variable with the path of the table; if it is empty, no table is read.
TABLE_VARIABLE = "MINIFLOAT_GPU_TABLE"
#: a table has a configuration for each of these numbers of rows of x; each covers all numbers up to its own.
BUCKETS = (16, 32, 64, 128, 256, 512, 1024)
#: Maximum number of partial sums of one tile.
MAX_SPLIT = 16
#: Smallest number of steps of a CTA that shares its tile, where two or fewer CTAs are on a multiprocessor, and where
#: more are.
_MIN_STEPS = (4, 2)
#: What a CTA costs beside its steps, in steps: its first loads, and the sum of the others.
_STEPS_BESIDE = 2
#: Products whose configuration is remembered: prompts have any number of rows.
_REMEMBERED = 1 << 12
_RESERVED = 1 << 10  #: bytes of shared memory that a CTA cannot use


@dataclass(frozen=True)
class Config:
    rows_m: int
    rows_n: int
    tiles: int
    warps: int
    stages: int
    split: int

    @property
    def is_large(self) -> bool:
        return self.split == 0


LARGE = Config(0, 0, 0, 0, 0, 0)


def choose(form: GpuForm, shape: tuple[int, int], rows: int, parts: int, device: Device) -> Config:
    measured = _table(device.name).get((form, *shape, bucket(rows), parts))
    return measured if measured is not None else by_arithmetic(form, shape, rows, parts, device)


def bucket(rows: int) -> int:
    """Return the entry of `BUCKETS` that covers `rows`."""
    return next((most for most in BUCKETS if rows <= most), BUCKETS[-1])


@functools.lru_cache(maxsize=_REMEMBERED)
def by_arithmetic(form: GpuForm, shape: tuple[int, int], rows: int, parts: int, device: Device) -> Config:
    """Return the configuration that `choose` returns without a table."""
    if rows > large_from(parts, device):
        return LARGE
    width = next((most for most in (16, 32, 64, 128) if rows <= most and most * parts <= 128), 128 // parts)
    columns = width * parts
    even = -(-shape[1] // TILE_COLS) % 2 == 0
    pairs = 2 if even and columns <= 32 and form is not GpuForm.FP8_BLOCK else 1
    if device.capability[0] not in (9, 10):
        rows_n = 64 if shape[0] <= 6144 or columns > 32 else 128
        return cut(Config(width, rows_n, pairs, 4, 0, 1), form, shape, rows, parts, device)
    small = -(-shape[0] // 64) * -(-rows // width)  # tiles of the result, of 64 rows of the weight
    if columns > 64:
        # The sums of blocks need registers of their own.
        rows_n = 256 if small >= 4 * device.multiprocessors and form is not GpuForm.FP8_BLOCK else 128
        return cut(Config(width, rows_n, 1, 8, 0, 1), form, shape, rows, parts, device)
    if columns > 32:
        rows_n, warps, most = (64, 4, 4) if small <= 2 * device.multiprocessors else (128, 8, 3)
        wide = Config(width, rows_n, 1, warps, 0, 1)
        return cut(wide, form, shape, rows, parts, device, resident=2, most_stages=most)
    few = small <= 3 * device.multiprocessors
    if form in (GpuForm.MXFP4, GpuForm.NVFP4):
        best = Config(width, 64, pairs, 4, 0, 1)
        return cut(best, form, shape, rows, parts, device, resident=3 if few or columns == 32 else 4)
    if not few:
        many = cut(Config(width, 128, pairs, 4, 0, 1), form, shape, rows, parts, device, most_stages=6)
        return many if many.stages > 2 else cut(replace(many, tiles=1), form, shape, rows, parts, device)
    three = cut(Config(width, 64, 1, 4, 0, 1), form, shape, rows, parts, device, resident=3, most_stages=6)
    if pairs == 1:
        return three
    one = cut(Config(width, 64, pairs, 4, 0, 1), form, shape, rows, parts, device, resident=1, most_stages=6)
    is_one_round = small * one.split <= device.multiprocessors
    costs = [_cost(one, shape, rows, 1, device), _cost(three, shape, rows, 3, device)]
    return one if is_one_round and costs[0] < costs[1] else three


def cut(
    config: Config,
    form: GpuForm,
    shape: tuple[int, int],
    rows: int,
    parts: int,
    device: Device,
    *,
    resident: int | None = None,
    most_stages: int = 4,
) -> Config:
    """Set the stages of a configuration to as many as fit, and split K so that the device is full."""
    resident = resident or (2 if config.warps == 4 else 1)
    room = device.shared_bytes // resident - _RESERVED
    fitting = (n for n in range(most_stages, 2, -1) if shared_bytes(replace(config, stages=n), form, parts) <= room)
    config = replace(config, stages=next(fitting, 2))
    steps = -(-shape[1] // TILE_COLS) // config.tiles
    results = -(-shape[0] // config.rows_n) * -(-rows // config.rows_m)
    fills = results >= resident * device.multiprocessors
    most = 1 if fills or results > MAX_TILES else max(1, min(MAX_SPLIT, steps // _MIN_STEPS[resident > 2]))
    splits = [replace(config, split=split) for split in range(1, most + 1)]
    return min(splits, key=lambda each: _cost(each, shape, rows, resident, device))


def _cost(config: Config, shape: tuple[int, int], rows: int, resident: int, device: Device) -> int:
    """Return weights that a multiprocessor loads if all CTAs take equally long, those loaded beside the steps too."""
    ctas = -(-shape[0] // config.rows_n) * -(-rows // config.rows_m) * config.split
    rounds = -(-ctas // (resident * device.multiprocessors))
    steps = -(-(-(-shape[1] // TILE_COLS) // config.tiles) // config.split) + _STEPS_BESIDE
    return rounds * resident * steps * config.rows_n * config.tiles * TILE_COLS


def large_from(parts: int, device: Device) -> int:
    """Return the largest number of rows of x to decode in registers; for more, decoding once into memory is faster."""
    return (512 if device.capability[0] == 9 else 256) // parts


def shared_bytes(config: Config, form: GpuForm, parts: int) -> int:
    """Return the shared memory of a CTA: the current weights are in registers, and x in parts is stored once more."""
    element_bits = 4 if form in (GpuForm.MXFP4, GpuForm.NVFP4) else 8
    cols = config.tiles * TILE_COLS
    weights = config.rows_n * cols * element_bits // 8
    factors = 0 if form in (GpuForm.FP8, GpuForm.FP8_BLOCK) else config.rows_n * cols // 16
    x = config.rows_m * cols * max(parts, 2)
    x_in_parts = 0 if parts == 1 else config.rows_m * cols * parts * 2
    return (config.stages - 1) * (weights + factors) + config.stages * x + x_in_parts


def table_path(name: str) -> Path | None:
    """Return the path of the table of a device; None if the environment variable `TABLE_VARIABLE` is empty."""
    path = os.environ.get(TABLE_VARIABLE)
    if path is not None:
        return Path(path) if path else None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "minifloat" / f"linear-{re.sub('[^A-Za-z0-9]+', '-', name).strip('-').lower()}.json"


@functools.cache
def _table(name: str) -> dict[tuple[Any, ...], Config]:
    path = table_path(name) if name else None
    return read_table(path) if path is not None and path.is_file() else {}


def read_table(path: Path) -> dict[tuple[Any, ...], Config]:
    """Read a table of `benchmarks/gpu_tune.py`."""
    try:
        rows = json.loads(path.read_text())
        return {
            (GpuForm[row["form"]], row["n"], row["k"], row["rows"], row["parts"]): _checked(Config(**row["config"]))
            for row in rows
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(path, f"no table of configurations ({error}); make it anew, or remove it") from error


def write_table(path: Path, table: dict[tuple[Any, ...], Config]) -> None:
    rows = [
        {"form": form.name, "n": n, "k": k, "rows": rows, "parts": parts, "config": asdict(config)}
        for (form, n, k, rows, parts), config in table.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    _table.cache_clear()


def _checked(config: Config) -> Config:
    values = asdict(config).values()
    if not all(isinstance(value, int) for value in values):
        raise ValueError(f"a configuration of numbers, got {config}")
    powers = (config.rows_m, config.rows_n, config.warps)
    valid = all(value > 0 and value & (value - 1) == 0 for value in powers) and config.tiles in (1, 2)
    if not config.is_large and not (valid and config.rows_n in (64, 128, 256) and 1 <= config.split <= MAX_SPLIT):
        raise ValueError(f"no configuration: {config}")
    return config
