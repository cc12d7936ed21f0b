"""The report beside a checkpoint: what each command adds, what is said where nothing was measured, damaged files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from comparisons import full_candidate, hostile_comparison, make_candidate, make_comparison
from gains import make_gains
from pages import captions, loads_nothing, rows, sections, text_of

from minifloat import quantize_checkpoint
from minifloat.commands.main import main
from minifloat.commands.report import draw_report
from minifloat.deploy.options import PushOptions
from minifloat.deploy.publish import push_checkpoint
from minifloat.errors import CheckpointError
from minifloat.evaluate.checkpoint_report import has_report, read_results, write_report
from minifloat.evaluate.compare.result import Comparison

ORDER = ["What was done", "Is it still the same model?", "What was gained", "Where it loads"]


@pytest.fixture
def out(fp8_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(fp8_folder, tmp_path / "out"))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def compared(out: Path, damage: float = 1.0, *others: str) -> Comparison:
    return make_comparison(full_candidate(str(out), damage), *(make_candidate(name, 10) for name in others))


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def test_quantize_writes_a_report_and_says_where(llama_folder: Path, tmp_path: Path) -> None:
    result = run("quantize", llama_folder, tmp_path / "out", "--scheme", "fp8")
    assert result.exit_code == 0, result.output
    assert f"Report: {tmp_path / 'out' / 'report.html'}" in result.output
    found = sections(page_of(tmp_path / "out"))
    assert list(found)[:4] == ORDER
    done = {row[0]: row[1:] for row in rows(found["What was done"])}
    assert done["quantized to fp8"][0] == "14"
    assert "minifloat quantize" in text_of(found["Made with"])
    assert "minifloat compare MODEL out" in text_of(found["Is it still the same model?"])
    assert "minifloat bench out --baseline MODEL" in text_of(found["What was gained"])


def test_quantize_leaves_the_report_out_if_asked(llama_folder: Path, tmp_path: Path) -> None:
    result = run("quantize", llama_folder, tmp_path / "out", "--scheme", "fp8", "--no-report")
    assert "Report" not in result.output
    assert not has_report(tmp_path / "out")


def test_the_results_of_compare_and_bench_stay_when_the_other_is_added(out: Path) -> None:
    write_report(out, compared(out))
    write_report(out, make_gains())
    page = page_of(out)
    assert loads_nothing(page)
    found = sections(page)
    assert list(found)[:4] == ORDER
    assert "PASSED" in text_of(found["Is it still the same model?"])
    assert rows(found["What was gained"])[0][0] == "weights"
    assert {"KL divergence", "Latencies", "Error of the weights", "Made with"} <= set(found)
    write_report(out, compared(out, damage=10))
    again = sections(page_of(out))
    assert "FAILED" in text_of(again["Is it still the same model?"])
    assert "PASSED" not in text_of(again["Is it still the same model?"])
    assert rows(again["What was gained"]) == rows(found["What was gained"])


def test_the_table_comes_before_the_verdict(out: Path) -> None:
    write_report(out, compared(out))
    section = sections(page_of(out))["Is it still the same model?"]
    parts = [part.tag if part.tag == "table" else part.get("class", "") for part in section]
    assert parts.index("table") < parts.index("box passed")


def test_other_candidates_are_in_the_chart_of_sizes_alone(out: Path) -> None:
    write_report(out, compared(out, 1.0, "models/other"))
    stored = (out / "report.json").read_text(encoding="utf-8")
    results = read_results(out)
    assert results.comparison is not None
    assert [candidate.model.name for candidate in results.comparison.candidates] == [str(out)]
    assert [other.model.name for other in results.others] == ["models/other"]
    assert not results.others[0].worst
    section = sections(page_of(out))["Is it still the same model?"]
    assert [caption for caption in captions(section) if caption.startswith("Size against")]
    assert len(rows(section)) == 2  # the baseline and this checkpoint
    assert json.loads(stored)["schema_version"] == 1


def test_variants_of_the_checkpoint_are_its_own(out: Path) -> None:
    variant = make_candidate(f"{out} (weights only)", 0.5)
    write_report(out, make_comparison(make_candidate(str(out)), variant))
    results = read_results(out)
    assert results.comparison is not None
    assert len(results.comparison.candidates) == 2
    with pytest.raises(ValueError, match="not among the candidates"):
        write_report(out, make_comparison(make_candidate("elsewhere")))


def test_the_report_does_not_change_if_it_is_drawn_again(out: Path) -> None:
    write_report(out, compared(out))
    before = page_of(out)
    (out / "report.html").unlink()
    assert run("report", out).exit_code == 0
    assert page_of(out) == before


def test_the_terminal_shows_the_same_three_tables(out: Path) -> None:
    write_report(out, compared(out))
    write_report(out, make_gains())
    result = run("report", out)
    assert result.exit_code == 0, result.output
    for words in ("what was done", "quantized to fp8", "is it the same model?", "PASSED", "what was gained"):
        assert words in result.output
    found = sections(page_of(out))
    for cell in rows(found["What was gained"])[4]:
        assert cell in result.output
    assert "minifloat 0." in result.output
    assert "loads on cpu" in result.output


def test_the_terminal_says_as_the_page_why_gains_are_not_to_be_quoted(out: Path) -> None:
    write_report(out, make_gains(1.8))
    assert "Not to be quoted" not in run("report", out).output
    write_report(out, make_gains(2.5))  # more than the bytes of a step explain
    result = read_results(out).gains
    assert result is not None
    assert result.doubts
    told = f"Not to be quoted: {' '.join(result.doubts)}"
    assert told in run("report", out).output
    assert told in text_of(sections(page_of(out))["What was gained"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{", "not valid JSON"),
        ('{"schema_version": 99}', "expected schema_version 1, found 99; delete the file"),
        ('{"schema_version": 1, "bench": {"date": 3}}', "delete the file"),
        ('{"schema_version": 1, "compare": 7}', "expected dict, found int"),
    ],
)
def test_a_damaged_file_of_results_is_refused_by_name_and_replaced_by_the_next_result(
    out: Path, content: str, message: str
) -> None:
    (out / "report.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as raised:
        write_report(out)
    assert "report.json" in str(raised.value)


def test_a_result_that_cannot_be_added_is_said_and_does_not_fail_the_command(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / "report.json").write_text('{"schema_version": 1, "compare": 7}')
    draw_report(out, make_gains(), err=False)
    said = capsys.readouterr().err
    assert f"The report beside {out} was not written" in said
    assert "delete the file" in said


def test_a_new_result_replaces_a_file_that_is_no_json(out: Path) -> None:
    (out / "report.json").write_text("{")
    write_report(out, make_gains())
    assert read_results(out).gains == make_gains()


def test_a_folder_without_a_report_and_a_model_of_the_hub_are_left_alone(out: Path) -> None:
    assert not has_report(out)
    assert not has_report("org/name")
    write_report(out)
    assert has_report(out)


def test_a_checkpoint_without_history_says_so(llama_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama_folder, tmp_path / "plain"))
    write_report(folder)
    assert "has no minifloat.json" in text_of(sections(page_of(folder))["What was done"])
    assert "not known" in run("report", folder).output


def test_push_leaves_the_report_out_because_it_quotes_texts(out: Path) -> None:
    write_report(out, compared(out))
    report = push_checkpoint(out, "org/name", PushOptions(license="mit", base_model="org/base", dry_run=True))
    assert {"report.html", "report.json"} <= set(report.left)


def test_quantize_does_not_copy_the_report_of_its_source(llama_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama_folder, tmp_path / "plain"))
    write_report(folder)
    quantize_checkpoint(folder, tmp_path / "out", "fp8")
    assert not has_report(tmp_path / "out")


def test_names_and_texts_in_the_page_are_escaped(out: Path) -> None:
    folder = out.rename(out.with_name("b &amp; <i>"))
    hostile = hostile_comparison()
    candidate = hostile.candidates[0]
    candidate = replace(candidate, model=replace(candidate.model, name=str(folder)))
    write_report(folder, replace(hostile, candidates=(candidate,)))
    assert "<script>" not in page_of(folder)
    assert "<i>" not in page_of(folder)
    assert loads_nothing(page_of(folder))
