from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minifloat.calibration.result import STATS_FORMAT, read_stats, write_stats
from minifloat.calibration.stats import SCHEMA_VERSION, ActivationStats, KVStats, ModelIdentity, ModuleStats
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.array_file import ArrayContent, read_arrays, write_arrays
from minifloat.errors import CheckpointError, StatsError, StorageError
from minifloat.numerics.histogram import BINS, FINITE_BINS, bin_edges, count_magnitudes

MODEL = ModelIdentity("LlamaForCausalLM", "c" * 64, "t" * 64, "w" * 64)
ATTENTION = "model.layers.0.self_attn"


def module(
    rng: np.random.Generator, sequences: int, *, histogram: bool = True, channels: int | None = 5
) -> ModuleStats:
    tokens = rng.integers(0, 3, sequences)
    amax = np.where(tokens > 0, rng.random(sequences), 0).astype(np.float32)
    return ModuleStats(
        amax,
        tokens,
        count_magnitudes(rng.normal(size=50).astype(np.float32)) if histogram else None,
        rng.random(channels, dtype=np.float32) if channels else None,
    )


def make_stats(seed: int = 0, sequences: int = 3, **options: Any) -> ActivationStats:
    rng = np.random.default_rng(seed)
    shared = module(rng, sequences, **options)
    inputs = {f"{ATTENTION}.{name}": shared for name in ("q_proj", "k_proj", "v_proj")}
    inputs["model.layers.0.mlp.down_proj"] = module(rng, sequences, **options)
    heads = rng.random((2, sequences, 2), dtype=np.float32)
    return ActivationStats(
        MODEL, sequences, 7 * sequences, {"seed": seed}, inputs, {ATTENTION: KVStats(heads[0], heads[1])}
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "stats.safetensors"
    write_stats(make_stats(), path)
    return path


def test_the_module_imports_no_torch() -> None:
    code = "import sys, minifloat.calibration.scales, minifloat.calibration.scales; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# Histograms


def test_a_bin_holds_the_magnitudes_between_its_edges() -> None:
    rng = np.random.default_rng(0)
    values = (rng.normal(size=5000) * np.exp(rng.normal(size=5000) * 20)).astype(np.float32)
    expected, _ = np.histogram(np.abs(values).astype(np.float64), bin_edges())
    np.testing.assert_array_equal(count_magnitudes(values), expected)


def test_the_lower_edge_of_a_bin_is_in_it_and_the_upper_is_not() -> None:
    edges = bin_edges()[:FINITE_BINS].astype(np.float32)
    np.testing.assert_array_equal(count_magnitudes(edges)[:FINITE_BINS], np.ones(FINITE_BINS))


def test_a_bin_is_at_most_an_eighth_of_its_octave() -> None:
    edges = bin_edges()
    normal = edges[edges >= np.finfo(np.float32).tiny]
    assert (np.diff(normal) == 2.0 ** np.floor(np.log2(normal[:-1])) / 8).all()


# Validation of the arrays


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"amax": np.zeros(2)}, "amax: expected float32"),
        ({"amax": np.zeros((2, 1), np.float32)}, "amax: expected float32 of 1"),
        ({"amax": np.array([1, np.nan], np.float32)}, "not finite"),
        ({"amax": np.array([1, np.inf], np.float32)}, "not finite"),
        ({"amax": np.array([1, -1], np.float32)}, "negative"),
        ({"tokens": np.array([1, -1])}, "negative"),
        ({"tokens": np.array([1, 0])}, "without tokens"),
        ({"tokens": np.array([1])}, "sequences"),
        ({"histogram": np.zeros(BINS - 1, np.int64)}, "bins"),
        ({"histogram": np.ones(BINS, np.int64)}, "empty"),
        ({"channel_amax": np.array([np.nan], np.float32)}, "not finite"),
    ],
)
def test_invalid_arrays_are_refused(change: dict[str, Any], message: str) -> None:
    valid = ModuleStats(np.array([1, 2], np.float32), np.array([3, 4]))
    with pytest.raises(ValueError, match=message):
        replace(valid, **change)


