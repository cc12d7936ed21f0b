"""Draw KL divergence and decode speed of every scheme: the picture of the README.

    python benchmarks/real.py quality MODEL RESULTS.json ...                   # see there
    python benchmarks/picture.py quality FIGURES.json RESULTS.json --model SmolLM2-135M --text TEXT
    python benchmarks/picture.py speed FIGURES.json --models-dir DIR           # about half a minute a scheme
    python benchmarks/picture.py draw FIGURES.json docs/images/schemes.svg --machine TEXT

`quality` takes what `benchmarks/real.py` measured on one text, codes rounded to nearest and chosen with text that the
model writes itself. `speed` measures a decode step of one sequence on a random model of 1.1 billion weights, whose
limit is the memory's bandwidth, beside the same model in BF16, in turn. Every scheme is a piece of its own, which adds
its figures to the file. Each step keeps the command and the date beside its figures.
"""

from __future__ import annotations

import datetime
import io
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import click
import matplotlib
from matplotlib.figure import Figure

from minifloat import SCHEMES
from minifloat.evaluate.bench.figures import CpuTime, MachineUse, spread
from minifloat.evaluate.bench.gains import bench_checkpoint
from minifloat.evaluate.bench.shapes import make_pair
from minifloat.evaluate.bench.workload import Workload
from minifloat.numerics.scheme import get_scheme

SHAPE = "tinyllama-1.1b"
BUSY = 0.05  #: share of the machine's time used by others above which a time is not to be quoted


@click.group()
def main() -> None:
    """Measure and draw the schemes."""


@main.command()
@click.argument("figures", type=click.Path(path_type=Path))
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--model", required=True, help="Name of the model, for the caption.")
@click.option("--text", required=True, help="The text whose figures are drawn.")
def quality(figures: Path, results: Path, model: str, text: str) -> None:
    """Take the KL divergence of every scheme from RESULTS of `benchmarks/real.py` into FIGURES."""
    rows, tokens = {}, 0
    for cell, known in _load(results)["cells"].items():
        for judged in known.get("compare", {}).get("texts", ()):
            if judged["text"] == text:
                scheme, choice = known["quantize"]["scheme"], cell.rpartition(" ")[2]
                name = scheme if choice == "nearest" else f"{scheme} {choice}"
                kl, tokens = judged["kl_mean"], judged["tokens"]
                rows[name] = {"kl": kl["value"], "low": kl["low"], "high": kl["high"]}
    _store(figures, "quality", {"model": model, "text": text, "tokens": tokens, "rows": rows})


@main.command()
@click.argument("figures", type=click.Path(path_type=Path))
@click.option("--models-dir", type=click.Path(path_type=Path), required=True, help="Where the random models are kept.")
@click.option(
    "--scheme", "schemes", multiple=True, help="Only these; repeatable.  [default: all without static scales]"
)
@click.option("--shape", default=SHAPE, show_default=True)
@click.option("--rounds", default=3, show_default=True)
def speed(figures: Path, models_dir: Path, schemes: tuple[str, ...], shape: str, rounds: int) -> None:
    """Measure the decode step of schemes beside BF16 and add the ratios to FIGURES."""
    for scheme in schemes or [name for name in SCHEMES if not _needs_scales(name)]:
        baseline, candidate = make_pair(models_dir, shape, scheme)
        before = CpuTime.now(())
        report = bench_checkpoint(candidate, baseline, Workload(32, 40, (1,), rounds))
        use = MachineUse.between(before, CpuTime.now(()))
        gains = report.decode_gains(1)
        step = statistics.median(report.candidate.batches[1].decode_ms)
        row = {"gain": statistics.median(gains), "spread": spread(gains), "rounds": gains, "step_ms": step}
        row |= {"bf16_ms": statistics.median(report.baseline.batches[1].decode_ms)}
        row |= {"stolen": None if use is None else use.stolen}
        click.echo(f"{scheme}: {row['gain']:.2f}x, spread {row['spread']:.0%}, {step:.1f} ms, stolen {row['stolen']}")
        if use is not None and use.stolen > BUSY:
            click.echo("  not to be quoted: the hypervisor gave this machine's time to others")
        rows = _load(figures).get("speed", {}).get("rows", {})
        machine = report.machine | {"read_bandwidth": statistics.median(report.bandwidths)}
        _store(figures, "speed", {"model": shape, "machine": machine, "rows": rows | {scheme: row}})


