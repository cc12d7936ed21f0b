"""Tables and verdicts of `benchmarks/decode.py`, from what it measured or from the JSON files that it wrote.

python benchmarks/decode_report.py A.json B.json    # one Markdown table of all pieces, the bars, the doubts
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from decode_engines import BASELINE, COMMON, FP8, FP8_INT8, MXFP4, MXFP4_INT8
from timing import ratio, spread

#: A piece of a run: what was measured in the same rounds, as JSON.
Piece = dict[str, Any]
#: Shares of the machine's time beyond which a run is not to be quoted, and the spread beyond which a figure is not.
MOST_OTHERS, MOST_STOLEN, MOST_SPREAD = 0.05, 0.02, 0.15
#: Smallest speedups: batch, engine, the engine that it is compared with, "step" or "prompt", bar with AMX, bar without.
BARS: tuple[tuple[int, str, str, str, float, float], ...] = (
    (1, FP8, BASELINE, "step", 2.8, 2.8),
    (1, MXFP4, BASELINE, "step", 4.5, 4.5),
    (1, FP8, "llama.cpp Q8_0", "step", 1.3, 1.25),
    (1, MXFP4, "llama.cpp Q4_0", "step", 1.3, 1.25),
    (1, "minifloat MXFP4 + FP8 head", "llama.cpp Q4_0", "step", 1.3, 1.25),
    (1, FP8, "OpenVINO INT8", "step", 1.0, 1.0),
    (1, MXFP4, "OpenVINO INT4", "step", 1.0, 1.0),
    (1, "minifloat FP8 block", "vLLM FP8 block", "step", 1.5, 1.5),
    (8, FP8, "OpenVINO INT8", "step", 1.0, 0.95),
    (8, MXFP4, "OpenVINO INT4", "step", 1.0, 0.85),
    (8, "minifloat FP8 block", "vLLM FP8 block", "step", 1.5, 1.5),
    (1, FP8, BASELINE, "prompt", 1.1, 1.1),
    (1, MXFP4, BASELINE, "prompt", 1.1, 1.1),
    (1, FP8, "OpenVINO BF16", "prompt", 1.0, 1.0),
    (1, MXFP4, "OpenVINO BF16", "prompt", 1.0, 1.0),
    (1, FP8_INT8, "OpenVINO INT8", "prompt", 0.9, 0.9),
    (1, MXFP4_INT8, "OpenVINO INT8", "prompt", 0.9, 0.9),
)
#: Smallest shares of the read bandwidth in a step of batch 1.
READ_BARS = {FP8: 0.75, MXFP4: 0.65}


def samples(piece: Piece, engine: str, batch: int, what: str) -> list[float] | None:
    """Return an engine's seconds of each round, of a "step" or of the "prompt"; None if it was not measured."""
    found = (row[f"{what}s"] for row in piece["rows"] if (row["engine"], row["batch"]) == (engine, batch))
    values: list[float] | None = next(found, None)
    return values


def speedup(piece: Piece, mine: str, other: str, batch: int, what: str) -> float | None:
    """Return how many times as fast `mine` is as `other`, the median over rounds; None if one was not measured."""
    ours, theirs = (samples(piece, name, batch, what) for name in (mine, other))
    return ratio(theirs, ours) if ours and theirs else None


def read_share(piece: Piece, row: dict[str, Any]) -> float | None:
    """Return the bytes of a step over its time and the read bandwidth of its round; None if the bytes are unknown."""
    if not row["bytes"]:
        return None
    shares = [row["bytes"] / b / s for b, s in zip(piece["bandwidths"], row["steps"], strict=True)]
    return float(statistics.median(shares))


def doubts(piece: Piece) -> list[str]:
    """Return why a run, or which of its figures, are not to be quoted."""
    found = []
    use = piece["use"]
    if use is None:
        found.append("the run: the system does not say how busy it is")
    else:
        if use["others"] > MOST_OTHERS:
            found.append(f"the run: other processes used {use['others']:.0%} of the machine")
        if use["stolen"] > MOST_STOLEN:
            found.append(f"the run: the hypervisor took {use['stolen']:.0%} of the machine's time")
    if len(piece["bandwidths"]) < 3:
        found.append(f"the run: {len(piece['bandwidths'])} rounds are too few")
    for row in piece["rows"]:
        for what in ("step", "prompt"):
            wide = spread(row[f"{what}s"])
            if wide > MOST_SPREAD and (what == "step" or row["batch"] == 1):
                found.append(f"{row['engine']}, batch {row['batch']}, {what}: spread {wide:.0%}")
    return found


