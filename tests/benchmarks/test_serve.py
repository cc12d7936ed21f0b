"""`benchmarks/serve.py`: the commands of its servers, the figures of a time, and a run at the smallest size."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

pytest.importorskip("fastapi")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("prefix", "context"), [(0, 768), (256, 1024)])
def test_the_server_of_llama_cpp_starts_with_a_slot_per_client(
    serve: ModuleType, tmp_path: Path, prefix: int, context: int
) -> None:
    binary, seen = tmp_path / "llama-server", tmp_path / "seen"
    binary.write_text(f'#!/bin/sh\necho "$@" > {seen}\nexit 3\n')
    binary.chmod(0o755)
    start = serve.llama_servers(binary, [Path("it.gguf")], 100, 2)["llama.cpp it.gguf"]
    with pytest.raises(SystemExit, match="llama-server ended with status 3"):
        start(8, prefix)
    words = iter(seen.read_text().split())
    assert next(words) == "--no-webui"
    options = dict(zip(words, words, strict=True))
    assert options["--model"] == "it.gguf"
    assert (options["--threads"], options["--threads-batch"], options["--parallel"]) == ("2", "2", "8")
    assert options["--ctx-size"] == str(8 * context)
    assert int(options["--port"]) > 0


def test_a_file_for_llama_cpp_needs_its_server(serve: ModuleType) -> None:
    assert serve.llama_servers(None, [], 100, 2) == {}
    with pytest.raises(click.UsageError, match="--gguf needs --llama-server"):
        serve.llama_servers(None, [Path("it.gguf")], 100, 2)


def test_figures_count_what_lies_between_two_times(serve_process: ModuleType) -> None:
    before = serve_process.Answer(sent=0.0, tokens=6, received=[1.0, 10.5, 11.0])  # two tokens per event; began before
    within = serve_process.Answer(sent=11.0, received=[13.0, 13.5, 21.0])  # not finished
    waiting = serve_process.Answer(sent=16.0)
    found = serve_process.figures([before, within, waiting], 10.0, 20.0)
    assert found["completed"] == 1
    assert found["output_throughput"] == pytest.approx(4 * 2 / 10)
    assert found["median_ttft_ms"] == pytest.approx(3000)  # of 2 s, and of 4 s that are waited
    assert found["median_itl_ms"] == pytest.approx(500)


def test_bars_are_judged_at_their_number_of_clients(serve: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    ours = {"ours": {"output_throughput": 160.0, "own_cpu": 0.06, "outside_steps": 0.08}}
    theirs = {"theirs": {"output_throughput": 100.0}}
    serve.print_bars(8, ours, theirs)
    assert capsys.readouterr().out == "  ours over theirs: 1.60x\n"
    serve.print_bars(32, ours, theirs)
    speed, own = capsys.readouterr().out.splitlines()
    assert speed == "  ours over theirs: 1.60x (pass, at least 1.5x)"
    assert "takes 6.0% of a step (SHORT, at most 5%), and 8.0% of the time" in own


@pytest.mark.full
def test_a_server_is_measured_through_its_socket(tmp_path: Path, llama_folder: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "serve.json"
    shutil.copytree(llama_folder, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    short = ("--concurrency", "2", "--seconds", "1", "--threads", "1", "--mixed-prompt", "16", "--pause", "0.01")
    result = subprocess.run(
        [sys.executable, str(BENCHMARKS / "serve.py"), str(model), *short, "--mixed-output-len", "8", "--json", out],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    assert [row["load"] for row in found["chats"]] == ["chats", "shared"]
    for row in found["chats"]:
        assert (row["clients"], row["failed"]) == (2, 0)
        assert row["output_throughput"] > 0
        assert 0 < row["own_cpu"] < 2
        assert 0 < row["outside_steps"] < 1
    (mixed,) = found["mixed"]
    assert mixed["mixed"]["completed"] == 8
    assert 0 < mixed["rss_ready"] <= mixed["allowed"]
