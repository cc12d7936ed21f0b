"""mlx-lm computes from our folders, and we from its own, the same model, in every mode and for every model type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import small_models
import torch
from safetensors.torch import load_file
from tools import run_script
from vllm_cases import STORYBOOK

from minifloat.model.layouts import mlx
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.convert import ConvertOptions, convert_checkpoint
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

pytestmark = pytest.mark.timeout(1800)

#: Fields that every released config of these types states, and mlx-lm asks for.
_STATED = {"qwen3_moe": {"head_dim": 32}, "glm4_moe": {"head_dim": 32}}
_SCHEMES = ("mxfp4", "nvfp4", "mxfp8")
_THEIRS = {f"made by mlx-lm in {scheme}": scheme for scheme in _SCHEMES}
_CASES = (*_SCHEMES, *mlx.MODEL_TYPES, *_THEIRS)
_TOKENS = [list(range(40, 72))]
#: Largest difference of log-probabilities of likely tokens in float32, in which both sides multiply the same numbers.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Run:
    """Folders of each case, and mlx-lm's answers."""

    folder: Path
    answers: Mapping[str, Any]

    def theirs(self, case: str) -> torch.Tensor:
        assert self.answers[case]["error"] is None
        return load_file(self.folder / f"{case}.logits")["logits"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("mlx")
    for case in (*_SCHEMES, *mlx.MODEL_TYPES):
        scheme, source = (case, STORYBOOK) if case in _SCHEMES else ("mxfp4", folder / f"{case}-bf16")
        if source != STORYBOOK:
            small_models.make_model(small_models.Case(case, case, _STATED.get(case, {})), source)
        quantize_checkpoint(source, folder / f"{case}-ours", scheme, QuantizeOptions(allow_partial=True))
        rounding = ConvertOptions(allow_rounding=scheme == "nvfp4")
        convert_checkpoint(folder / f"{case}-ours", folder / case, "mlx", rounding)
    made = {str(folder / case): scheme for case, scheme in _THEIRS.items()}
    folders = [str(folder / case) for case in _CASES]
    request = {"source": str(STORYBOOK), "made": made, "folders": folders, "tokens": _TOKENS}
    return Run(folder, dict(zip(_CASES, run_script("mlx", "in_mlx.py", request, folder), strict=True)))


def _logprobs(folder: Path) -> torch.Tensor:
    model = load(folder, LoadOptions(dtype=torch.float32, weight_only=True))
    with torch.inference_mode():
        return model(torch.tensor(_TOKENS)).logits.log_softmax(-1)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    likely = ours.topk(20).indices
    return float((theirs.log_softmax(-1) - ours).gather(-1, likely).abs().max())


@pytest.mark.parametrize("case", _CASES)
def test_mlx_lm_and_our_loader_give_the_same_logits(case: str, run: Run) -> None:
    assert _difference(_logprobs(run.folder / case), run.theirs(case)) < _ROUNDING


@pytest.mark.parametrize("scheme", ["mxfp4", "mxfp8"])
def test_the_source_before_the_conversion_is_the_same_model_and_another_is_not(scheme: str, run: Run) -> None:
    theirs = run.theirs(scheme)
    assert _difference(_logprobs(run.folder / f"{scheme}-ours"), theirs) < _ROUNDING
    assert _difference(_logprobs(STORYBOOK), theirs) > 10 * _ROUNDING
