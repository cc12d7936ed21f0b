"""The gains of `bench` as HTML: a page of its own, and the parts that the report beside a checkpoint shows.

Tables come first, then a sentence for each gain. Nothing is computed here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from minifloat.evaluate.bench.figures import BatchFigures, spread
from minifloat.evaluate.bench.gains import EngineFigures, GainsReport
from minifloat.report.axes import Axis
from minifloat.report.charts import Series, line_chart
from minifloat.report.page import Cell, bullets, facts, figure, page, paragraph, section, table
from minifloat.report.text import size_text, visible

_GIGA = 10**9
#: A ratio nearer to 1 than this is no difference.
_SAME = 0.02


def bench_page(report: GainsReport) -> str:
    """Return a self-contained HTML page about a bench."""
    names = (report.candidate.info["name"], report.baseline.info["name"])
    return page(
        f"What was gained: {visible(names[0])} against {visible(names[1])}",
        gains_section(report),
        *detail_sections(report),
    )


def gains_section(report: GainsReport) -> str:
    """Return the section with the gains: memory, load time and latency, as a table, a chart and sentences."""
    return section(
        "What was gained",
        table(("", "baseline", "quantized", "gain"), gain_rows(report)),
        bullets(gain_sentences(report)),
        paragraph(f"Not to be quoted: {' '.join(report.doubts)}") if report.doubts else "",
        _latency_chart(report),
    )


def gain_rows(report: GainsReport) -> list[list[str]]:
    """Return rows of the quantity, its value in both models and the gain; the terminal shows the same."""
    pair, gains = (report.baseline, report.candidate), report.gains
    rows = [
        ["weights", *(size_text(engine.info["weight_bytes"]) for engine in pair), _gain(gains["weight_bytes"])],
        ["peak memory of the process", *(size_text(engine.peak_rss) for engine in pair), _gain(gains["peak_rss"])],
        [
            "KV cache per token",
            *(f"{engine.info['kv_bytes_per_token']:,} B ({engine.info['kv_element']})" for engine in pair),
            _gain(gains["kv_bytes_per_token"]),
        ],
        [
            "load time",
            *(f"{statistics.median(engine.load_seconds):.2f} s" for engine in pair),
            _gain(gains["load_seconds"]),
        ],
    ]
    for batch in report.workload.batch_sizes:
        figures = [engine.batches[batch] for engine in pair]
        at = f"batch {batch}"
        rows.append([f"decode step, {at}", *map(_decode_ms, figures), _gain(gains[f"decode_batch_{batch}"])])
        rates = [f"{statistics.median(entry.prefill):,.0f} tokens/s" for entry in figures]
        rows.append([f"prompt, {at}", *rates, _gain(gains[f"prefill_batch_{batch}"])])
        ttft = [f"{entry.metrics['median_ttft_ms']:,.0f} ms" for entry in figures]
        rows.append([f"time to first token, {at}", *ttft, _gain(gains[f"median_ttft_batch_{batch}"])])
    return rows


def gain_sentences(report: GainsReport) -> list[str]:
    """Return sentences for memory, load time and decoding, and for prompts that take longer; losses come first."""
    gains = report.gains
    sentences = [
        _sentence("The weights are", gains["weight_bytes"], "smaller", "larger"),
        _sentence("The peak memory of the process is", gains["peak_rss"], "smaller", "larger"),
        _sentence("Loading is", gains["load_seconds"], "faster", "slower"),
    ]
    for batch in report.workload.batch_sizes:
        at = "for one sequence" if batch == 1 else f"for {batch} sequences at a time"
        ratios = report.decode_gains(batch)
        rounds = f" (rounds: {', '.join(f'{ratio:.2f}' for ratio in ratios)})" if len(ratios) > 1 else ""
        sentences.append(_sentence(f"Decoding {at} is", gains[f"decode_batch_{batch}"], "faster", "slower", rounds))
        prompt = _sentence(f"Reading prompts {at} is", gains[f"prefill_batch_{batch}"], "faster", "slower")
        sentences += [prompt] if prompt[1] else []
    worse = [text for text, is_worse in sentences if text and is_worse]
    return worse + [text for text, is_worse in sentences if text and not is_worse]


def _sentence(subject: str, ratio: float | None, better: str, worse: str, more: str = "") -> tuple[str, bool]:
    """Return the sentence for a ratio, and whether the quantized model is worse; empty without a ratio."""
    if ratio is None:
        return "", False
    if abs(ratio - 1) < _SAME:
        return f"{subject} the same, within {_SAME:.0%}{more}.", False
    if ratio > 1:
        return f"{subject} {ratio:.2f}x {better}{more}.", False
    return f"{subject} {1 / ratio:.2f}x {worse} than before{more}.", True


def _latency_chart(report: GainsReport) -> str:
    """Draw the time of a decode step over the batch, with the bound of the memory's bandwidth for each model."""
    batches = sorted(report.workload.batch_sizes)
    if len(batches) < 2:
        return ""
    series = []
    for name, engine in (("baseline", report.baseline), ("quantized", report.candidate)):
        series.append(Series(f"{name}, measured", _points(engine, batches, "decode_ms")))
    for name, engine in (("baseline", report.baseline), ("quantized", report.candidate)):
        series.append(Series(f"{name}, limit of the memory's bandwidth", _points(engine, batches, "bound_ms")))
    series = [entry for entry in series if entry.points]
    if not series:
        return ""
    caption = "Time of a decode step by batch size, and the time to read its bytes at the measured bandwidth (roofline)"
    x = Axis("sequences at a time", log=True, at=tuple(map(float, batches)))
    y = Axis("milliseconds", log=True)
    return figure(caption, lambda width: line_chart(series, title=caption, x=x, y=y, width=width))


