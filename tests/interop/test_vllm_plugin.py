"""A real vLLM on a CPU with the plugin of this checkout: every scheme as in our engine, and what it does not take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from agreement import Reference, is_same_model
from tools import ROOT, run_script
from vllm_cases import CASES, calibrated, quantized
from vllm_run import PROMPTS, answers_of

from minifloat.deploy.check import vllm_plugin
from minifloat.engine.engine import Engine
from minifloat.engine.options import EngineOptions
from minifloat.engine.sampling import SamplingParams
from minifloat.kernels import native
from minifloat.model.runtime.load import LoadOptions, load

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(native.load() is None, reason=native.why_unavailable()),
]

#: Experts of every form. Each token takes all of them: of nearly equal ones, two engines may choose different ones.
_QWEN3: Any = {"model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts_per_tok": 4}
_MIXTRAL: Any = {"model_type": "mixtral", "num_experts_per_tok": 4}
EXPERTS = {
    "experts-fp8": quantized("fp8", **_QWEN3),
    "experts-fp8-block": quantized("fp8-block", **_QWEN3),
    "experts-fp8-block-fp8-layout": quantized("fp8-block", layout="fp8", **_QWEN3),
    "experts-fp8-dynamic": quantized("fp8-dynamic", **_MIXTRAL),
    "experts-fp8-static-weights": quantized("fp8-static", **_MIXTRAL),
    "experts-mxfp8": quantized("mxfp8", **_QWEN3),
    "experts-mxfp4": quantized("mxfp4", **_MIXTRAL),
    "experts-nvfp4": quantized("nvfp4", **_MIXTRAL),
}
#: Scheme -> how storybook is quantized to it. fp8-static with calibrated scales and without.
SCHEMES = {
    "bf16": CASES["bf16"].make,
    "fp8": quantized("fp8"),
    "fp8-block": quantized("fp8-block"),
    "fp8-block-fp8-layout": quantized("fp8-block", layout="fp8"),
    "fp8-dynamic": quantized("fp8-dynamic"),
    "fp8-static": calibrated("fp8-static"),
    "fp8-static-weights": quantized("fp8-static"),
    "mxfp8": quantized("mxfp8"),
    "mxfp4": quantized("mxfp4"),
    "nvfp4": quantized("nvfp4"),
} | EXPERTS
REFUSED_WITHOUT = ("fp8", "mxfp8", "mxfp4", "nvfp4")
TOKENS = 16


@pytest.fixture(scope="module")
def folders(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("checkpoints")
    for name, make in SCHEMES.items():
        make(parent / name, make_model)
    CASES["blocks-of-32"].make(parent / "blocks-of-32", make_model)
    calibrated("fp8", "--kv-cache", "fp8")(parent / "fp8-kv", make_model)
    return {name: parent / name for name in (*SCHEMES, "blocks-of-32", "fp8-kv")}


def with_plugin(folder: Path, **variables: str) -> dict[str, str]:
    """The environment of a vLLM that finds this checkout and its entry point, as if it were installed."""
    described = folder / "minifloat-0.dist-info"
    described.mkdir(exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: minifloat\nVersion: 0\n")
    (described / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nminifloat = minifloat.serve.vllm_plugin:register\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(folder)])} | variables


def run(checkpoints: Mapping[str, Path], folder: Path, tp: int = 1, **variables: str) -> dict[str, Any]:
    described = [{"name": name, "path": str(path), "tp": tp} for name, path in checkpoints.items()]
    request = {"prompts": PROMPTS, "tokens": TOKENS, "logprobs": 20, "checkpoints": described}
    answers = run_script("vllm", "in_vllm.py", request, folder, timeout=1500, **with_plugin(folder, **variables))
    return {answer["name"]: answer for answer in answers}


@pytest.fixture(scope="module")
def answers(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(folders, tmp_path_factory.mktemp("with"))


@pytest.fixture(scope="module")
def without(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    chosen = {name: folders[name] for name in REFUSED_WITHOUT}
    return run(chosen, tmp_path_factory.mktemp("without"), VLLM_PLUGINS="")


@pytest.mark.parametrize("name", SCHEMES)
def test_log_probabilities_are_those_of_our_engine_with_inputs_in_16_bits(
    name: str, folders: Mapping[str, Path], answers: Mapping[str, Any]
) -> None:
    assert answers[name]["error"] is None
    assert is_same_model(folders[name], answers_of(answers[name]), weight_only=True)


@pytest.mark.parametrize("name", SCHEMES)
def test_greedy_tokens_are_those_of_our_engine(
    name: str, folders: Mapping[str, Path], answers: Mapping[str, Any]
) -> None:
    """Where vLLM takes another token than our float32, the two are nearly equally probable."""
    model = load(folders[name], LoadOptions(dtype=torch.float32, weight_only=True))
    for answer in answers_of(answers[name]):
        tokens = torch.tensor([[*answer.prompt, *answer.tokens]])
        with torch.inference_mode():
            scores = model(tokens).logits[0].float().log_softmax(-1)[len(answer.prompt) - 1 : -1]
        for position, token in enumerate(answer.tokens):
            assert float(scores[position].max() - scores[position, token]) < 0.25, f"token {position}"


def test_the_comparison_distinguishes_formats(folders: Mapping[str, Path], answers: Mapping[str, Any]) -> None:
    """The comparison can fail: answers with MXFP4 weights are not those of FP8 weights."""
    assert not is_same_model(folders["fp8"], answers_of(answers["mxfp4"]), weight_only=True)
    theirs, ours = Reference(folders["bf16"], weight_only=True).distance(answers_of(answers["fp8"]))
    assert theirs > ours


@pytest.mark.parametrize("name", ["fp8", "experts-mxfp4"])
def test_two_processes_that_share_every_matrix_answer_as_one(
    name: str, folders: Mapping[str, Path], tmp_path: Path
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs 2 processors")
    answer = run({name: folders[name]}, tmp_path, tp=2)[name]
    assert answer["error"] is None
    assert is_same_model(folders[name], answers_of(answer), weight_only=True)


def test_a_cache_in_fp8_costs_what_it_costs_in_our_engine(
    folders: Mapping[str, Path], answers: Mapping[str, Any]
) -> None:
    """Medians, since at one position, where a token is almost certain, both engines have several times the error."""
    folder, found = folders["fp8-kv"], answers_of(answers["fp8-kv"])
    engine = Engine(folder, EngineOptions(dtype="bfloat16", kv_cache_dtype="fp8"))
    without = Engine(folder, EngineOptions(dtype="bfloat16", kv_cache_dtype="bfloat16"))
    model = load(folder, LoadOptions(dtype=torch.float32, weight_only=True))
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=20)
    theirs, ours, rounding = [], [], []
    for answer in found:
        tokens = [*answer.prompt, *answer.tokens]
        with torch.inference_mode():
            exact = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1).tolist()
        theirs += [abs(top[token] - exact[place][token]) for place, top in enumerate(answer.top) for token in top]
        for one, errors in ((engine, ours), (without, rounding)):
            (scored,) = one.generate([tokens], params)
            for place, entry in enumerate((scored.prompt_logprobs or ())[1:]):
                assert entry is not None
                errors += [abs(top.logprob - exact[place][top.token]) for top in entry.top]
    assert 2 * median(rounding) < median(theirs) < 1.5 * median(ours)


@pytest.mark.parametrize("name", REFUSED_WITHOUT)
def test_switched_off_by_vllms_own_variable_vllm_refuses_as_before(name: str, without: Mapping[str, Any]) -> None:
    assert CASES[name].refusal in without[name]["error"]


def test_shapes_that_the_kernel_does_not_take_are_refused_with_the_reason(answers: Mapping[str, Any]) -> None:
    error = answers["blocks-of-32"]["error"] or ""
    assert "MinifloatFp8LinearKernel" not in error  # blocks of 32 columns have a kernel; attention has no heads of 16
    assert "Unsupported CPU attention configuration" in error


def test_another_version_of_vllm_is_refused_by_name(folders: Mapping[str, Path], tmp_path: Path) -> None:
    patched = tmp_path / "sitecustomize.py"
    patched.write_text("from minifloat.deploy.check import vllm_plugin\nvllm_plugin.VERSIONS = {'0.1.0': True}\n")
    answer = run({"mxfp4": folders["mxfp4"]}, tmp_path)["mxfp4"]
    assert CASES["mxfp4"].refusal in answer["error"]


def test_vllm_is_one_of_the_versions_that_the_plugin_was_tested_with(tmp_path: Path) -> None:
    requirements = (ROOT / "tests" / "interop" / "requirements-vllm.txt").read_text().split()
    (version,) = [line.partition("==")[2] for line in requirements if line.startswith("vllm")]
    assert vllm_plugin.ran_in(version)