def print_table(piece: Piece, batch: int) -> None:
    """Print one batch size of a piece."""
    bandwidth = statistics.median(piece["bandwidths"])
    click.echo(
        f"\nbatch {batch}: prompts of {piece['prompt_tokens'] // batch}, outputs of {piece['output_len']}, medians of "
        f"{len(piece['bandwidths'])} rounds; FP8, MXFP4: how many times as fast they are\n"
        f"{'engine':<27} {'ms/step':>8} {'spread':>6} {'FP8':>6} {'MXFP4':>6} {'tokens/s':>8} {'MB read':>8} "
        f"{'bound ms':>8} {'read':>5} {'prompt ms':>9} {'spread':>6} {'FP8':>6} {'MXFP4':>6} {'RSS MB':>7} {'peak':>6}"
    )
    for row in piece["rows"]:
        if row["batch"] != batch:
            continue
        step, name = statistics.median(row["steps"]), row["engine"]
        cells = [f"{name:<27}"]
        for what in ("step", "prompt"):
            cells.append(f"{1e3 * statistics.median(row[f'{what}s']):>{8 if what == 'step' else 9}.1f}")
            cells.append(f"{spread(row[f'{what}s']):>6.0%}")
            cells += [_times(speedup(piece, mine, name, batch, what)) for mine in COMMON]
            if what == "step":
                share, nbytes = read_share(piece, row), row["bytes"]
                cells.append(f"{batch / step:>8.1f}")
                cells.append(
                    f"{nbytes / 1e6:>8.0f} {1e3 * nbytes / bandwidth:>8.1f} {share:>5.0%}" if share else " " * 23
                )
        cells.append(f"{row['rss'] / 1e6:>7.0f} {row['peak_rss'] / 1e6:>6.0f}")
        click.echo(" ".join(cells))


def verdicts(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield a line per bar."""
    amx = pieces[0]["machine"]["instruction_set"] == "amx"
    batches = {row["batch"] for piece in pieces for row in piece["rows"]}
    for batch, mine, other, what, with_amx, without in BARS:
        if batch not in batches:
            continue
        bar = with_amx if amx else without
        text = f"batch {batch}, {what}: {mine} over {other}"
        found = [found for piece in pieces if (found := speedup(piece, mine, other, batch, what))]
        if not found:
            yield f"{text:<76} {bar:.2f}x  not measured"
        for value in found:
            yield f"{text:<76} {bar:.2f}x  {value:.2f}x  {'pass' if value >= bar else 'SHORT'}"
    for piece in pieces:
        for row in piece["rows"]:
            bar = READ_BARS.get(row["engine"], 0.0)
            share = read_share(piece, row) if bar and row["batch"] == 1 else None
            if share:
                text = f"batch 1, {piece['piece']}: {row['engine']}, share of the read bandwidth"
                yield f"{text:<76}  {bar:.0%}    {share:.0%}  {'pass' if share >= bar else 'SHORT'}"


def markdown(pieces: Sequence[Piece]) -> Iterator[str]:
    """Yield one table of all pieces: times with the speedups of FP8 and MXFP4 over them, and memory."""
    batches = sorted({row["batch"] for piece in pieces for row in piece["rows"]})
    heads = [
        *(f"batch {batch}: ms per step" for batch in batches),
        f"{pieces[0]['prompt_tokens']} tokens of prompt, ms",
    ]
    yield "| engine | " + " | ".join(heads) + " | RSS, MB (peak) |"
    yield "|---" * (len(heads) + 2) + "|"
    shown = set()
    for piece in pieces:
        for name in dict.fromkeys(row["engine"] for row in piece["rows"]):
            if name in shown:
                continue
            shown.add(name)
            rows = {row["batch"]: row for row in piece["rows"] if row["engine"] == name}
            cells = [_cell(piece, rows.get(batch), "step") for batch in batches]
            cells.append(_cell(piece, rows.get(min(rows)), "prompt"))
            last = rows[max(rows)]
            yield f"| {name} | {' | '.join(cells)} | {last['rss'] / 1e6:.0f} ({last['peak_rss'] / 1e6:.0f}) |"


def _cell(piece: Piece, row: dict[str, Any] | None, what: str) -> str:
    """Return "time (times as fast as FP8 is, MXFP4 is)"; a wide spread is named, a speedup below 1 is bold."""
    if row is None:
        return ""
    values = row[f"{what}s"]
    text = f"{1e3 * statistics.median(values):.{1 if what == 'step' else 0}f}"
    if spread(values) > MOST_SPREAD:
        text += f" ±{spread(values):.0%}"
    if row["engine"].startswith("minifloat"):
        return text
    ratios = (speedup(piece, mine, row["engine"], row["batch"], what) for mine in COMMON)
    words = ["-" if r is None else f"**{r:.2f}x**" if r < 1 else f"{r:.2f}x" for r in ratios]
    return f"{text} ({', '.join(words)})"


def _times(value: float | None) -> str:
    return " " * 6 if value is None else f"{value:>5.2f}x"


def print_doubts(pieces: Sequence[Piece]) -> None:
    """Print what is not to be quoted, of each piece."""
    for piece in pieces:
        found = doubts(piece)
        click.echo(f"\n{piece['piece']}: " + ("not to be quoted:" if found else "the machine was quiet"))
        for doubt in found:
            click.echo(f"  {doubt}")


@click.command(help=__doc__.split("\n")[0])
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
def main(files: tuple[Path, ...]) -> None:
    """Print all pieces of the files together."""
    pieces = [piece for file in files for piece in json.loads(file.read_text())]
    for line in (*markdown(pieces), "", *verdicts(pieces)):
        click.echo(line)
    print_doubts(pieces)


if __name__ == "__main__":
    main()