@main.command()
@click.argument("figures", type=click.Path(exists=True, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--machine", required=True, help="The processor, for the caption.")
def draw(figures: Path, out: Path, machine: str) -> None:
    """Draw FIGURES into the SVG file OUT."""
    data = _load(figures)
    out.write_text(picture(data, machine), encoding="utf-8")
    click.echo(f"Drawn to {out}")


def picture(data: dict[str, Any], processor: str) -> str:
    """Return the picture of the figures, the best KL divergence first."""
    quality_rows, speeds = data["quality"]["rows"], data["speed"]["rows"]
    rows = []
    for name, kl in sorted(quality_rows.items(), key=lambda item: item[1]["kl"]):
        scheme, _, chosen = name.partition(" ")
        label = f"{scheme} --data {chosen}" if chosen else scheme
        gain = speeds.get(scheme, {}).get("gain")  # the codes do not change the speed
        rows.append((label, kl, gain))
    speed_record, kl_record = data["speed"], data["quality"]
    widest = max(row["spread"] for row in speeds.values())
    rounds = min(len(row["rounds"]) for row in speeds.values())
    notes = (
        f"KL: {kl_record['model']}, {kl_record['tokens']:,} tokens of {kl_record['text']}, 95% intervals, "
        f"inputs quantized as the scheme declares ({kl_record['date']}).",
        f"Speed: {speed_record['model']} shape, one sequence, median of {rounds} rounds beside BF16, which spread by "
        f"up to {widest:.0%}; {processor} ({speed_record['date']}).",
        "Made by benchmarks/picture.py, whose commands and figures are in the JSON file beside this picture.",
    )
    return _drawn(rows, notes)


def _drawn(rows: list[tuple[str, dict[str, float], float | None]], notes: tuple[str, ...]) -> str:
    """Return the SVG: KL divergence on the left, speed on the right, a row for each scheme, and the notes below."""
    places = range(len(rows))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "schemes", "font.size": 9.0}):
        figure = Figure(figsize=(8.6, 0.28 * len(rows) + 1.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for place, (_, kl, gain) in enumerate(rows):
            left.plot([kl["low"], kl["high"]], [place, place], color="#1f6fb4", marker="|")
            left.plot([kl["kl"]], [place], color="#1f6fb4", marker="o", markersize=4)
            right.barh(place, gain or 0.0, color="#1f6fb4", height=0.6)
            right.annotate("not measured" if gain is None else f"{gain:.2f}x", (gain or 0.0, place), va="center")
        left.set(xscale="log", xlabel="KL divergence from BF16, nats per token (left is better)")
        left.set_yticks(places, [f"{label}   {kl['kl']:#.2g}" for label, kl, _ in rows])
        left.invert_yaxis()
        right.axvline(1.0, color="black", linestyle="--", linewidth=0.9)
        right.set_xlabel("decode speed, BF16 = 1 (right is better)")
        figure.supxlabel("\n".join(notes), fontsize=7, x=0.01, ha="left")
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _needs_scales(name: str) -> bool:
    activation = get_scheme(name).activation
    return activation is not None and activation.needs_calibration


def _load(figures: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(figures.read_text(encoding="utf-8")) if figures.exists() else {}
    return data


def _store(figures: Path, key: str, record: dict[str, Any]) -> None:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["python", *sys.argv])
    data = _load(figures) | {key: record | {"date": date, "command": command}}
    figures.parent.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
