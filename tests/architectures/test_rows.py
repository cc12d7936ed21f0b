"""A dozen rows of the matrix, in two schemes; ./scripts/architectures runs all rows in four."""

from __future__ import annotations

import pytest
from cases import all_cases
from modes import full
from row import run_row
from small_models import Case

_EVERYDAY = (
    "deepseek_v3",
    "gemma3",
    "glm4",
    "granitemoe",
    "llama",
    "llama4_text",
    "minimax_m2",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "qwen3_moe",
    "qwen3_next",
)
_OTHERS = (
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma2",
    "glm4_moe",
    "granite",
    "jamba",
    "mistral3",
    "olmoe",
    "phi3",
    "qwen3_5",
    "qwen3_vl_moe",
    "smollm3",
)


@pytest.mark.parametrize("model_type", [*_EVERYDAY, *map(full, _OTHERS)])
def test_no_answer_is_wrong(model_type: str) -> None:
    row = run_row(Case(model_type, model_type), ("fp8-block", "mxfp4"))
    assert not row.reason
    assert not row.wrong
    exact = ("quantize fp8-block", "load fp8-block", "dequantize fp8-block", "quantize mxfp4", "load mxfp4")
    assert {row.cells[cell][0] for cell in (*exact, "engine", "calibrate")} == {"exact"}


@pytest.mark.parametrize("case", [case for case in all_cases() if case.stored], ids=lambda case: case.name)
def test_a_quantized_source_is_read_as_its_formats_say(case: Case) -> None:
    row = run_row(case, ("fp8-block",))
    assert not row.wrong
    assert {row.cells[cell][0] for cell in ("quantize fp8-block", "load fp8-block", "dequantize fp8-block")} == {
        "exact"
    }
