"""Take a real model through every scheme, without and with data, and through budgets of bits: tables for the documents.

    python benchmarks/real.py quality MODEL RESULTS.json --folder DIR --data A.txt --data B.txt --data C.txt
    python benchmarks/real.py curve MODEL RESULTS.json --folder DIR --data A.txt --data B.txt --data C.txt
    python benchmarks/real.py speed MODEL RESULTS.json --folder DIR
    python benchmarks/real.py table RESULTS.json

Every step is a command of minifloat in a process of its own, as a user would run it, and is stored under RESULTS: a
second call goes on with what is missing. ``quality`` quantizes (nearest, then `--data self`; schemes with static scales
take their calibration from the same text) and compares on texts that no calibration has seen, 6,000 tokens of each.
``curve`` does the same with `--target-bits`, and says which is the smallest output that passes. ``speed`` decodes at
batch 1 and 8 beside the original, and wants a quiet machine. Outputs stay in the folder.
"""

from __future__ import annotations

import datetime
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from minifloat.numerics.scheme import SCHEMES, get_scheme

DEFAULT = "(default)"  # no --scheme: what `quantize MODEL OUT` chooses
CHOICES = ("nearest", "self")
BUDGETS = (4.25, 4.5, 5, 5.5, 6, 6.5, 7, 8.25)
BATCHES = (1, 8)


def run(*words: str) -> tuple[dict[str, Any], float]:
    """Run a command of minifloat, and return what it prints with `--json` and the seconds that it took."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "minifloat", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode not in (0, 1, 2, 3):
        raise click.ClickException(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
    if done.returncode == 2:  # 1, 3: the verdict of `compare` is "failed", "not enough data"
        return {"refused": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"}, seconds
    value: dict[str, Any] = json.loads(done.stdout)
    return value, seconds


def recipe(scheme: str, choice: str) -> list[str]:
    """Return the options that write a model in a scheme with codes of one choice."""
    options = [] if scheme == DEFAULT else ["--scheme", scheme]
    if choice == "self":
        return [*options, "--data", "self"]
    activation = None if scheme == DEFAULT else get_scheme(scheme).activation
    if activation is not None and activation.needs_calibration:
        options += ["--calibration", "self", "--calibration-samples", "64"]
    return options


def quantize(model: Path, out: Path, options: Sequence[str]) -> dict[str, Any]:
    """Write the model with some options, and return the bytes, bits, seconds and what was said, or the refusal."""
    words = ["quantize", str(model), str(out), "--overwrite", *options]
    found, seconds = run(*words)
    record: dict[str, Any] = {"command": shlex.join(["minifloat", *words[:1], "MODEL", "OUT", *words[4:]])}
    if "refused" in found:
        return record | found
    quantized = [tensor for tensor in found["tensors"] if tensor["action"] == "quantized"]
    elements = sum(tensor["stats"]["elements"] for tensor in quantized)
    bits = 8 * sum(tensor["output_bytes"] for tensor in quantized) / elements
    if (budget := found.get("rounding", {}).get("budget")) is not None:
        bits = budget["bits_per_weight"]
    return record | {
        "seconds": seconds,
        "bytes": found["bytes"],
        "bits": bits,
        "scheme": found["recipe"]["scheme"],
        "notes": found["notes"],
    }


def compare(model: Path, out: Path, texts: tuple[str, ...], max_tokens: int) -> dict[str, Any]:
    """Compare an output with the model on texts, and return the figures of each text and the verdict."""
    data = [word for text in texts for word in ("--data", text)]
    found, seconds = run(
        "compare", str(model), str(out), *data, "--max-tokens", str(max_tokens), "--prompts", "0", "--no-report"
    )
    if "refused" in found:
        return found
    [candidate] = found["candidates"]
    rows = [
        {
            "text": text["name"],
            "tokens": text["tokens"],
            **{
                name: {key: text[name][key] for key in ("value", "low", "high")}
                for name in ("perplexity_ratio", "kl_mean", "same_top1")
            },
        }
        for text in candidate["texts"]
    ]
    return {"seconds": seconds, "texts": rows, "verdict": candidate["verdict"]["outcome"], "machine": found["machine"]}


def speed(model: Path, out: Path) -> dict[str, Any]:
    """Decode with an output and with the model in turn, and return tokens per second and the gain by batch."""
    sizes = ",".join(map(str, BATCHES))
    found, _ = run(
        "bench", str(out), "--baseline", str(model), "--batch-sizes", sizes, "--output-len", "64", "--no-report"
    )
    if "refused" in found:
        return found
    batches = {
        str(size): {
            "tokens_per_second": found["candidate"]["batches"][str(size)]["decode_throughput"],
            "original_tokens_per_second": found["baseline"]["batches"][str(size)]["decode_throughput"],
            "gain": found["gains"][f"decode_batch_{size}"],
        }
        for size in BATCHES
    }
    return {"batches": batches, "doubts": found["doubts"], "machine": found["machine"]}


def stamp() -> dict[str, str]:
    """Return the date and the commit of a measurement."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit.strip()}