def _points(engine: EngineFigures, batches: Sequence[int], name: str) -> list[tuple[float, float]]:
    """Return batch sizes and the median of a figure; batch sizes without the figure are left out."""
    values = {batch: getattr(engine.batches[batch], name) for batch in batches}
    return [(float(batch), statistics.median(values[batch])) for batch in batches if values[batch]]


def detail_sections(report: GainsReport) -> list[str]:
    """Return the sections with all latencies and with what was run."""
    return [_latencies(report), _run(report)]


def _latencies(report: GainsReport) -> str:
    columns = ("batch", "decode ms", "tokens/s", "of bandwidth", "spread", "TTFT p50 / p99 ms", "ITL p50 / p99 ms")
    rows: list[list[Cell]] = []
    for batch in report.workload.batch_sizes:
        rows.append([f"{batch} at a time"])
        for name, engine in (("baseline", report.baseline), ("quantized", report.candidate)):
            figures = engine.batches[batch]
            share = figures.bandwidth_share
            values = figures.metrics
            rows.append(
                [
                    name,
                    _decode_ms(figures).removesuffix(" ms"),
                    "-" if figures.decode_throughput is None else f"{figures.decode_throughput:.1f}",
                    "-" if share is None else f"{share:.0%}",
                    _percent(spread(figures.decode_ms)),
                    f"{values['median_ttft_ms']:.1f} / {values['p99_ttft_ms']:.1f}",
                    f"{values['median_itl_ms']:.1f} / {values['p99_itl_ms']:.1f}",
                ]
            )
    note = (
        "decode ms: the median step in which every sequence gets a token; tokens/s: of such steps, all sequences "
        "together; spread: the largest less the smallest round over the median; TTFT: time to first token; ITL: time "
        "between tokens."
    )
    return section("Latencies", table(columns, rows), paragraph(note))


def _run(report: GainsReport) -> str:
    machine, load = report.machine, report.workload
    read = f"{statistics.median(report.bandwidths) / _GIGA:.1f} GB/s" if report.bandwidths else "not measured"
    pairs = [
        ("baseline", _model(report.baseline)),
        ("quantized", _model(report.candidate)),
        ("prompts", f"{load.input_len} random tokens each, outputs of {load.output_len}, seed {load.seed}"),
        ("rounds", f"{load.rounds}, both models in turn"),
        ("machine", machine["gpu"] or f"{machine['instruction_set'] or 'no native kernels'}"),
        ("threads", f"{machine['threads']} of {machine['cores']} cores"),
        ("memory read", read),
        ("date", report.date),
        ("minifloat", machine["minifloat"]),
    ]
    for engine in (report.baseline, report.candidate):
        if engine.info["reason_not_native"]:
            reason = f"{engine.info['name']} runs on transformers' code: {engine.info['reason_not_native']}"
            pairs.append(("slower", visible(reason)))
    if (drafts := report.candidate.speculation) is not None:
        pairs.append(("drafts", f"{drafts['acceptance_rate']:.0%} of {drafts['num_draft_tokens']:,} accepted"))
    if not report.together:
        pairs.append(("memory", "does not hold both engines: each was loaded again for every round"))
    return section("How the gains were measured", facts(pairs))


def _model(engine: EngineFigures) -> str:
    info = engine.info
    scheme = info["dtype"] if info["scheme"] == "none" else info["scheme"]
    return visible(f"{info['name']}: {scheme}, output layer {info['lm_head']}, inputs {info['activations']}")


def _decode_ms(figures: BatchFigures) -> str:
    return f"{statistics.median(figures.decode_ms):.2f} ms" if figures.decode_ms else "no such step"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
