"""`minifloat serve --engine vllm` with a real vLLM on a CPU, against our own server of the same checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from agreement import Noise, greedy_differences
from served import Served, free_port, served, start, vllm_options
from tools import has_amx
from vllm_cases import CASES, STORIES, STORYBOOK

from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(1800)

#: Checkpoint -> the kernel that vLLM must log; none for BF16 weights.
KERNELS = {
    "bf16": "",
    "fp8-dynamic": "ChannelWiseTorchFP8ScaledMMLinearKernel",
    "fp8-block": "CPUFp8BlockScaledMMKernel",
    "fp8-block-fp8-layout": "CPUFp8BlockScaledMMKernel",
    "gpt-oss-mxfp4": "CPU",
}
NEED_AMX = [name for name in KERNELS if CASES[name].amx]
STARTED = [name for name in KERNELS if has_amx() or name not in NEED_AMX]
PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 60, 48, 4


@dataclass(frozen=True)
class Pair:
    """A checkpoint, served by vLLM and by our own engine."""

    name: str
    folder: Path
    vllm: Served
    ours: Served


@pytest.fixture(scope="module")
def make(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    parent = tmp_path_factory.mktemp("checkpoints")

    def checkpoint(name: str) -> Path:
        if not (parent / name).exists():
            CASES[name].make(parent / name, make_model)
        return parent / name

    return checkpoint


@pytest.fixture(scope="module", params=STARTED)
def pair(
    request: pytest.FixtureRequest, make: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder, logs = make(request.param), tmp_path_factory.mktemp("logs")
    with (
        served(folder, logs / "vllm.log", *vllm_options(), arguments=["--enforce-eager"]) as vllm,
        served(folder, logs / "ours.log", "--max-model-len", "256") as ours,
    ):
        yield Pair(request.param, folder, vllm, ours)


def prompts(folder: Path) -> list[list[int]]:
    """Return parts of stories for a model trained on stories, and random tokens for a model with random weights."""
    ids = load_tokenizer(folder)(STORIES.read_text()[:4000]).input_ids
    return [ids[start : start + PROMPT_TOKENS] for start in range(0, PROMPTS * PROMPT_TOKENS, PROMPT_TOKENS)]


def test_greedy_tokens_and_log_probabilities_are_those_of_our_own_server(pair: Pair) -> None:
    asked = prompts(pair.folder)
    noise = Noise.of(pair.folder, asked, inputs_too=pair.name == "fp8-dynamic")
    differences: list[float] = []
    for prompt in asked:
        ours, theirs = (server.complete(prompt, NEW_TOKENS, 20) for server in (pair.ours, pair.vllm))
        differences += greedy_differences(ours, theirs, noise)
    assert len(differences) > PROMPTS * NEW_TOKENS, "too few places to compare: all texts parted at once"
    assert noise.covers(differences)


def test_the_noise_of_bf16_does_not_cover_the_rounding_of_weights_to_fp8(make: Callable[[str], Path]) -> None:
    """Show that the comparison of two servers can fail."""
    asked = prompts(STORYBOOK)
    exact, rounded = (
        load(make(name), LoadOptions(dtype=torch.float32, weight_only=True)) for name in ("bf16", "fp8-dynamic")
    )
    with torch.inference_mode():
        one, other = (model(torch.tensor(asked)).logits.log_softmax(-1) for model in (exact, rounded))
    likely = one.topk(20).indices
    assert not Noise.of(STORYBOOK, asked).covers((one - other).gather(-1, likely).flatten().tolist())


def test_vllm_logs_the_kernel_that_check_names(pair: Pair) -> None:
    assert KERNELS[pair.name] in pair.vllm.output


def test_the_server_ends_on_sigterm_and_leaves_no_process(pair: Pair) -> None:
    children = psutil.Process(pair.vllm.process.pid).children(recursive=True)
    assert len(children) > 1
    assert pair.vllm.stop() == 0
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@pytest.mark.skipif(has_amx(), reason="this processor has AMX")
@pytest.mark.parametrize("name", NEED_AMX)
def test_without_amx_a_checkpoint_is_refused_before_vllm_is_started(
    name: str, make: Callable[[str], Path], tmp_path: Path
) -> None:
    process = start(make(name), free_port(), tmp_path / "log", *vllm_options())
    assert process.wait(120) == 2
    assert "[rule vllm-cpu-amx]" in (tmp_path / "log").read_text()


@pytest.mark.skipif(has_amx(), reason="this processor has AMX")
def test_without_amx_vllm_itself_refuses_the_checkpoint_and_its_status_is_ours(
    make: Callable[[str], Path], tmp_path: Path
) -> None:
    """With a wrong hardware setting that declares AMX, we start vLLM, and vLLM refuses the checkpoint."""
    options = [*vllm_options(), "--hardware", "cpu"]
    process = start(make("fp8-block"), free_port(), tmp_path / "log", *options, arguments=["--enforce-eager"])
    assert process.wait(300) == 1
    assert "CPUFp8BlockScaledMMKernel requires AMX tile support" in (tmp_path / "log").read_text()[-6000:]
