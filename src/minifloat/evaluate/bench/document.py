"""What `bench` says: memory and latency of two models, gains in sentences, and what was run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from minifloat.evaluate.bench.figures import BatchFigures, EngineFigures, GainsReport, spread
from minifloat.report import document as doc
from minifloat.report.text import size_text, times, whole_percent

_GIGA = 10**9
#: A ratio nearer to 1 than this is no difference.
_SAME = 0.02
_NOTE = (
    "bound: a step that only reads its bytes (weights + keys and values) at that bandwidth; tokens/s: of decode steps, "
    "all sequences together; spread: largest less smallest round over the median; gains are ratios inside rounds; "
    "TTFT: time to first token; ITL: time between tokens; TPOT: time per output token."
)


def document(report: GainsReport) -> doc.Document:
    return doc.Document(
        f"What was gained: {report.candidate.info['name']} against {report.baseline.info['name']}",
        [gains_section(report, on=doc.On.PAGE), *detail_sections(report)],
    )


def _pair(report: GainsReport) -> tuple[tuple[str, EngineFigures], tuple[str, EngineFigures]]:
    return ("baseline", report.baseline), ("quantized", report.candidate)


def gains_section(report: GainsReport, *, on: doc.On = doc.On.ALL) -> doc.Section:
    doubts = f"Not to be quoted: {' '.join(report.doubts)}"
    return doc.section(
        "What was gained",
        doc.Table(doc.columns("what was gained", "baseline", "quantized", "gain"), gain_rows(report)),
        doc.Bullets(gain_sentences(report)),
        doc.Text(doubts if report.doubts else ""),
        _latency_chart(report),
        on=on,
    )


def gain_rows(report: GainsReport) -> list[list[str]]:
    gains, engines = report.gains, (report.baseline, report.candidate)
    rows = _memory_rows(report)
    for batch in report.workload.batch_sizes:
        figures = [engine.batches[batch] for engine in engines]
        at = f"batch {batch}"
        rows.append([f"decode step, {at}", *map(_decode_ms, figures), times(gains[f"decode_batch_{batch}"])])
        rates = [f"{statistics.median(entry.prefill):,.0f} tokens/s" for entry in figures]
        rows.append([f"prompt, {at}", *rates, times(gains[f"prefill_batch_{batch}"])])
        ttft = [f"{entry.metrics['median_ttft_ms']:,.0f} ms" for entry in figures]
        rows.append([f"time to first token, {at}", *ttft, times(gains[f"median_ttft_batch_{batch}"])])
    return rows


def _memory_rows(report: GainsReport) -> list[list[str]]:
    texts: dict[str, tuple[str, Callable[[EngineFigures], str]]] = {
        "weights": ("weight_bytes", lambda engine: size_text(engine.info["weight_bytes"])),
        "read by a decode step": ("step_bytes", lambda engine: size_text(engine.info["step_bytes"])),
        "peak memory of the process": ("peak_rss", lambda engine: size_text(engine.peak_rss)),
        "KV cache per token": (
            "kv_bytes_per_token",
            lambda engine: f"{engine.info['kv_bytes_per_token']:,} B ({engine.info['kv_element']})",
        ),
        "load time": ("load_seconds", lambda engine: f"{statistics.median(engine.load_seconds):.2f} s"),
    }
    gains, engines = report.gains, (report.baseline, report.candidate)
    return [[name, *map(text, engines), times(gains[key])] for name, (key, text) in texts.items()]


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


def _latency_chart(report: GainsReport) -> doc.Figure | None:
    """Return the time of a decode step over the batch, with the bound of the memory's bandwidth for each model."""
    batches = sorted(report.workload.batch_sizes)
    series = [doc.Series(f"{name}, measured", _points(engine, batches, "decode_ms")) for name, engine in _pair(report)]
    series += [
        doc.Series(f"{name}, limit of the memory's bandwidth", _points(engine, batches, "bound_ms"))
        for name, engine in _pair(report)
    ]
    series = [entry for entry in series if entry.points]
    if len(batches) < 2 or not series:
        return None
    x = doc.Axis("sequences at a time", log=True, at=tuple(map(float, batches)))
    return doc.Figure(
        "Time of a decode step by batch size, and the time to read its bytes at the measured bandwidth (roofline)",
        doc.Lines(series, x, doc.Axis("milliseconds", log=True)),
    )


def _points(engine: EngineFigures, batches: Sequence[int], name: str) -> list[tuple[float, float]]:
    """Return batch sizes and the median of a figure; batch sizes without the figure are left out."""
    values = {batch: getattr(engine.batches[batch], name) for batch in batches}
    return [(float(batch), statistics.median(values[batch])) for batch in batches if values[batch]]


def detail_sections(report: GainsReport) -> list[doc.Section]:
    return [
        doc.section("", doc.Text(_run_line(report)), on=doc.On.TERMINAL),
        doc.section("Memory", _memory_table(report), on=doc.On.TERMINAL | doc.On.CARD),
        doc.section("Latencies", _decode_table(report), _latency_table(report), doc.Text(_NOTE)),
        doc.section(
            "",
            doc.Alert("warning", "Not to be quoted:", report.doubts) if report.doubts else None,
            doc.Bullets(list(_remarks(report))),
            on=doc.On.TERMINAL | doc.On.CARD,
        ),
        doc.section("How the gains were measured", doc.Facts(_run_facts(report)), on=doc.On.PAGE | doc.On.CARD),
    ]


