"""Twins of the most used models, true widths and keys: everything works, or is refused before work with the cure.

`benchmarks/hub_shapes.py` runs every twin through quantize, load and a step; here it is done for one of each kind.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hub_configs import HUB_CONFIGS
from twins import EXPERTS, layer_bytes, quantize_twin, step_of, twin_config, write_twin

from minifloat import PlanOptions, check_checkpoint, plan_model, preview_quantization
from minifloat.deploy.check import LoadVerdict
from minifloat.errors import UnsupportedTensorError

SCHEMES = ("fp8-block", "mxfp4")
#: Models whose experts one layout alone holds: refused in other formats, with the cure.
ONE_LAYOUT = {("openai/gpt-oss-20b", "fp8-block"), ("openai/gpt-oss-120b", "fp8-block")}
CURE = "use --scheme mxfp4 --layout gpt-oss"
#: Run as a whole: dense, tied with windows, experts, latent attention, linear attention beside a vision tower.
WHOLE = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "google/gemma-3-270m",
    "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite",
)
#: Largest relative error of the engine's logits, in float32; products of long rows are summed in another order.
TOLERANCE = 1e-4
#: Memory beside one layer that `quantize` may take, with all that it imports.
MEMORY = 512 << 20


@pytest.fixture(scope="module", params=HUB_CONFIGS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A twin with a sparse file: name and folder."""
    folder = tmp_path_factory.mktemp("twin") / "model"
    return request.param, write_twin(request.param, folder, data=False)


def test_a_twin_has_the_true_widths(twin: tuple[str, Path]) -> None:
    name, _ = twin
    cut = {"vocab_size", "num_hidden_layers", "layer_types", "no_rope_layers", "first_k_dense_replace", "dtype"}
    cut |= {"num_experts", "num_local_experts", "n_routed_experts", "vocab_size_per_layer_input", "auto_map"}
    cut |= {"num_nextn_predict_layers", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"}
    original, small = HUB_CONFIGS[name], twin_config(name)
    pairs = [(original, small), (original.get("text_config", {}), small.get("text_config", {}))]
    for before, after in pairs:
        same = {key for key in before if key not in cut | {"text_config", "vision_config"}}
        assert {key: before[key] for key in same} == {key: after[key] for key in same}
    text = small.get("text_config", small)
    assert text["num_hidden_layers"] <= 2
    assert (text.get("num_experts") or 0) <= EXPERTS


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_dry_run_with_data_and_check_answer_alike(twin: tuple[str, Path], scheme: str, tmp_path: Path) -> None:
    name, folder = twin
    report = check_checkpoint(folder, "minifloat:cpu", scheme=scheme)
    if (name, scheme) in ONE_LAYOUT:
        assert report.verdict is LoadVerdict.REFUSED
        assert CURE in str(report)
        with pytest.raises(UnsupportedTensorError, match=CURE):
            preview_quantization(folder, tmp_path / "out", scheme, calibrates=True)
        return
    assert report.verdict is LoadVerdict.LOADS
    preview = preview_quantization(folder, tmp_path / "out", scheme, calibrates=True)
    assert preview.output_bytes < preview.source_bytes
    assert not (tmp_path / "out").exists()


def test_a_twin_is_planned(twin: tuple[str, Path]) -> None:
    _, folder = twin
    estimate = plan_model(folder, hardware="h100")
    assert {scheme.scheme for scheme in estimate.schemes} >= {"mxfp4"}


def test_experts_that_stay_fused_are_planned_as_they_are_written(tmp_path: Path) -> None:
    folder = write_twin("openai/gpt-oss-20b", tmp_path / "model", data=False)
    written = preview_quantization(folder, tmp_path / "out", "mxfp4").output_bytes
    one, two = (plan_model(folder, "mxfp4", "h100", PlanOptions(gpus=gpus)).schemes[-1] for gpus in (1, 2))
    assert one.weights == one.device_weights == two.weights == written
    assert written / 2 < two.device_weights < 0.51 * written


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", WHOLE)
def test_a_twin_is_quantized_in_little_memory_loaded_and_run(name: str, scheme: str, tmp_path: Path) -> None:
    folder, out = write_twin(name, tmp_path / "model"), tmp_path / "out"
    run = quantize_twin(folder, out, scheme)
    assert run.problem == ""
    assert run.peak_bytes < layer_bytes(folder) + MEMORY
    step = step_of(out)
    assert step.runner == "native"
    assert step.error < TOLERANCE


@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM3-3B"])
def test_the_engine_opens_a_twin_without_transformers(name: str, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom minifloat import Engine, EngineOptions\n"
        "engine = Engine(sys.argv[1], EngineOptions(max_num_seqs=1, max_model_len=64))\n"
        "print(engine.info.runner, 'transformers' in sys.modules)"
    )
    folder = str(write_twin(name, tmp_path / "model"))
    answer = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["native", "False"]


def test_a_scheme_that_no_engine_loads_is_refused_before_work(tmp_path: Path) -> None:
    folder = write_twin("openai/gpt-oss-20b", tmp_path / "model", data=False)
    run = quantize_twin(folder, tmp_path / "out", "fp8-block")
    assert CURE in run.problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