def load(results: Path) -> dict[str, Any]:
    """Return the stored measurements."""
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {"cells": {}}
    return found


def store(results: Path, cell: str, key: str, record: dict[str, Any]) -> None:
    """Add a measurement to the stored ones."""
    found = load(results)
    found["cells"].setdefault(cell, {})[key] = record | stamp()
    results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


@click.group()
def main() -> None:
    """Measure a real model in every scheme."""


schemes_option = click.option("--scheme", "schemes", multiple=True, default=(DEFAULT, *SCHEMES), help="Repeatable.")
texts_option = click.option("--data", "texts", multiple=True, required=True, help="Text to judge on.")
max_tokens_option = click.option("--max-tokens", default=6000, show_default=True, help="Tokens of each text.")
folder_option = click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where outputs stay.")


@main.command("quality")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@texts_option
@max_tokens_option
@click.option("--choice", "choices", multiple=True, default=CHOICES, type=click.Choice(CHOICES))
@schemes_option
@folder_option
def measure_quality(
    model: Path,
    results: Path,
    texts: tuple[str, ...],
    max_tokens: int,
    choices: tuple[str, ...],
    schemes: tuple[str, ...],
    folder: Path,
) -> None:
    """Quantize and compare what RESULTS lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    for choice in choices:
        for scheme in schemes:
            cell, out = f"{scheme} {choice}", folder / f"{scheme.strip('()')}-{choice}"
            measure(model, results, cell, out, recipe(scheme, choice), texts, max_tokens)


@main.command("curve")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@texts_option
@max_tokens_option
@click.option("--bits", "budgets", multiple=True, type=float, default=BUDGETS, help="Bits per weight. Repeatable.")
@folder_option
def measure_curve(
    model: Path, results: Path, texts: tuple[str, ...], max_tokens: int, budgets: tuple[float, ...], folder: Path
) -> None:
    """Quantize and compare within bits per weight what RESULTS lacks, and say which output that passes is smallest."""
    folder.mkdir(parents=True, exist_ok=True)
    passed = []
    for budget in budgets:
        options = ["--data", "self", "--target-bits", f"{budget:g}"]
        known = measure(
            model, results, f"{budget:g}-bits self", folder / f"{budget:g}-bits", options, texts, max_tokens
        )
        if known.get("compare", {}).get("verdict") == "passed":
            passed.append(known["quantize"]["bits"])
    click.echo(f"smallest that passes: {min(passed):.3f} bits per weight" if passed else "none passes")


def measure(
    model: Path, results: Path, cell: str, out: Path, options: list[str], texts: tuple[str, ...], max_tokens: int
) -> dict[str, Any]:
    """Quantize and compare, as far as the results lack it, and return what they have of this cell."""
    known: dict[str, Any] = load(results)["cells"].get(cell, {})
    if "quantize" not in known or not (out.exists() or "refused" in known["quantize"]):
        store(results, cell, "quantize", quantize(model, out, options))
        known = load(results)["cells"][cell]
    if "refused" not in known["quantize"] and "compare" not in known:
        store(results, cell, "compare", compare(model, out, texts, max_tokens))
        known = load(results)["cells"][cell]
    click.echo(_row(cell, known))
    return known


@main.command("speed")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("results", type=click.Path(path_type=Path))
@schemes_option
@folder_option
def measure_speed(model: Path, results: Path, schemes: tuple[str, ...], folder: Path) -> None:
    """Decode with the outputs: codes do not change the speed, so one output of each scheme serves."""
    for scheme in schemes:
        for choice in CHOICES:
            out, cell = folder / f"{scheme.strip('()')}-{choice}", f"{scheme} {choice}"
            if out.exists() and (scheme == DEFAULT or choice == CHOICES[0]):
                store(results, cell, "speed", speed(model, out))
                click.echo(_row(cell, load(results)["cells"][cell]))


@main.command("table")
@click.argument("results", type=click.Path(exists=True, path_type=Path))
@click.option("--full", required=True, help="The text whose figures have cells of their own.")
def print_table(results: Path, full: str) -> None:
    """Print the measurements as a Markdown table."""
    cells = load(results)["cells"]
    texts = next(c["compare"]["texts"] for c in cells.values() if "texts" in c.get("compare", {}))
    others = [f"{text['text']}: change, KL, top-1" for text in texts if text["text"] != full]
    heads = ["scheme", "codes", "size", f"{full}: change", "KL", "top-1", *others, "verdict", "quantize", "batch 1, 8"]
    click.echo(f"| {' | '.join(heads)} |\n|" + "---|" * len(heads))
    for cell, known in cells.items():
        click.echo(_row(cell, known, full))


def _row(cell: str, known: dict[str, Any], full: str | None = None) -> str:
    scheme, _, choice = cell.partition(" ")
    made = known["quantize"]
    if "refused" in made:
        return f"| {scheme} | {choice} | refused: {made['refused']} |"
    name = {DEFAULT: f"{made['scheme']} (no --scheme)"}.get(scheme, scheme)
    if scheme.endswith("-bits"):
        name = f"{scheme.removesuffix('-bits')}: {made['bits']:.3f} bits"
    size = made["bytes"]
    row = [name, choice, f"{size['output'] / 1e6:.0f} MB ({size['source'] / size['output']:.2f}x)"]
    judged = known.get("compare", {})
    texts = judged.get("texts", [])
    row += [value for text in texts if text["text"] == full for value in _in_full(text)]
    row += [_in_short(text) for text in texts if text["text"] != full]
    row += [judged.get("verdict", judged.get("refused", "")).replace("_", " "), f"{made['seconds']:.0f} s"]
    decoded = known.get("speed", {}).get("batches", {})
    row.append(", ".join(f"{decoded[size]['gain']:.2f}x" for size in map(str, BATCHES) if size in decoded))
    return "| " + " | ".join(row) + " |"


def _in_full(text: dict[str, Any]) -> list[str]:
    ratio, kl, top1 = text["perplexity_ratio"], text["kl_mean"], text["same_top1"]
    return [
        f"{ratio['value'] - 1:+.2%} [{ratio['low'] - 1:+.2%}, {ratio['high'] - 1:+.2%}]",
        f"{kl['value']:.4f} [{kl['low']:.4f}, {kl['high']:.4f}]",
        f"{top1['value']:.1%}",
    ]


def _in_short(text: dict[str, Any]) -> str:
    ratio, kl, top1 = (text[name]["value"] for name in ("perplexity_ratio", "kl_mean", "same_top1"))
    return f"{ratio - 1:+.2%}, {kl:.4f}, {top1:.1%}"


if __name__ == "__main__":
    main()
