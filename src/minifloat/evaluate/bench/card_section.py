"""The section of a model card about memory and latency: the result of a bench in Markdown, with machine and date."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from minifloat.evaluate.bench.figures import BatchFigures, spread
from minifloat.evaluate.bench.gains import EngineFigures, GainsReport
from minifloat.report.card import markdown, markers
from minifloat.report.text import size_text

BEGIN, END = markers("bench")
_GIGA = 10**9


def gains_section(report: GainsReport) -> str:
    """Return the section as Markdown, between its markers."""
    before, after = report.baseline, report.candidate
    machine, load = report.machine, report.workload
    read = f", memory read {statistics.median(report.bandwidths) / _GIGA:.1f} GB/s" if report.bandwidths else ""
    lines = [
        BEGIN,
        "## Memory and latency",
        "",
        f"Compared with {markdown(before.info['name'])} in {before.info['dtype']}, in the same engine, both in turn.",
        "",
        *_table(("", "baseline", "this model", "gain"), _memory(report)),
        *_table(
            ("batch", "model", "decode ms", "tokens/s", "gain", "spread", "TTFT p50 ms", "ITL p50 ms", "ITL p99 ms"),
            [row for batch in load.batch_sizes for row in _latency(report, batch)],
        ),
        "tokens/s: of decode steps, all sequences together; gain: the median of ratios inside rounds; spread: of these",
        "ratios, the largest less the smallest over the median.",
        "",
        f"- {report.date}, minifloat {machine['minifloat']}, {machine['threads']} threads of {machine['cores']} cores, "
        f"{machine['gpu'] or machine['instruction_set'] or 'no native kernels'}{read}",
        f"- prompts of {load.input_len} random tokens, outputs of {load.output_len}, rounds: {load.rounds}, "
        f"seed {load.seed}",
        *(f"- not to be quoted: {markdown(doubt)}" for doubt in report.doubts),
        *(
            f"- {markdown(info['name'])} runs on transformers' code: {markdown(info['reason_not_native'])}"
            for info in (before.info, after.info)
            if info["reason_not_native"]
        ),
        END,
    ]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose cells are Markdown, with an empty line after it."""
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _memory(report: GainsReport) -> list[list[str]]:
    pair, gains = (report.baseline, report.candidate), report.gains
    return [
        ["output layer", *(markdown(engine.info["lm_head"]) for engine in pair), ""],
        ["inputs of linears", *(engine.info["activations"] for engine in pair), ""],
        ["weights", *(size_text(engine.info["weight_bytes"]) for engine in pair), _gain(gains["weight_bytes"])],
        [
            "read by a decode step",
            *(size_text(engine.info["step_bytes"]) for engine in pair),
            _gain(gains["step_bytes"]),
        ],
        [
            "KV cache per token",
            *(f"{engine.info['kv_bytes_per_token']:,} B ({engine.info['kv_element']})" for engine in pair),
            _gain(gains["kv_bytes_per_token"]),
        ],
        ["peak memory of the process", *(size_text(engine.peak_rss) for engine in pair), _gain(gains["peak_rss"])],
        [
            "load time",
            *(f"{statistics.median(engine.load_seconds):.2f} s" for engine in pair),
            _gain(gains["load_seconds"]),
        ],
    ]


def _latency(report: GainsReport, batch: int) -> list[list[str]]:
    """Return the rows of both models at a batch size."""
    gains = report.decode_gains(batch)
    gain = [_gain(statistics.median(gains)), f"{spread(gains):.0%}"] if len(gains) > 1 else [*map(_gain, gains), ""]
    return [
        _row(batch, "baseline", report.baseline, ["", ""]),
        _row(batch, "this model", report.candidate, gain if gains else ["-", ""]),
    ]


def _row(batch: int, name: str, engine: EngineFigures, gain: Sequence[str]) -> list[str]:
    figures: BatchFigures = engine.batches[batch]
    decode = f"{statistics.median(figures.decode_ms):.2f}" if figures.decode_ms else "-"
    throughput = "-" if figures.decode_throughput is None else f"{figures.decode_throughput:.1f}"
    latencies = (figures.metrics[key] for key in ("median_ttft_ms", "median_itl_ms", "p99_itl_ms"))
    return [str(batch), name, decode, throughput, *gain, *(f"{value:.1f}" for value in latencies)]


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
