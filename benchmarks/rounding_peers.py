"""Accuracy of calibrated rounding beside llm-compressor's GPTQ: the same format, the same tokens, the same judge.

    python benchmarks/rounding_peers.py MODEL --python LLMC/bin/python --judge alice.txt --judge wikitext.txt \
        --text real=stories.txt#weight=2,shakespeare.txt,darwin.txt --text own=self

LLMC is an environment with llm-compressor (``tests/interop/requirements-llmcompressor.txt``). Each ``--text`` gives a
name and sources of text. Both tools get the same 65,536 tokens of it, in sequences of 256; minifloat also gets its
held-out tenth. All results are judged in one pass of the original model, as `minifloat compare` does. KL is the mean
over tokens in nats with its 95% interval. The last column divides by the KL of llm-compressor's GPTQ with the first
text and the scheme's own observer, and averages over the texts to judge on.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from minifloat.calibration.calibrate import load_texts
from minifloat.calibration.own_text import own_text_path
from minifloat.checkpoint import Checkpoint
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.run import compare_models
from minifloat.model.layouts.inspection import inspect_checkpoint
from minifloat.quantize.estimate import DEFAULT_TEXT
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

#: Our scheme -> llm-compressor's name of the same format of weights.
THEIRS = {"mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}


def write_tokens(model: Path, sources: list[str], folder: Path, out: Path) -> Path:
    """Write the sequences that `quantize --data` takes statistics from, as JSON; return the path."""
    with Checkpoint.open(model) as checkpoint:
        own_text_file = own_text_path(model, folder / out.stem, DEFAULT_TEXT.seq_len)
        texts = load_texts(checkpoint, sources, DEFAULT_TEXT, own_text_file=own_text_file)
    kept, _ = texts.held_out(DEFAULT_TEXT.held_out)
    print(f"{out.stem}: {len(kept.sequences)} sequences, {kept.tokens:,} tokens", flush=True)
    out.write_text(json.dumps([list(sequence) for sequence in kept.sequences]))
    return out


def theirs(python: str, model: Path, out: Path, *options: str) -> float:
    """Quantize with llm-compressor, print its versions, and return the seconds that it took."""
    script = Path(__file__).with_name("rounding_llmcompressor.py")
    log = out.with_suffix(".log")
    with log.open("w") as file:
        run = subprocess.run(
            [python, str(script), str(model), str(out), *options], stdout=subprocess.PIPE, stderr=file, text=True
        )
    if run.returncode:
        raise click.ClickException(f"llm-compressor failed: {log.read_text()[-2000:]}")
    answer = json.loads(run.stdout.splitlines()[-1])
    print(f"{out.name}: {answer['versions']}", flush=True)
    return float(answer["seconds"])


def ours(model: Path, out: Path, scheme: str, method: str, sources: list[str] | None) -> float:
    """Quantize with minifloat and return the seconds that it took."""
    started = time.perf_counter()
    quantize_checkpoint(model, out, scheme, QuantizeOptions(method=method), data=sources)
    return time.perf_counter() - started


def candidates(
    model: Path, scheme: str, python: str, texts: dict[str, list[str]], observers: tuple[str, ...], folder: Path
) -> Iterator[tuple[str, Path, float]]:
    """Make all checkpoints; yield the label, the folder and the seconds of each."""
    tokens = {name: write_tokens(model, sources, folder, folder / f"{name}.json") for name, sources in texts.items()}
    common = ("--scheme", THEIRS[scheme], "--tokens", str(next(iter(tokens.values()))))
    out = folder / "llm-compressor-nearest"
    yield "llm-compressor nearest", out, theirs(python, model, out, *common, "--method", "nearest")
    out = folder / "minifloat-nearest"
    yield "minifloat nearest", out, ours(model, out, scheme, "nearest", None)
    for name, file in tokens.items():
        for observer in ("", *observers):
            out = folder / f"llm-compressor-gptq-{name}-{observer or 'default'}"
            options = ["--scheme", THEIRS[scheme], "--tokens", str(file)]
            options += ["--observer", observer] if observer else []
            label = f"llm-compressor gptq{f' ({observer})' if observer else ''}, {name}"
            yield label, out, theirs(python, model, out, *options)
        for method in ("gptq", "match"):
            out = folder / f"minifloat-{method}-{name}"
            yield f"minifloat {method}, {name}", out, ours(model, out, scheme, method, texts[name])


@click.command()
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--python", required=True, help="The Python of an environment with llm-compressor.")
@click.option("--scheme", type=click.Choice(sorted(THEIRS)), default="mxfp4", show_default=True)
@click.option("--text", "named", multiple=True, default=("own=self",), help="NAME=SOURCE,SOURCE,... to calibrate with.")
@click.option("--observer", "observers", multiple=True, help="GPTQ of llm-compressor with this observer, too.")
@click.option("--judge", "judges", multiple=True, required=True, help="Text to judge on.")
@click.option("--max-tokens", default=12000, show_default=True, help="Tokens of each text to judge on.")
@click.option("--work-dir", type=click.Path(path_type=Path), help="Keep the checkpoints in this folder.")
def main(
    model: Path,
    python: str,
    scheme: str,
    named: tuple[str, ...],
    observers: tuple[str, ...],
    judges: tuple[str, ...],
    max_tokens: int,
    work_dir: Path | None,
) -> None:
    """Measure MODEL."""
    texts = {name: sources.split(",") for name, _, sources in (text.partition("=") for text in named)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = work_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        made = list(candidates(model, scheme, python, texts, observers, folder))
        for label, out, _ in made:
            formats = sorted({f"{row.format}" for row in inspect_checkpoint(out).rows if row.kind == "quantized"})
            print(f"{label}: {formats}", flush=True)
        options = CompareOptions(max_tokens=max_tokens, prompts=0, lm_head="bf16")
        result = compare_models(model, [out for _, out, _ in made], list(judges), options)
    kls = {label: [text.kl_mean for text in c.texts] for (label, *_), c in zip(made, result.candidates, strict=True)}
    base = kls[f"llm-compressor gptq, {next(iter(texts))}"]
    print(f"| {model.name}, {scheme} | s | {' | '.join(Path(text).stem for text in judges)} | ratio |")
    print("|---" * (3 + len(judges)) + "|")
    for label, _, seconds in made:
        cells = " | ".join(f"{kl.value:.4f} [{kl.low:.4f}, {kl.high:.4f}]" for kl in kls[label])
        ratio = sum(kl.value / one.value for kl, one in zip(kls[label], base, strict=True)) / len(base)
        print(f"| {label} | {seconds:.0f} | {cells} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
