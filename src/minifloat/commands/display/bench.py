"""Prints the report of `bench`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from minifloat.commands.display.console import make_console, make_table
from minifloat.evaluate.bench.figures import BatchFigures, spread
from minifloat.evaluate.bench.gains import EngineFigures, GainsReport

_MEBI = 1 << 20
_GIGA = 10**9


def print_gains(report: GainsReport) -> None:
    """Print memory, then latency and throughput by batch size, the baseline before the candidate."""
    console = make_console()
    machine, load = report.machine, report.workload
    read = f"{statistics.median(report.bandwidths) / _GIGA:.1f} GB/s" if report.bandwidths else "unknown"
    console.print(
        escape(
            f"{machine['gpu'] or _cpu(machine)}, memory read {read}; "
            f"prompts of {load.input_len} tokens, outputs of {load.output_len}, {load.rounds} rounds\n"
        )
    )
    console.print(_memory_table(report))
    console.print()
    console.print(_decode_table(report))
    console.print()
    console.print(_latency_table(report))
    console.print(
        "\nbound: a step that only reads its bytes (weights + keys and values) at that bandwidth; spread: largest less "
        "smallest round\nover the median; gains are ratios inside rounds.",
        soft_wrap=True,
    )
    if report.doubts:
        console.print("\nNot to be quoted:", style="bold")
        for doubt in report.doubts:
            console.print(escape(f"  {doubt}"), soft_wrap=True)
    if not report.together:
        console.print("Memory does not hold both engines: each was loaded again for every round.")
    if (drafts := report.candidate.speculation) is not None:
        console.print(
            f"Drafts: {drafts['acceptance_rate']:.0%} of {drafts['num_draft_tokens']:,} were accepted, "
            f"{drafts['tokens_per_step']:.2f} tokens per step with drafts. The prompts are random tokens: text has "
            "another rate.",
            soft_wrap=True,
        )
    for engine in (report.baseline, report.candidate):
        if engine.info["reason_not_native"]:
            name, reason = engine.info["name"], engine.info["reason_not_native"]
            console.print(escape(f"{name} runs on transformers' code: {reason}"), soft_wrap=True)


def _cpu(machine: Mapping[str, Any]) -> str:
    return f"{machine['threads']} threads, {machine['instruction_set'] or 'no native kernels'}"


def _memory_table(report: GainsReport) -> Table:
    baseline, candidate = report.baseline, report.candidate
    columns = (f"baseline: {baseline.info['name']}", f"candidate: {candidate.info['name']}", "gain")
    table = make_table("", *map(escape, columns), right=map(escape, columns))
    table.add_row(
        "weights", baseline.info["scheme"].replace("none", baseline.info["dtype"]), candidate.info["scheme"], ""
    )
    table.add_row("output layer", *(escape(engine.info["lm_head"]) for engine in (baseline, candidate)), "")
    table.add_row("inputs of linears", *(engine.info["activations"] for engine in (baseline, candidate)), "")
    gains = report.gains
    for title, name in (("weight bytes", "weight_bytes"), ("read by a step", "step_bytes")):
        table.add_row(title, *(_mebi(engine.info[name]) for engine in (baseline, candidate)), _gain(gains[name]))
    cells = [
        f"{engine.info['kv_bytes_per_token']:,} B ({engine.info['kv_element']})" for engine in (baseline, candidate)
    ]
    table.add_row("KV cache per token", *cells, _gain(gains["kv_bytes_per_token"]))
    table.add_row("peak RSS", *(_mebi(engine.peak_rss) for engine in (baseline, candidate)), _gain(gains["peak_rss"]))
    loads = [f"{statistics.median(engine.load_seconds):.2f} s" for engine in (baseline, candidate)]
    table.add_row("load time", *loads, _gain(gains["load_seconds"]))
    table.add_row("reading the files", *(f"{engine.read_seconds:.2f} s" for engine in (baseline, candidate)), "")
    return table


def _decode_table(report: GainsReport) -> Table:
    numbers = ("decode ms", "tokens/s", "bound", "of bandwidth", "spread", "gain", "gain's spread")
    table = make_table("batch", "model", *numbers, right=numbers)
    for batch in report.workload.batch_sizes:
        for engine in (report.baseline, report.candidate):
            figures = engine.batches[batch]
            decode_ms = figures.decode_ms
            gains = report.decode_gains(batch) if engine is report.candidate else []
            table.add_row(
                str(batch),
                escape(engine.info["name"]),
                f"{statistics.median(decode_ms):.2f}" if decode_ms else "no such step",
                _number(figures.decode_throughput),
                _number(figures.bound_throughput),
                "" if figures.bandwidth_share is None else f"{figures.bandwidth_share:.0%}",
                _percent(spread(decode_ms)),
                _gain(statistics.median(gains) if gains else None),
                _percent(spread(gains)) if engine is report.candidate else "",
            )
    return table


def _latency_table(report: GainsReport) -> Table:
    numbers = ("TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms", "output tok/s", "prefill tok/s", "gain")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("batch", "model"):
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for batch in report.workload.batch_sizes:
        for engine in (report.baseline, report.candidate):
            gain = statistics.median(report.prefill_gains(batch)) if engine is report.candidate else None
            table.add_row(
                str(batch), escape(engine.info["name"]), *_latencies(engine, engine.batches[batch]), _gain(gain)
            )
    return table


def _latencies(engine: EngineFigures, figures: BatchFigures) -> list[str]:
    values = figures.metrics
    names = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "median_tpot_ms", "output_throughput")
    cells = [f"{values[name]:.1f}" for name in names]
    return [*cells, f"{statistics.median(figures.prefill):.0f}"]


def _mebi(nbytes: float) -> str:
    return f"{nbytes / _MEBI:,.1f} MiB"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _gain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
