"""`benchmarks/decode.py`: the comparison with the bars; `benchmarks/serve.py`: a run at the smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from minifloat.bench import shapes

pytest.importorskip("fastapi")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import decode

    return decode


def measured(decode: ModuleType, name: str, seconds: list[float]) -> object:
    one = decode.Measured(name, None)
    one.step, one.first = {1: seconds}, {1: [10 * value for value in seconds]}
    return one


def test_bars_are_judged_round_by_round(decode: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    # The machine runs at half its speed in the last two rounds; the ratio is 3 in every round.
    engines = [
        measured(decode, decode.BASELINE, [0.3, 0.6, 0.6]),
        measured(decode, "minifloat FP8", [0.1, 0.2, 0.2]),
        measured(decode, "minifloat MXFP4", [0.1, 0.2, 0.2]),
    ]
    decode.judge(engines, [{"engine": "minifloat FP8", "batch": 1, "read_share": 0.7}], [1])
    lines = capsys.readouterr().out.splitlines()
    words = {line.split("  ")[0]: line.split()[-1] for line in lines[2:]}
    assert words["batch 1: minifloat FP8 over transformers BF16"] == "pass"
    assert words["batch 1: minifloat MXFP4 over transformers BF16"] == "SHORT"
    assert words["batch 1: minifloat FP8 over llama.cpp Q8_0"] == "measured"
    assert words["prefill: minifloat FP8 over transformers BF16"] == "pass"
    assert words["batch 1: minifloat FP8, share of the bound"] == "SHORT"


class Fake:
    """An engine that answers with given times."""

    nbytes = 0

    def __init__(self, *answers: tuple[float, float]) -> None:
        self.answers = list(answers)

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        return self.answers.pop(0)


def test_a_step_of_no_time_is_measured_again_and_then_an_error(decode: ModuleType) -> None:
    load = decode.Workload(8, 4, (1,))
    engine = decode.Measured("noisy", Fake((0.1, -0.01), (0.1, 0.02)))
    engine.sample(load, 0, 1, 4)
    assert engine.step == {1: [0.02]}
    engine = decode.Measured("noisy", Fake((0.1, 0.0), (0.1, -0.2), (0.0, 0.1)))
    with pytest.raises(decode.MinifloatError, match=r"noisy, batch 1: .* after 3 attempts"):
        engine.sample(load, 0, 1, 4)


def test_no_round_begins_when_the_minutes_are_over(decode: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PROBE_BYTES", 1 << 20)
    settings = decode.Settings(Path(), "", 1, (1,), 3, 0.0, 4, "", "", "", ())
    engine = decode.Measured("one", Fake(*[(0.1, 0.02)] * 4))
    assert len(decode.measure(settings, [engine])) == 1
    assert engine.step == {1: [0.02]}


def test_kv_bytes_per_token_match_the_shape(decode: ModuleType) -> None:
    shape = shapes.get_shape(decode.SHAPE)
    assert shape.layers * 2 * shape.kv_heads * shape.head_dim * 2 == decode.KV_BYTES
    assert shape.vocab == decode.VOCAB


def test_every_tensor_of_the_shape_has_a_name_in_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import decode_models

    names = [decode_models.gguf_name(tensor.name) for tensor in shapes.get_shape("tinyllama-1.1b").tensors]
    assert names[:3] == ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight"]
    assert names[-2:] == ["output_norm.weight", "output.weight"]
    assert len(set(names)) == len(names)


@pytest.mark.full
def test_a_server_is_measured_through_its_socket(tmp_path: Path, llama_folder: Path) -> None:
    out = tmp_path / "serve.json"
    sizes = (
        "--input-len",
        "8",
        "--output-len",
        "4",
        "--mixed-output-len",
        "8",
        "--pause",
        "0.01",
        "--num-prompts",
        "2",
    )
    short = ("--concurrency", "1,2", "--threads", "1", "--mixed-prompt", "16", *sizes)
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / "serve.py"), str(llama_folder), *short, "--json", str(out)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(out.read_text())["results"]
    assert found["runs"]["concurrency 2"]["completed"] == 2
    assert found["runs"]["mixed"]["completed"] == 8
    assert 0 < found["rss_ready"] <= found["allowed"]
    assert "concurrency 2" in result.stdout
