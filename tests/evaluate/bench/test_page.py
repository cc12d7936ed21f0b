"""The page of a bench: its tables, its sentences and the chart with the roofline."""

from __future__ import annotations

from gains import GIB, make_engine, make_gains
from pages import captions, loads_nothing, rows, sections, text_of

from minifloat.evaluate.bench.document import document, gain_rows, gain_sentences
from minifloat.evaluate.bench.figures import GainsReport
from minifloat.evaluate.bench.workload import Workload
from minifloat.report import html


def bench_page(report: GainsReport) -> str:
    return html.write(document(report))


def test_the_page_has_the_gains_first_and_loads_nothing() -> None:
    page = bench_page(make_gains())
    assert loads_nothing(page)
    assert list(sections(page)) == ["What was gained", "Latencies", "How the gains were measured"]


def test_the_table_shows_memory_load_time_and_latency_of_both_models() -> None:
    found = {row[0]: row[1:] for row in rows(sections(bench_page(make_gains()))["What was gained"])}
    assert found["weights"] == ["2,048.00 MiB", "1,024.00 MiB", "2.00x"]
    assert found["load time"] == ["2.00 s", "1.00 s", "2.00x"]
    assert found["decode step, batch 4"][2] == "2.50x"
    assert found["prompt, batch 1"][2] == "2.50x"


def test_what_is_slower_than_before_is_said_first() -> None:
    first, *others = gain_sentences(make_gains(speed_up=0.5))
    assert first == "Decoding for one sequence is 2.00x slower than before (rounds: 0.50, 0.50)."
    assert "The weights are 2.00x smaller." in others
    assert not any("slower" in text for text in gain_sentences(make_gains()))


def test_a_difference_below_two_percent_is_none() -> None:
    baseline = make_engine("a", "none", GIB, 70.0)
    sentences = gain_sentences(make_gains(baseline=baseline, candidate=make_engine("b", "fp8", GIB, 70.5)))
    assert "The weights are the same, within 2%." in sentences


def test_the_chart_has_both_models_and_both_limits_at_the_batch_sizes() -> None:
    section = sections(bench_page(make_gains()))["What was gained"]
    assert len(captions(section)) == 1
    wide = next(section.iter("{http://www.w3.org/2000/svg}svg"))
    text = text_of(wide)
    for name in ("baseline, measured", "quantized, measured", "quantized, limit of the memory's bandwidth"):
        assert name in text
    ticks = [element.text for element in wide.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1", "4", "16"} <= set(ticks)
    assert "2" not in ticks


def test_one_batch_size_has_no_chart_and_an_unmeasured_bandwidth_no_limit() -> None:
    single = make_gains(workload=Workload(256, 128, (4,), 2), bandwidths=())
    page = bench_page(single)
    assert "<figure>" not in page
    assert "not measured" in text_of(sections(page)["How the gains were measured"])


def test_a_step_that_was_not_measured_has_no_gain() -> None:
    from dataclasses import replace

    report = make_gains()
    batches = {size: replace(figures, decode_ms=()) for size, figures in report.candidate.batches.items()}
    report = replace(report, candidate=replace(report.candidate, batches=batches))
    row = next(row for row in gain_rows(report) if row[0] == "decode step, batch 16")
    assert row[2:] == ["no such step", "-"]
    assert not any("Decoding" in text for text in gain_sentences(report))


def test_names_of_models_are_escaped() -> None:
    page = bench_page(make_gains(candidate=make_engine("<b>&\x1b[31m", "fp8", GIB, 30.0)))
    assert "<b>&" not in page
    assert loads_nothing(page)
