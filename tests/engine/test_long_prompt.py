"""Long prompts: memory of chunked prefill, and the time of the parts of its steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.kernels import native

MakeModel = Callable[..., Path]
TOKENS = 6144
WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 2048,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 8192,
}
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)

needs_native = pytest.mark.skipif(native.load() is None, reason="needs the native library")


@pytest.fixture(scope="module")
def wide_folder(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("long") / "m", "llama", **WIDE)


def peak_growth(engine: Engine, tokens: int) -> int:
    """Return by how many bytes resident memory grows at most while the engine computes a prompt."""
    status = Path("/proc/self/status")

    def read(field: str) -> int:
        (line,) = (line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) << 10

    engine.generate([[1] * 600], ONE_TOKEN)  # buffers of a step of 512 tokens
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = read("VmRSS")
    engine.generate([[1 + i % 250 for i in range(tokens)]], ONE_TOKEN)
    return read("VmHWM") - before


@needs_native
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_prompt_takes_no_memory_but_that_of_the_cache(wide_folder: Path) -> None:
    limit = TOKENS + 128
    engine = Engine(wide_folder, EngineOptions(max_model_len=limit, max_num_seqs=1, prefix_cache=False))
    whole = Engine(
        wide_folder,
        EngineOptions(max_model_len=limit, max_num_seqs=1, prefix_cache=False, max_num_batched_tokens=limit),
    )
    cache = TOKENS * engine.info.kv_bytes_per_token
    one_row = 3 * WIDE["intermediate_size"] * 2  # of gate, up and their product, in BF16
    assert cache < 2 << 20
    assert peak_growth(engine, TOKENS) < cache + (8 << 20) < TOKENS * one_row
    assert peak_growth(whole, TOKENS) > TOKENS * one_row  # what a prompt takes that is not cut


@needs_native
def test_the_time_of_steps_is_known_by_part(wide_folder: Path) -> None:
    engine = Engine(wide_folder, EngineOptions(max_num_seqs=1, prefix_cache=False))
    assert set(engine.part_seconds().values()) == {0.0}

    def shares(tokens: int) -> dict[str, float]:
        before, started = engine.part_seconds(), time.perf_counter()
        engine.generate([[1] * tokens], ONE_TOKEN)
        wall = time.perf_counter() - started
        spent = {name: seconds - before[name] for name, seconds in engine.part_seconds().items()}
        assert 0 < sum(spent.values()) < wall
        return {name: seconds / sum(spent.values()) for name, seconds in spent.items()}

    short, long = shares(64), shares(4096)
    assert set(short) == {"linears", "attention", "rows"}
    assert long["attention"] > short["attention"]


def test_other_runners_measure_no_parts(wide_folder: Path) -> None:
    assert Engine(wide_folder, EngineOptions(runner="transformers")).part_seconds() == {}