def test_a_module_with_another_number_of_sequences_is_refused() -> None:
    stats = make_stats()
    odd = module(np.random.default_rng(1), 4)
    with pytest.raises(ValueError, match="odd: 4 sequences, expected 3"):
        replace(stats, inputs={**stats.inputs, "odd": odd})


# The file


@pytest.mark.parametrize(
    "stats",
    [
        make_stats(),
        make_stats(sequences=0),
        make_stats(histogram=False, channels=None),
        replace(make_stats(), kv={}),
        replace(make_stats(), inputs={}, data={"text": "ü\0\ud800", "deep": [{"a": [1.5, None, True]}]}),
    ],
    ids=["all", "no sequences", "amax alone", "no attention", "odd data"],
)
def test_saved_statistics_are_loaded_bit_for_bit(stats: ActivationStats, tmp_path: Path) -> None:
    path = tmp_path / "stats"
    write_stats(stats, path)
    loaded = read_stats(path)
    assert loaded == stats
    assert [p.name for p in tmp_path.iterdir()] == ["stats"]


def test_equal_statistics_give_equal_bytes_whatever_the_order_of_the_modules(saved: Path, tmp_path: Path) -> None:
    stats = make_stats()
    write_stats(replace(stats, inputs=dict(reversed(stats.inputs.items()))), tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


def test_the_safetensors_package_can_read_the_file(saved: Path) -> None:
    from safetensors.numpy import load_file

    arrays = load_file(saved)
    stats = make_stats()
    assert arrays["amax"].shape == (2, 3)  # q, k and v share a row
    assert stats.inputs["model.layers.0.mlp.down_proj"].amax.tolist() in arrays["amax"].tolist()


def test_a_large_model_makes_a_small_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lengths = np.full(512, 2048)
    histogram = count_magnitudes(rng.normal(size=100_000).astype(np.float32))
    inputs = {}
    for layer in range(80):
        for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
            shared = ModuleStats(rng.random(512, dtype=np.float32), lengths, histogram + layer * (histogram > 0))
            inputs |= {f"model.layers.{layer}.{name}": shared for name in names}
    write_stats(ActivationStats(MODEL, 512, 512 * 2048, {}, inputs), tmp_path / "stats")
    assert (tmp_path / "stats").stat().st_size < 2e6


def test_a_file_is_replaced_whole_or_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_stats(make_stats(1), saved)
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [saved.name]


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], Any]) -> None:
    """Change the content of a file and update its hash to match."""
    file = read_arrays(path, STATS_FORMAT)
    arrays = {name: file.array(name).copy() for name in STATS_FORMAT.arrays or ()}
    record = json.loads(json.dumps(file.record))
    change(record, arrays)
    write_arrays(path, STATS_FORMAT, ArrayContent(record, arrays))


def first(content: dict[str, Any]) -> list[int]:
    rows: list[int] = next(iter(content["inputs"].values()))
    return rows


