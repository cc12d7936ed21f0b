"""Small random models of real families, quantized here, in a real vLLM on a CPU and in our own engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agreement import is_same_model
from vllm_families import FAMILIES
from vllm_run import EXPECTED, HARDWARE, Started, answers_of, run_in_vllm, what_happened

from minifloat.deploy.check import LoadVerdict, check_checkpoint

pytestmark = pytest.mark.timeout(3600)

SERVED = [name for name, family in FAMILIES.items() if not family.refusal]


@dataclass(frozen=True)
class Made:
    """A small model in BF16 and quantized."""

    source: Path
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    parent = tmp_path_factory.mktemp("families")
    folders = {name: Made(parent / f"{name}-bf16", parent / name) for name in FAMILIES}
    for name, model in folders.items():
        FAMILIES[name].make(model.source, model.folder)
    return folders


@pytest.fixture(scope="module")
def started(made: Mapping[str, Made], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for torchvision in (False, True):
        chosen = {name: Started(made[name].folder) for name, f in FAMILIES.items() if f.torchvision is torchvision}
        answers |= run_in_vllm(chosen, tmp_path_factory.mktemp("vllm"), torchvision=torchvision)
    return answers


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_answers_as_our_engine_or_refuses_as_check_says(
    name: str, made: Mapping[str, Made], started: Mapping[str, Any]
) -> None:
    family, answer = FAMILIES[name], started[name]
    report = check_checkpoint(made[name].folder, f"vllm:{HARDWARE}")
    assert (report.verdict is LoadVerdict.REFUSED) is bool(family.refusal)
    assert what_happened(made[name].folder, answer) == EXPECTED[report.verdict], answer["error"]
    if family.refusal:
        assert re.search(family.refusal, answer["error"])


@pytest.mark.parametrize("name", SERVED)
def test_the_answers_are_not_those_of_the_source(
    name: str, made: Mapping[str, Made], started: Mapping[str, Any]
) -> None:
    """The comparison can fail: vLLM's answers from the quantized weights do not match the BF16 weights."""
    assert not is_same_model(made[name].source, answers_of(started[name]))
