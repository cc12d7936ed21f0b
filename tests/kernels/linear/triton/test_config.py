"""The tile sizes of a product, the table of tiles of a device, and the command that measures such a table."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minifloat.errors import ConfigError
from minifloat.kernels.linear.triton import config as configs
from minifloat.kernels.linear.triton.config import (
    BUCKETS,
    LARGE,
    MAX_SPLIT,
    Config,
    Device,
    bucket,
    by_arithmetic,
    choose,
    read_table,
    shared_bytes,
    table_path,
    write_table,
)
from minifloat.kernels.linear.triton.layout import TILE_COLS, GpuForm, Order, form_of
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import quantize_tensor

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
A100, L40S = Device((8, 0), 108, 163 << 10), Device((8, 9), 142, 99 << 10)
H200, B200 = Device((9, 0), 132, 227 << 10, "NVIDIA H200"), Device((10, 0), 148, 227 << 10)
SHAPES = ((1, 32), (64, 128), (1000, 1000), (4096, 4096), (6144, 4096), (4096, 14336), (57344, 8192), (128256, 4096))


@pytest.mark.parametrize("device", [A100, L40S, H200, B200], ids=str)
@pytest.mark.parametrize("form", GpuForm)
def test_every_product_has_a_configuration_that_the_kernels_can_run(form: GpuForm, device: Device) -> None:
    for shape in SHAPES:
        for parts in (1, 2, 4):
            for rows in (1, 7, 16, 17, 33, 64, 65, 129, 700, 4000):
                config = by_arithmetic(form, shape, rows, parts, device)
                if config.is_large:
                    assert rows > 64
                    continue
                assert shared_bytes(config, form, parts) <= device.shared_bytes
                assert config.rows_m * parts <= 128
                assert -(-shape[1] // TILE_COLS) % config.tiles == 0
                assert config.tiles == 1 or form is not GpuForm.FP8_BLOCK
                assert 1 <= config.split <= MAX_SPLIT
                assert config.split <= -(-shape[1] // TILE_COLS) // config.tiles
                assert config.warps * 16 <= config.rows_n


@pytest.mark.parametrize("form", GpuForm)
def test_few_rows_of_x_fill_the_device(form: GpuForm) -> None:
    for shape in ((4096, 4096), (6144, 4096), (4096, 14336), (28672, 4096)):
        config = by_arithmetic(form, shape, 1, 1, H200)
        ctas = -(-shape[0] // config.rows_n) * config.split
        assert ctas >= 0.9 * H200.multiprocessors
        assert shape[1] // TILE_COLS // config.tiles // config.split >= 2


@pytest.mark.parametrize(
    ("form", "shape", "rows", "fastest"),
    [
        (GpuForm.FP8, (4096, 4096), 16, Config(16, 64, 2, 4, 6, 2)),
        (GpuForm.FP8, (6144, 4096), 16, Config(16, 64, 1, 4, 6, 4)),
        (GpuForm.FP8, (4096, 14336), 16, Config(16, 64, 2, 4, 6, 2)),
        (GpuForm.FP8, (8192, 8192), 16, Config(16, 64, 2, 4, 6, 1)),
        (GpuForm.FP8_BLOCK, (4096, 4096), 16, Config(16, 64, 1, 4, 6, 6)),
        (GpuForm.MXFP4, (4096, 4096), 16, Config(16, 64, 2, 4, 4, 6)),
        (GpuForm.MXFP4, (6144, 4096), 16, Config(16, 64, 2, 4, 4, 4)),
        (GpuForm.MXFP4, (4096, 14336), 16, Config(16, 64, 2, 4, 4, 6)),
        (GpuForm.MXFP4, (8192, 8192), 16, Config(16, 64, 2, 4, 4, 3)),
        (GpuForm.FP8, (4096, 4096), 64, Config(64, 64, 1, 4, 4, 4)),
        (GpuForm.FP8, (4096, 14336), 64, Config(64, 64, 1, 4, 4, 4)),
        (GpuForm.MXFP4, (28672, 4096), 64, Config(64, 128, 1, 8, 3, 1)),
    ],
)
def test_the_arithmetic_finds_what_was_fastest_on_an_h100(
    form: GpuForm, shape: tuple[int, int], rows: int, fastest: Config
) -> None:
    """Within 3% of the fastest of about 40 configurations each, measured on 2026-11-23 with 16 and 64 rows of x."""
    assert by_arithmetic(form, shape, rows, 1, H200) == fastest


def test_many_rows_of_x_are_multiplied_by_cublas() -> None:
    assert by_arithmetic(GpuForm.MXFP4, (4096, 4096), 2048, 1, H200) == LARGE
    assert not by_arithmetic(GpuForm.MXFP4, (4096, 4096), 512, 1, H200).is_large


def test_the_order_of_columns_follows_from_the_compute_capability() -> None:
    assert [Order.of(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        Order.WIDE,
        Order.WIDE,
        Order.NARROW,
        Order.NARROW,
        Order.WIDE,
    ]


def test_numbers_of_rows_fall_into_buckets() -> None:
    assert [bucket(rows) for rows in (1, 16, 17, 1024, 5000)] == [16, 16, 32, 1024, 1024]
    assert list(BUCKETS) == sorted(BUCKETS)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "table.json"
    monkeypatch.setenv(configs.TABLE_VARIABLE, str(path))
    configs._table.cache_clear()
    return path


def test_a_measured_configuration_replaces_the_computed_one(table: Path) -> None:
    measured = Config(16, 64, 1, 4, 3, 5)
    write_table(table, {(GpuForm.MXFP4, 4096, 4096, 16, 1): measured, (GpuForm.FP8, 4096, 4096, 1024, 1): LARGE})
    assert read_table(table)[(GpuForm.FP8, 4096, 4096, 1024, 1)] == LARGE
    assert choose(GpuForm.MXFP4, (4096, 4096), 3, 1, H200) == measured
    for form, shape, rows, parts in (
        (GpuForm.NVFP4, (4096, 4096), 3, 1),
        (GpuForm.MXFP4, (4096, 4224), 3, 1),
        (GpuForm.MXFP4, (4096, 4096), 17, 1),
        (GpuForm.MXFP4, (4096, 4096), 3, 2),
    ):
        assert choose(form, shape, rows, parts, H200) == by_arithmetic(form, shape, rows, parts, H200)


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", '[{"form": "FP5"}]'],
)
def test_a_damaged_table_is_an_error_that_names_it(table: Path, text: str) -> None:
    table.parent.mkdir()
    table.write_text(text)
    with pytest.raises(ConfigError, match=r"table\.json: no table of configurations"):
        choose(GpuForm.MXFP4, (4096, 4096), 3, 1, H200)


@pytest.mark.parametrize("change", [{"rows_n": 96}, {"split": 99}, {"tiles": 3}, {"warps": "4"}])
def test_a_table_of_configurations_that_cannot_run_is_an_error(table: Path, change: dict[str, object]) -> None:
    config = {**dataclasses.asdict(Config(16, 64, 1, 4, 3, 5)), **change}
    table.parent.mkdir()
    table.write_text(json.dumps([{"form": "FP8", "n": 1, "k": 1, "rows": 16, "parts": 1, "config": config}]))
    with pytest.raises(ConfigError, match="no table of configurations"):
        read_table(table)


def test_the_table_of_a_device_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(configs.TABLE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/a/cache")
    assert table_path("NVIDIA H200") == Path("/a/cache/minifloat/linear-nvidia-h200.json")
    monkeypatch.setenv(configs.TABLE_VARIABLE, "")
    assert table_path("NVIDIA H200") is None


@pytest.mark.parametrize("form", GpuForm)
def test_tuning_has_weights_of_every_form(form: GpuForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    SCHEME_NAMES = importlib.import_module("gpu_tune").SCHEME_NAMES
    weight = quantize_tensor(torch.randn(256, 256), SCHEMES[SCHEME_NAMES[form]].weight)
    assert form_of(weight.spec, weight.shape) is form


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_tuning_without_a_device_is_one_line_and_status_2() -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_tune.py"), "--shape", "64x128"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: tuning measures on a GPU: ")
    assert len(result.stderr.splitlines()) == 1
