"""Held-out text has two halves: one chooses, and nothing looks at the other but the figures of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rounding_cases import make_text, write_model

from minifloat.calibration.data import CalibrationSet
from minifloat.checkpoint import Checkpoint
from minifloat.errors import DataError
from minifloat.model.layouts import get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.estimate import DEFAULT_TEXT, Tokens
from minifloat.quantize.rounding.methods import RoundingOptions, get_method
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.texts import SplitText

KEPT, CHOOSING = make_text(20), make_text(4, seed=1)


def numbered(count: int) -> CalibrationSet:
    return CalibrationSet(tuple((number,) for number in range(count)))


def test_every_sequence_is_in_one_part_and_the_last_ones_are_only_reported() -> None:
    parts = SplitText.of(numbered(284), 0.1)
    assert sorted(sequence for part in parts.parts for sequence in part.sequences) == list(numbered(284).sequences)
    assert [len(part.sequences) for part in (parts.kept, parts.choosing, parts.reported)] == [256, 14, 14]
    assert parts.reported.sequences == numbered(284).sequences[-14:]
    assert parts == SplitText.of(numbered(284), 0.1)
    assert Tokens.of(284, DEFAULT_TEXT) == Tokens(256 * 256, 14 * 256, 14 * 256, 256)


def test_few_sequences_still_have_three_parts_or_are_refused() -> None:
    parts = SplitText.of(numbered(3), 0.1)
    assert [len(part.sequences) for part in (parts.kept, parts.choosing, parts.reported)] == [1, 1, 1]
    for count, fraction in ((2, 0.1), (9, 0.0), (4, 0.99)):
        with pytest.raises(DataError, match="choose and judge codes"):
            SplitText.of(numbered(count), fraction)


def run(folder: Path, work: Path, reported: CalibrationSet, method: str) -> tuple[Any, ...]:
    """Codes and rows, what was measured to choose, and what was reported."""
    options, texts = RoundingOptions(get_method(method)), SplitText(KEPT, CHOOSING, reported)
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, SCHEMES["mxfp4"], get_writer("compressed-tensors"))
        with round_checkpoint(checkpoint, plan, texts, options, work) as rounded:
            names = [tensor.name for row in plan.tensors for tensor in row.outputs if tensor.name in rounded]
            tensors = {name: rounded.read(name).tobytes() for name in names}
            facts = (dict(rounded.weights), rounded.folds, rounded.choosing)
            return tensors, facts, dict(rounded.held_out)


@pytest.mark.parametrize("method", ["match", "gptq"])
def test_reported_text_changes_no_code_fold_or_factor(tmp_path: Path, method: str) -> None:
    folder = write_model(tmp_path / "llama", "llama")
    one, other = (run(folder, tmp_path / "work", make_text(3, seed=seed), method) for seed in (2, 3))
    assert one[0] == other[0]
    assert one[1] == other[1]
    assert one[2]["method"] != other[2]["method"]
    assert one[1][2]["tokens"] == CHOOSING.tokens
    assert one[2]["tokens"] == make_text(3, seed=2).tokens