def put(target: Any, key: Any, value: Any) -> None:
    target[key] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda content, arrays: content.pop("model"),
        lambda content, arrays: put(content, "model", "llama"),
        lambda content, arrays: put(content["model"], "config", 3),
        lambda content, arrays: put(content, "sequences", 2),
        lambda content, arrays: put(content, "sequences", "3"),
        lambda content, arrays: put(content, "tokens", -1),
        lambda content, arrays: put(content, "tokens", 1.5),
        lambda content, arrays: put(content, "data", 3),
        lambda content, arrays: put(content, "inputs", []),
        lambda content, arrays: put(content, "inputs", {"m": None}),
        lambda content, arrays: put(content, "inputs", {"m": [0]}),
        lambda content, arrays: put(first(content), 0, -1),
        lambda content, arrays: put(first(content), 0, 10**30),
        lambda content, arrays: put(first(content), 0, True),
        lambda content, arrays: put(first(content), 1, None),
        lambda content, arrays: put(first(content), 2, 99),
        lambda content, arrays: put(content, "channels", [10**30]),
        lambda content, arrays: put(content, "channels", [1]),
        lambda content, arrays: put(content, "kv", {ATTENTION: 1}),
        lambda content, arrays: put(content, "kv", {ATTENTION: -2}),
        lambda content, arrays: put(content, "kv", 5),
        lambda content, arrays: put(arrays["amax"], (0, 0), np.nan),
        lambda content, arrays: put(arrays["amax"], (0, 0), np.inf),
        lambda content, arrays: put(arrays["k_amax"], (0, 0), -1),
        lambda content, arrays: put(arrays["v_amax"], (0, 0), np.nan),
        lambda content, arrays: put(arrays["tokens"], (0, 0), -1),
        lambda content, arrays: put(arrays["histogram"], (0, 0), -1),
        lambda content, arrays: put(arrays["bins"], 0, -1),
        lambda content, arrays: put(arrays["bins"], -1, BINS),
        lambda content, arrays: put(arrays["bins"], -1, FINITE_BINS),
        lambda content, arrays: put(arrays["bins"], 0, arrays["bins"][1]),
        lambda content, arrays: put(arrays, "bins", arrays["bins"][:-1]),
        lambda content, arrays: put(arrays, "bins", arrays["bins"][None]),
        lambda content, arrays: put(arrays, "amax", arrays["amax"].astype("<i8")),
        lambda content, arrays: put(arrays, "amax", arrays["amax"][:, :-1].copy()),
        lambda content, arrays: put(arrays, "k_amax", arrays["k_amax"][:-1]),
        lambda content, arrays: arrays.update(extra=arrays["amax"]),
    ],
)
def test_a_forged_file_is_refused(saved: Path, change: Callable[..., Any]) -> None:
    forge(saved, lambda content, arrays: None)
    assert read_stats(saved) == make_stats()
    forge(saved, change)
    with pytest.raises(StatsError):
        read_stats(saved)


def test_a_file_of_another_version_is_refused_with_both_versions(saved: Path) -> None:
    data = saved.read_bytes()
    ours = f'"version":"{SCHEMA_VERSION}"'.encode()
    assert ours in data
    saved.write_bytes(data.replace(ours, b'"version":"9"'))
    with pytest.raises(StatsError, match=f"version '9', this minifloat reads version '{SCHEMA_VERSION}'"):
        read_stats(saved)


def test_a_weight_file_is_refused_as_statistics(llama_folder: Path) -> None:
    with pytest.raises(StatsError, match="no activation statistics"):
        read_stats(llama_folder / "model.safetensors")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(StatsError, match="no such file"):
        read_stats(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_stats(tmp_path)
    with pytest.raises(StorageError):
        write_stats(make_stats(), tmp_path / "absent" / "stats")


# Model identity


def stats_of(folder: Path) -> ActivationStats:
    with Checkpoint.open(folder) as checkpoint:
        return ActivationStats(ModelIdentity.of(checkpoint), 0, 0, {}, {})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_model_saved_by_another_version_of_transformers_is_recognized(llama_folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "renamed.safetensors").write_bytes((llama_folder / "model.safetensors").read_bytes())
    (copy / "config.json").write_bytes((llama_folder / "config.json").read_bytes())
    edit_config(copy, transformers_version="4.0.0", _name_or_path="elsewhere", torch_dtype="bfloat16")
    with Checkpoint.open(copy) as checkpoint:
        stats_of(llama_folder).check_model(checkpoint)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"seed": 1}, "the values of the weights"),
        ({"dtype": "float32"}, "the names, dtypes or shapes of the tensors, the values of the weights"),
        ({"rope_theta": 5e5}, "the config"),
        ({"model_type": "qwen3"}, r"the architecture \(LlamaForCausalLM, Qwen3ForCausalLM\)"),
    ],
)
def test_another_model_is_refused_and_the_difference_named(
    llama_folder: Path, make_model: Any, tmp_path: Path, make: dict[str, Any], message: str
) -> None:
    other = make_model(tmp_path / "other", **{"model_type": "llama", **make})
    with (
        Checkpoint.open(other) as checkpoint,
        pytest.raises(
            StatsError, match=f"other: the activation statistics are of another model, it differs in {message};"
        ),
    ):
        stats_of(llama_folder).check_model(checkpoint)
