"""A dozen rows of the matrix, in two schemes; ./scripts/architectures runs all rows in four."""

from __future__ import annotations

import pytest
from modes import full
from row import run_row
from small_models import Case

_EVERYDAY = (
    "deepseek_v3",
    "gemma3",
    "glm4",
    "granite",
    "llama",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "phi3",
    "qwen3_moe",
    "qwen3_next",
)
_OTHERS = ("cohere2", "ernie4_5", "exaone4", "gemma2", "glm4_moe", "jamba", "mistral3", "olmoe", "qwen3_5", "smollm3")


@pytest.mark.parametrize("model_type", [*_EVERYDAY, *map(full, _OTHERS)])
def test_no_answer_is_wrong(model_type: str) -> None:
    row = run_row(Case(model_type, model_type), ("fp8-block", "mxfp4"))
    assert not row.reason
    assert not row.wrong
    exact = ("quantize fp8-block", "load fp8-block", "dequantize fp8-block", "quantize mxfp4", "load mxfp4")
    assert {row.cells[cell][0] for cell in (*exact, "engine", "calibrate")} == {"exact"}
