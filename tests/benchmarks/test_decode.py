"""`benchmarks/decode.py`: verdicts, doubts and missing engines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minifloat.evaluate.bench import shapes

FP8, MXFP4, BASELINE = "minifloat FP8", "minifloat MXFP4", "transformers BF16"
QUIET = {"others": 0.01, "stolen": 0.0}


def row(engine: str, steps: list[float], prompts: list[float] | None = None, batch: int = 1) -> dict[str, Any]:
    prompts = prompts or [10 * step for step in steps]
    sizes = {"bytes": 1_000_000_000, "rss": 2_000_000_000, "peak_rss": 3_000_000_000}
    return {"engine": engine, "batch": batch, "steps": steps, "prompts": prompts} | sizes


def piece(*rows: dict[str, Any], isa: str = "avx512_bf16", use: dict[str, float] | None = QUIET) -> dict[str, Any]:
    rounds = len(rows[0]["steps"])
    fixed = {"piece": "all", "machine": {"instruction_set": isa}, "prompt_tokens": 256, "output_len": 12}
    return fixed | {"bandwidths": [2e10] * rounds, "use": use, "rows": list(rows)}


def test_bars_are_judged_round_by_round(decode_report: ModuleType) -> None:
    # The machine runs at half its speed in the last two rounds; the ratio is 3 in every round.
    slow = piece(
        row(BASELINE, [0.3, 0.6, 0.6]), row(FP8, [0.1, 0.2, 0.2]), row(MXFP4, [0.1, 0.2, 0.2]), isa="avx512_bf16"
    )
    words = {line.split("  ")[0]: line.split()[-1] for line in decode_report.verdicts([slow])}
    assert words["batch 1, step: minifloat FP8 over transformers BF16"] == "pass"
    assert words["batch 1, step: minifloat MXFP4 over transformers BF16"] == "SHORT"
    assert words["batch 1, step: minifloat FP8 over llama.cpp Q8_0"] == "measured"
    assert words["batch 1, prompt: minifloat FP8 over transformers BF16"] == "pass"
    # 1 GB in 0.1 s is 50% of the 20 GB/s of that round, and 25% of those of the others.
    assert words["batch 1, all: minifloat FP8, share of the read bandwidth"] == "SHORT"


def test_a_run_beside_other_work_is_not_to_be_quoted(decode_report: ModuleType) -> None:
    steady = row(FP8, [0.1] * 3)
    assert decode_report.doubts(piece(steady, use={"others": 0.3, "stolen": 0.1})) == [
        "the run: other processes used 30% of the machine",
        "the run: the hypervisor took 10% of the machine's time",
    ]
    assert decode_report.doubts(piece(steady, use=None)) == ["the run: the system does not say how busy it is"]
    assert decode_report.doubts(piece(row(FP8, [0.1, 0.1]))) == ["the run: 2 rounds are too few"]


def test_a_figure_that_varies_is_not_to_be_quoted(decode_report: ModuleType) -> None:
    rows = (row(FP8, [0.1, 0.1, 0.12], [1.0] * 3), row(MXFP4, [0.1] * 3, [1.0, 1.2, 1.0], batch=8))
    assert decode_report.doubts(piece(*rows)) == ["minifloat FP8, batch 1, step: spread 20%"]


def test_the_table_names_losses_and_spreads(decode_report: ModuleType) -> None:
    rows = (
        row(FP8, [0.1] * 3, [1.0] * 3),
        row(MXFP4, [0.05] * 3, [1.0] * 3),
        row("OpenVINO INT4", [0.06, 0.08, 0.1], [0.5] * 3),
    )
    lines = list(decode_report.markdown([piece(*rows)]))
    assert lines[0] == "| engine | batch 1: ms per step | 256 tokens of prompt, ms | RSS, MB (peak) |"
    assert lines[2] == "| minifloat FP8 | 100.0 | 1000 | 2000 (3000) |"
    assert lines[4] == ("| OpenVINO INT4 | 80.0 ±50% (**0.80x**, 1.60x) | 500 (**0.50x**, **0.50x**) | 2000 (3000) |")


def test_an_engine_that_is_missing_is_named_with_the_reason(decode: ModuleType, tmp_path: Path) -> None:
    pythons = {"openvino": "/bin/python", "vllm": "/bin/python"}
    installed = decode.Installed(tmp_path, str(tmp_path / "tl"), pythons, has_amx=False)
    (tmp_path / "tl-INT8").mkdir()
    assert installed.missing(FP8) is None
    assert installed.missing("OpenVINO INT8") is None
    assert installed.missing("OpenVINO INT4") == f"{tmp_path}/tl-INT4 does not exist: write it with decode_models.py"
    assert installed.missing("llama.cpp Q4_0") == "--llama-cpp-python is not given"
    assert installed.missing("ik_llama.cpp Q4_0") == "--ik-llama-python is not given"
    assert installed.missing("vLLM FP8") is None
    assert installed.missing("vLLM FP8 block") == "vLLM multiplies no FP8 blocks on a processor without AMX"
    assert installed.missing("vLLM zentorch BF16") == "--zentorch-python is not given"


def test_work_of_other_processes_is_seen(decode: ModuleType) -> None:
    before = decode.CpuTime.now([])
    if before is None:
        pytest.skip("the system has no counters")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        time.sleep(0.4)
        mine = decode.MachineUse.between(before, decode.CpuTime.now([busy.pid]))
        other = decode.MachineUse.between(before, decode.CpuTime.now([]))
        busy.kill()
    assert other.others > mine.others


class Fake:
    """An engine that answers with given times."""

    nbytes = 0
    process = os.getpid()

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


def test_no_round_begins_that_would_end_after_the_minutes(decode: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PROBE_BYTES", 1 << 20)
    settings = decode.Settings(1, (1,), 3, 0.0, 4)
    engine = decode.Measured("one", Fake(*[(0.1, 0.02)] * 4))
    bandwidths, _ = decode.measure(settings, [engine], time.monotonic())
    assert len(bandwidths) == 1
    assert engine.step == {1: [0.02]}


def test_every_tensor_of_the_shape_has_a_name_in_llama_cpp(decode_models: ModuleType) -> None:
    names = [decode_models.gguf_name(tensor.name) for tensor in shapes.get_shape("tinyllama-1.1b").tensors]
    whole = {"token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight", "output_norm.weight", "output.weight"}
    assert whole - set(names) == set()
    assert len(set(names)) == len(names)
