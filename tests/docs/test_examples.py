"""The examples run offline, and the files of examples/production are about the server as it is."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from modes import full

import minifloat
from minifloat.engine import AsyncEngine, Engine
from minifloat.evaluate.checkpoint_report import read_results
from minifloat.serve.server.metrics import Metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
PRODUCTION = EXAMPLES / "production"


def _run(name: str, tmp_path: Path, *arguments: str) -> str:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("from_checkpoint_to_server.py", ["PASSED", "Once upon a time, there was a little girl"]),
        full("static_fp8_with_your_data.py", [r"dynamic +KL 0\.00\d+"]),
        full("library_without_command_line.py", ["mxfp4  SQNR 1[89]", "there was a little girl"]),
        (
            "vllm_on_two_gpus.py",
            ["fp8-block on 2 x h100: will not load", "--scheme fp8-dynamic --target vllm:h100:tp2"],
        ),
    ],
)
def test_examples_run(name: str, expected: list[str], tmp_path: Path) -> None:
    output = _run(name, tmp_path)
    assert [pattern for pattern in expected if not re.search(pattern, output)] == [], output


@pytest.mark.full
def test_the_demo_serves_measures_and_ends_with_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent / "src"))
    options = minifloat.CompareOptions(prompts=0, max_tokens=2000)
    monkeypatch.setattr(minifloat, "compare_models", partial(minifloat.compare_models, options=options))
    demo = runpy.run_path(str(EXAMPLES / "demo.py"), run_name="demo")

    def ask_with_and_without_openai(url: str, model: str) -> None:
        demo["ask"](url, model)
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "openai", None)
            demo["ask"](url, model)

    shorter = {"SAMPLES": 16, "NEW_TOKENS": 12, "WORKLOAD": minifloat.Workload(16, 4, (1,), 1)}
    demo["main"].__globals__.update(shorter, ask=ask_with_and_without_openai)
    demo["main"](tmp_path)
    *output, last = capsys.readouterr().out.splitlines()
    stories = [line for line in output if line.startswith(demo["PROMPT"])]
    assert len(stories) == 4
    assert stories[2] == stories[3] != demo["PROMPT"]
    for start in (
        "OpenAI(base_url=",
        "a plain request",
        "fp8-block",
        "mxfp4",
        "quantized to mxfp4",
        "decode step, batch 1",
    ):
        assert [line for line in output if line.startswith(start)], start
    assert last == f"Report: {tmp_path / 'mxfp4' / 'report.html'}"
    results = read_results(tmp_path / "mxfp4")
    assert results.comparison is not None
    assert results.gains is not None
    assert [other.model.name for other in results.others] == [str(tmp_path / "fp8-block")]


def test_every_example_is_run() -> None:
    source = Path(__file__).read_text()
    others = {path.name for path in EXAMPLES.glob("*.py")}
    assert {name for name in others if f'"{name}"' not in source} == set()


def _exported_names() -> set[str]:
    text = Metrics(AsyncEngine(Engine(EXAMPLES / "storybook-4m"))).text().decode()
    declared = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    return {f"{name}_bucket" if kind == "histogram" else name for name, kind in declared}


def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    dashboard = json.loads((PRODUCTION / "grafana.json").read_text())
    alerts = yaml.safe_load((PRODUCTION / "alerts.yml").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    asked = {name for text in expressions for name in re.findall(r"\b(?:minifloat|process)_\w+", text)}
    assert len(expressions) > 15
    assert asked - _exported_names() == set()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (PRODUCTION / "minifloat.service").read_text().replace("/opt/minifloat/bin/minifloat", "/bin/true")
    (tmp_path / "minifloat.service").write_text(text)
    command = ["systemd-analyze", "verify", str(tmp_path / "minifloat.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert [line for line in done.stderr.splitlines() if "minifloat.service" in line] == []


def test_options_of_the_unit_and_the_image_exist() -> None:
    from minifloat.commands.serve import serve

    known = {name for option in serve.params for name in option.opts}
    files = [PRODUCTION / "minifloat.service", PRODUCTION / "Containerfile"]
    text = "\n".join(file.read_text() for file in files)
    commands = re.findall(r"minifloat serve .*?[^\\]\n|^CMD \[\"/model\".*?$", text, re.DOTALL | re.MULTILINE)
    used = {option for command in commands for option in re.findall(r"--[a-z][a-z-]+", command)}
    assert {"--api-key-file", "--served-model-name"} <= used <= known


def test_the_workflow_is_read_as_yaml() -> None:
    workflow = yaml.safe_load((EXAMPLES / "compare_in_ci.yml").read_text())
    steps = [step.get("run", "") for step in workflow["jobs"]["compare"]["steps"]]
    assert any("minifloat compare" in step for step in steps)
