"""Replays what fuzzing found: `./scripts/fuzz` finds inputs, fuzz/corpus keeps those that failed."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzzing import mutation, small
from fuzzing.target import CORPUS, NAMES, Failure, Target, corpus, load, outcome

from minifloat.errors import UsageError

#: Tests share the cores with others: what a target allows alone takes longer here.
_BUSY = 10
_INPUTS = [(name, title) for name in NAMES for title in corpus(name)]


@pytest.fixture(scope="session", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Put the small checkpoints into pytest's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("fuzz")))
        small.scratch()


def patient(target: Target) -> Target:
    return replace(target, seconds=target.seconds * _BUSY)


@pytest.mark.parametrize("name", NAMES)
def test_valid_inputs_are_read_without_an_error(name: str) -> None:
    target = load(name)
    for title, data in target.seeds().items():
        if title not in ("layout", "flipped"):  # refused, with an error of minifloat
            target.run(data)
        assert outcome(patient(target), data) is None, title


@pytest.mark.parametrize(("name", "title"), _INPUTS)
def test_an_input_that_once_failed_is_read_or_refused(name: str, title: str) -> None:
    failure = outcome(patient(load(name)), corpus(name)[title])
    assert failure is None, failure.details


def test_every_folder_of_the_corpus_is_that_of_a_target() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= {*NAMES, "native"}


@pytest.mark.parametrize("name", NAMES)
def test_changed_inputs_are_other_inputs_and_no_larger_than_allowed(name: str) -> None:
    target = load(name)
    assert target.mutate is not None
    data = max(target.seeds().values(), key=len)
    changed = [target.mutate(data, 8000, Random(seed)) for seed in range(30)]
    assert len(set(changed)) > 20
    assert max(map(len, changed)) <= 8000
    short = target.mutate(data, 20, Random(1))
    assert len(short) <= 20


def test_the_outcome_tells_errors_of_minifloat_from_all_others() -> None:
    def runs(act: Any) -> Failure | None:
        return outcome(Target(lambda data: act(), dict, seconds=1), b"")

    def refuse() -> None:
        raise UsageError("refused")

    def fail() -> None:
        raise KeyError("shape")

    def compute() -> None:
        sum(range(10**6))

    assert runs(refuse) is None
    found = runs(fail)
    assert found is not None
    assert found.where.startswith("KeyError-")
    assert "KeyError: 'shape'" in found.details
    slow = outcome(Target(lambda data: compute(), dict, seconds=0.001), b"")
    assert slow is not None
    assert slow.where == "slow"


def test_a_header_is_found_in_a_file_and_put_back() -> None:
    file = mutation.join_safetensors({"a": 1}, b"data")
    assert mutation.split_safetensors(file) == ({"a": 1}, b"data")
    assert mutation.split_safetensors(b"\xff" * 8 + b"{}") is None
    assert mutation.split_safetensors(b"{}") is None


def test_the_program_of_the_native_target_has_every_function_of_the_interface() -> None:
    root = Path(__file__).parents[2]
    api = (root / "src/minifloat/kernels/native/api.h").read_text()
    program = (root / "fuzz/native/entry_points.cpp").read_text()
    declared = {line.partition("(")[0].split()[-1] for line in api.splitlines() if line.startswith("MINIFLOAT_API")}
    unused = {name for name in declared if f"{name}(" not in program}
    assert unused == {
        "minifloat_abi_version", "minifloat_bind_threads", "minifloat_isa_name", "minifloat_isa_supported",
        "minifloat_release_threads",
        "minifloat_step",  # tests/kernels/decoder under ./scripts/sanitize
    }  # fmt: skip
