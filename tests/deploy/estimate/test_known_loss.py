"""Each figure of `known_losses` stands in the section of docs/results.md that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minifloat.deploy.estimate.model_plan import MEASURED_MODELS, KnownLoss, known_losses
from minifloat.numerics.scheme import SCHEMES

RESULTS = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = [loss for scheme in SCHEMES for loss in known_losses(scheme)]
CODES = dict(zip(MEASURED_MODELS, ("nearest", "self"), strict=True))


@pytest.mark.parametrize("loss", ROWS, ids=lambda loss: f"{loss.scheme}-{loss.model}")
def test_every_figure_stands_in_the_row_of_the_section_that_it_names(loss: KnownLoss) -> None:
    _, found, rest = RESULTS.partition(f"\n## {loss.section}\n")
    assert found, loss.section
    start = re.compile(rf"\| {re.escape(loss.scheme)}( \(no --scheme\))? \| {CODES[loss.model]} \|")
    row = next(line for line in rest.partition("\n## ")[0].splitlines() if start.match(line))
    cells = [cell.strip().replace("%", "").replace("+", "") for cell in row.split("|")]
    for estimate, scale, digits in ((loss.ppl_increase, 100, 2), (loss.kl, 1, 4)):
        ends = (estimate.value, estimate.low, estimate.high)
        value, low, high = ("" if number is None else f"{scale * number:.{digits}f}" for number in ends)
        assert f"{value} [{low}, {high}]" in cells, row


def test_a_model_has_at_most_one_row_per_scheme_and_all_are_of_one_text() -> None:
    assert len({(loss.scheme, loss.model) for loss in ROWS}) == len(ROWS)
    assert {loss.text for loss in ROWS} == {"wikitext2_test.raw.txt"}
    assert {loss.model for loss in ROWS} == set(MEASURED_MODELS)


def test_a_scheme_that_was_not_measured_has_no_row() -> None:
    assert known_losses("of-mine") == ()