def _run_line(report: GainsReport) -> str:
    machine, load = report.machine, report.workload
    cpu = f"{machine['threads']} threads, {machine['instruction_set'] or 'no native kernels'}"
    return (
        f"{machine['gpu'] or cpu}, memory read {_bandwidth(report)}; prompts of {load.input_len} tokens, outputs of "
        f"{load.output_len}, {load.rounds} rounds"
    )


def _bandwidth(report: GainsReport) -> str:
    return f"{statistics.median(report.bandwidths) / _GIGA:.1f} GB/s" if report.bandwidths else "not measured"


def _memory_table(report: GainsReport) -> doc.Table:
    engines = (report.baseline, report.candidate)
    weights, *others = _memory_rows(report)
    rows = [
        ["scheme", *(_scheme(engine) for engine in engines), ""],
        ["output layer", *(engine.info["lm_head"] for engine in engines), ""],
        ["inputs of linears", *(engine.info["activations"] for engine in engines), ""],
        weights,
        *others,
        ["reading the files", *(f"{engine.read_seconds:.2f} s" for engine in engines), ""],
    ]
    names = [f"{role}: {engine.info['name']}" for role, engine in zip(("baseline", "candidate"), engines, strict=True)]
    return doc.Table(doc.columns("", *names, "gain"), rows)


def _scheme(engine: EngineFigures) -> str:
    scheme: str = engine.info["scheme"]
    return scheme.replace("none", engine.info["dtype"])


def _decode_table(report: GainsReport) -> doc.Table:
    numbers = ("decode ms", "tokens/s", "bound", "of bandwidth", "spread", "gain", "gain's spread")
    rows = []
    for batch in report.workload.batch_sizes:
        for name, engine in _pair(report):
            figures = engine.batches[batch]
            gains = report.decode_gains(batch) if engine is report.candidate else []
            rows.append(
                [
                    str(batch),
                    name,
                    _decode_ms(figures).removesuffix(" ms"),
                    _number(figures.decode_throughput),
                    _number(figures.bound_throughput),
                    "-" if figures.bandwidth_share is None else f"{figures.bandwidth_share:.0%}",
                    whole_percent(spread(figures.decode_ms)),
                    times(statistics.median(gains) if gains else None, ""),
                    whole_percent(spread(gains)) if engine is report.candidate else "",
                ]
            )
    return doc.Table(doc.columns("batch", doc.Column("model", left=True), *numbers), rows)


def _latency_table(report: GainsReport) -> doc.Table:
    numbers = ("TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms", "output tok/s", "prefill tok/s", "gain")
    keys = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_tpot_ms", "output_throughput")
    rows = []
    for batch in report.workload.batch_sizes:
        for name, engine in _pair(report):
            figures = engine.batches[batch]
            gain = statistics.median(report.prefill_gains(batch)) if engine is report.candidate else None
            latencies = [f"{figures.metrics[key]:.1f}" for key in keys]
            rows.append([str(batch), name, *latencies, f"{statistics.median(figures.prefill):.0f}", times(gain, "")])
    return doc.Table(doc.columns("batch", doc.Column("model", left=True), *numbers), rows)


def _remarks(report: GainsReport) -> Iterator[str]:
    if not report.together:
        yield "Memory does not hold both engines: each was loaded again for every round."
    if (drafts := report.candidate.speculation) is not None:
        yield (
            f"Drafts: {drafts['acceptance_rate']:.0%} of {drafts['num_draft_tokens']:,} were accepted, "
            f"{drafts['tokens_per_step']:.2f} tokens per step with drafts. The prompts are random tokens: text has "
            "another rate."
        )
    for engine in (report.baseline, report.candidate):
        if engine.info["reason_not_native"]:
            yield f"{engine.info['name']} runs on transformers' code: {engine.info['reason_not_native']}"


def _run_facts(report: GainsReport) -> list[tuple[str, str]]:
    machine, load = report.machine, report.workload
    return [
        *((name, _model(engine)) for name, engine in _pair(report)),
        ("prompts", f"{load.input_len} random tokens each, outputs of {load.output_len}, seed {load.seed}"),
        ("rounds", f"{load.rounds}, both models in turn, in the same engine"),
        ("machine", machine["gpu"] or machine["instruction_set"] or "no native kernels"),
        ("threads", f"{machine['threads']} of {machine['cores']} cores"),
        ("memory read", _bandwidth(report)),
        ("date", report.date),
        ("minifloat", machine["minifloat"]),
        *(("remark", remark) for remark in _remarks(report)),
    ]


def _model(engine: EngineFigures) -> str:
    info = engine.info
    return f"{info['name']}: {_scheme(engine)}, output layer {info['lm_head']}, inputs {info['activations']}"


def _decode_ms(figures: BatchFigures) -> str:
    return f"{statistics.median(figures.decode_ms):.2f} ms" if figures.decode_ms else "no such step"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
