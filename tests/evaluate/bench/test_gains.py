"""`bench` from end to end on tiny models, and the random checkpoints that it writes."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from huggingface_hub import ModelCard

from minifloat import Checkpoint, Engine, EngineOptions, SamplingParams, quantize_checkpoint
from minifloat.commands.main import main
from minifloat.errors import DestinationError, MinifloatError, UnknownNameError
from minifloat.evaluate.bench import shapes
from minifloat.evaluate.bench.document import document
from minifloat.evaluate.bench.figures import GainsReport
from minifloat.evaluate.bench.gains import bench_checkpoint
from minifloat.evaluate.bench.worker import Worker, peak_rss
from minifloat.evaluate.bench.workload import Workload
from minifloat.kernels.processors import TeamOptions
from minifloat.report import markdown
from minifloat.report.markdown import update_card

WORKLOAD = Workload(input_len=8, output_len=4, batch_sizes=(1, 2), rounds=2)
TINY = replace(shapes.SHAPES["qwen3-0.6b"], hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=512)


def set_environment(patch: pytest.MonkeyPatch) -> None:
    """Set the environment of the engine processes."""
    patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    patch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)


@pytest.fixture(scope="module")
def quantized(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "llama-fp8"
    quantize_checkpoint(llama_folder, folder, "fp8")
    return folder


@dataclass(frozen=True)
class Measured:
    """A run of the command on `WORKLOAD`, and the folder of its result file."""

    report: GainsReport
    result: Result
    folder: Path


@pytest.fixture(scope="module")
def measured(llama_folder: Path, quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    reports: list[GainsReport] = []

    def recording_bench(*args: Any, **options: Any) -> GainsReport:
        reports.append(bench_checkpoint(*args, **options))
        return reports[-1]

    folder = tmp_path_factory.mktemp("results")
    sizes = ("--input-len", WORKLOAD.input_len, "--output-len", WORKLOAD.output_len, "--rounds", WORKLOAD.rounds)
    batches = ("--batch-sizes", ",".join(map(str, WORKLOAD.batch_sizes)), "--threads", 1)
    outputs = ("--save-result", "--result-dir", folder, "--update-card")
    with pytest.MonkeyPatch.context() as patch:
        set_environment(patch)
        patch.setattr("minifloat.evaluate.bench.gains._PROBE_BYTES", 1 << 20)
        patch.setattr("minifloat.evaluate.bench.gains.bench_checkpoint", recording_bench)
        result = run(quantized, "--baseline", llama_folder, *sizes, *batches, *outputs)
    assert result.exit_code == 0, result.output
    return Measured(reports[0], result, folder)


@pytest.fixture
def report(measured: Measured) -> GainsReport:
    return measured.report


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_both_engines_run_every_batch_in_every_round(report: GainsReport) -> None:
    for engine in (report.baseline, report.candidate):
        for batch in WORKLOAD.batch_sizes:
            figures = engine.batches[batch]
            assert len(figures.decode_ms) == len(figures.prefill) == WORKLOAD.rounds
            assert figures.metrics["completed"] == batch * WORKLOAD.rounds
            assert figures.metrics["total_output_tokens"] == batch * WORKLOAD.rounds * WORKLOAD.output_len


def test_memory_is_measured_per_model_in_a_process_of_its_own(report: GainsReport, quantized: Path) -> None:
    with Checkpoint.open(quantized) as checkpoint:
        assert report.candidate.info["weight_bytes"] == sum(info.nbytes for info in checkpoint.tensors.values())
    assert report.candidate.info["scheme"].startswith("fp8")
    for engine in (report.baseline, report.candidate):
        assert 0 < engine.rss <= engine.peak_rss
        assert len(engine.load_seconds) == 1
    assert report.gains["weight_bytes"] is not None
    assert report.gains["weight_bytes"] > 1


def test_gains_are_the_baseline_over_the_candidate_inside_rounds(report: GainsReport) -> None:
    before, after = (engine.batches[2].decode_ms for engine in (report.baseline, report.candidate))
    assert report.decode_gains(2) == [before[0] / after[0], before[1] / after[1]]


def test_the_report_is_json_by_the_names_of_vllms_benchmark(report: GainsReport, tmp_path: Path) -> None:
    path = report.save(tmp_path / "results")
    saved = json.loads(path.read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    batch = saved["candidate"]["batches"]["2"]
    names = {"request_throughput", "output_throughput", "total_token_throughput", "median_ttft_ms", "p99_itl_ms"}
    assert names <= batch.keys()
    assert saved["workload"]["input_len"] == WORKLOAD.input_len


def test_an_engine_that_cannot_start_raises_its_own_error_message(tmp_path: Path) -> None:
    with pytest.raises(MinifloatError, match="no config"):
        Worker(tmp_path, {}, TeamOptions(threads=1))


@pytest.mark.full
def test_a_killed_engine_process_is_reported_with_its_status(llama_folder: Path) -> None:
    with Worker(llama_folder, {"max_model_len": 16}, TeamOptions(threads=1)) as worker:
        worker._process.kill()
        with pytest.raises(MinifloatError, match="ended with status -9; the system was short of memory"):
            worker.state()


def test_peak_memory_does_not_include_that_of_the_parent_process() -> None:
    assert 1 << 20 < peak_rss() < 1 << 36


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_shapes_have_the_parameters_that_their_names_promise(name: str) -> None:
    millions = sum(tensor.nbytes for tensor in shapes.get_shape(name).tensors) / 2e6
    expected = {"llama-1b": 1236, "llama-8b": 8030, "qwen3-0.6b": 596, "tinyllama-1.1b": 1100}[name]
    assert millions == pytest.approx(expected, rel=2e-3)


def test_an_unknown_shape_is_refused_with_the_known_shapes() -> None:
    with pytest.raises(UnknownNameError, match="llama-8b"):
        shapes.get_shape("llama-9b")


def test_a_random_checkpoint_is_one_that_the_engine_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    baseline, candidate = shapes.make_pair(tmp_path / "models", "tiny", "mxfp4")
    engine = Engine(candidate, EngineOptions(max_model_len=32))
    assert engine.info.runner == "native"
    assert engine.info.scheme == "mxfp4"
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    completion = engine.generate("hello", params)[0]
    assert completion.usage.prompt_tokens == len("hello")
    assert len(completion.tokens) == 4
    before = baseline.stat().st_mtime_ns
    assert shapes.make_pair(tmp_path / "models", "tiny", "mxfp4") == (baseline, candidate)
    assert baseline.stat().st_mtime_ns == before


def test_every_token_of_a_random_checkpoint_has_a_text(tmp_path: Path) -> None:
    engine = Engine(shapes.write_random(tmp_path / "tiny", TINY), EngineOptions(max_model_len=16))
    texts = [engine.tokenizer.decode([token]) for token in range(TINY.vocab)]
    assert all(texts)
    assert engine.tokenizer.eos_token_id == engine.config.eos_token_id


def test_equal_seeds_make_equal_files_and_nothing_is_overwritten(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        shapes.write_random(tmp_path / name, TINY, seed=seed)
    file = "model-00001-of-00001.safetensors"
    first, second, third = ((tmp_path / name / file).read_bytes() for name in "abc")
    assert first == second
    assert first != third
    with pytest.raises(DestinationError, match="exists already"):
        shapes.write_random(tmp_path / "a", TINY)


def test_the_command_prints_tables_and_writes_the_result(measured: Measured, quantized: Path) -> None:
    assert (quantized / "README.md").read_text().count("## Memory\n") == 1
    output = measured.result.output
    for word in (
        "peak memory of the process",
        "KV cache per token",
        "llama-fp8",
        "TTFT p50 ms",
        "prefill tok/s",
        "Written to",
    ):
        assert word in output
    (saved,) = measured.folder.glob("minifloat-bench-llama-fp8-*.json")
    figures = json.loads(saved.read_text())["candidate"]["batches"]["1"]
    assert f"{statistics.median(figures['decode_step_ms']):.2f}" in output


def test_the_card_has_one_section_with_the_figures_the_machine_and_the_date(
    report: GainsReport, quantized: Path, tmp_path: Path
) -> None:
    card = tmp_path / "README.md"
    card.write_text("---\nlicense: mit\n---\n# mine\n")
    for _ in range(2):
        update_card(tmp_path, markdown.write_section("bench", document(report)))
    text = card.read_text()
    assert text.startswith("---\nlicense: mit\n---\n# mine\n\n<!-- minifloat bench: begin -->\n")
    assert text.count("## Memory\n") == 1
    assert ModelCard.load(card).data.to_dict() == {"license": "mit"}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    memory = {row[0]: row[1:] for row in rows if len(row) == 4}
    assert memory["weights"][2] == f"{report.gains['weight_bytes']:.2f}x"
    latency = [row for row in rows if row[0] in ("1", "2")]
    assert [row[:2] for row in latency] == 2 * [
        [batch, model] for batch in ("1", "2") for model in ("baseline", "quantized")
    ]
    keys = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    for decode, times in zip(latency[:4], latency[4:], strict=True):
        engine = report.baseline if decode[1] == "baseline" else report.candidate
        figures = engine.batches[int(decode[0])]
        assert times[2:6] == [f"{figures.metrics[key]:.1f}" for key in keys]
        assert decode[2] == f"{statistics.median(figures.decode_ms):.2f}"
    assert f"- date: {report.date}\n" in text
    assert "- threads: 1 of " in text


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("OUT",),
        ("--shape", "llama-1b", "--baseline", "MODEL"),
        ("OUT", "--baseline", "M", "--batch-sizes", "1,x"),
        ("--shape", "llama-1b", "--update-card"),
        ("org/model", "--baseline", "M", "--update-card"),
    ],
)
def test_incomplete_or_contradictory_arguments_are_refused(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.output.startswith("minifloat: error: ")
