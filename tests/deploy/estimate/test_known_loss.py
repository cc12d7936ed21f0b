"""Each figure of `known_losses` stands in the section of docs/results.md that it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from minifloat.deploy.estimate.model_plan import MEASURED_MODELS, KnownLoss, known_losses
from minifloat.numerics.scheme import SCHEMES

RESULTS = (Path(__file__).parents[3] / "docs" / "results.md").read_text(encoding="utf-8")
ROWS = [loss for scheme in SCHEMES for loss in known_losses(scheme)]
#: What stands in the first cells of the row of a section where it is not the scheme's name.
FIRST_CELLS = {
    "What the search for NVFP4's scales gains": "| {model} | search |",
    "What inputs in 4 and 8 bits cost": "| `{scheme}` |",
    "What each calibration rule costs": "| tinystories_calib.txt | max |",
}


def of_model(section: str, model: str) -> str:
    """Return the part of a section about a model: from its name on, to the next model that begins a table."""
    starts = {name: section.find(f"\n{name}") for name in (*MEASURED_MODELS, "stories260K")}
    if starts[model] < 0:
        return section
    end = min((start for start in starts.values() if start > starts[model]), default=len(section))
    return section[starts[model] : end]


@pytest.mark.parametrize("loss", ROWS, ids=lambda loss: f"{loss.scheme}-{loss.model}")
def test_every_figure_stands_in_the_row_of_the_section_that_it_names(loss: KnownLoss) -> None:
    _, found, rest = RESULTS.partition(f"\n## {loss.section}\n")
    assert found, loss.section
    section = of_model(rest.partition("\n## ")[0], loss.model)
    start = FIRST_CELLS.get(loss.section, "| {scheme} |").format(scheme=loss.scheme, model=loss.model)
    row = next(line for line in section.splitlines() if line.startswith(start))
    cells = [cell.strip().replace("%", "").replace("+", "") for cell in row.split("|")]
    measured = [(loss.ppl_increase, 100, 2), *([] if loss.kl is None else [(loss.kl, 1, 4)])]
    for estimate, scale, digits in measured:
        value, *ends = [
            "" if number is None else f"{scale * number:.{digits}f}"
            for number in (estimate.value, estimate.low, estimate.high)
        ]
        wanted = f"{value} [{ends[0]}, {ends[1]}]" if all(ends) else value
        assert wanted in cells, f"{wanted} in {row}"


def test_a_model_has_at_most_one_row_per_scheme_and_all_are_of_one_text() -> None:
    assert len({(loss.scheme, loss.model) for loss in ROWS}) == len(ROWS)
    assert {loss.text for loss in ROWS} == {"alice.txt"}
    assert {loss.model for loss in ROWS} == set(MEASURED_MODELS)


def test_a_scheme_that_was_not_measured_has_no_row() -> None:
    assert known_losses("of-mine") == ()
