"""Compare GGUF files in llama.cpp: those that llama.cpp's quantizer makes of a model, and those of our codes; a table.

    python benchmarks/gguf_files.py MODEL OUT ... --python L/bin/python --data W.txt --folder DIR [--type Q8_0 ...]

L is an environment with llama-cpp-python (tests/interop/requirements-llama-cpp.txt). Each OUT of `quantize` is
converted twice: with the output layer as it is, and in Q8_0, as llama.cpp's files have it. KL is the divergence from
MODEL's own BF16 file in llama.cpp, in nats per token, with its 95% interval over windows of 256 tokens; "here" is that
of OUT in our engine, with inputs in BF16. Steps are those of one sequence, medians, on two threads. Files stay in DIR.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.evaluate.compare.intervals import mean_interval
from minifloat.evaluate.compare.series import Stratum
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize.convert import convert_checkpoint
from minifloat.quantize.options import ConvertOptions, GgufOptions

SCRIPT = Path(__file__).parents[1] / "tests" / "interop" / "in_llama_cpp.py"
TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q4_0")
WINDOW, STEPS, THREADS = 256, 64, 2


def ask(python: str, folder: Path, *requests: dict[str, Any]) -> list[Any]:
    """Return the answers of llama.cpp to requests."""
    asked, answers = folder / "requests.json", folder / "answers.jsonl"
    asked.write_text(json.dumps(requests))
    answers.unlink(missing_ok=True)
    subprocess.run([python, str(SCRIPT), str(asked), str(answers)], check=True)
    return [json.loads(line) for line in answers.read_text().splitlines()]


def interval(means: list[float]) -> str:
    sums = np.array(means)
    found = mean_interval(sums, np.ones(len(sums)), [Stratum(len(sums), adjacent=True)])
    return f"{found.value:.4f} [{found.low:.4f}, {found.high:.4f}]"


def here(model: Path, out: Path, windows: list[list[int]]) -> tuple[str, str]:
    """Return the divergence of a checkpoint in our engine, and the milliseconds of a step of one sequence."""
    options = EngineOptions(activations="bf16", lm_head="bf16", max_num_seqs=1)
    original, engine = Engine(model, options), Engine(out, options)
    means = []
    for window in windows:
        p, q = (torch.cat(list(each.logits(window))).double().log_softmax(-1) for each in (original, engine))
        means.append(float((p.exp() * (p - q)).sum(-1).mean()))
    params = SamplingParams(max_tokens=STEPS + 1, temperature=0.0, ignore_eos=True)
    times = [time.perf_counter() for _ in engine.generate([windows[0][:1]], params, stream=True)]
    return interval(means), f"{1e3 * statistics.median(np.diff(times)):.2f}"


@click.command(help=__doc__.split("\n", 1)[0])
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("outs", nargs=-1, type=click.Path(exists=True, path_type=Path))
@click.option("--python", required=True, help="Python of an environment with llama-cpp-python.")
@click.option("--data", type=click.Path(exists=True, path_type=Path), required=True, help="Text to judge on.")
@click.option(
    "--type", "types", multiple=True, default=TYPES, show_default=True, help="Types of llama.cpp's quantizer."
)
@click.option("--max-tokens", default=6144, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="Where files stay.")
def main(
    model: Path, outs: tuple[Path, ...], python: str, data: Path, types: tuple[str, ...], max_tokens: int, folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokens = load_tokenizer(model).encode(data.read_text(encoding="utf-8")[: 16 * max_tokens])[:max_tokens]
    windows = [tokens[at : at + WINDOW] for at in range(0, len(tokens) - WINDOW + 1, WINDOW)]
    base = folder / "BF16.gguf"
    convert_checkpoint(model, base, "gguf", ConvertOptions(overwrite=True))
    files = {"BF16": base} | {f"{name} by llama.cpp": folder / f"{name}.gguf" for name in types}
    made = [{"do": "quantize", "file": str(base), "out": str(folder / f"{name}.gguf"), "type": name} for name in types]
    ask(python, folder, *made)
    own = {}
    for out in outs:
        for suffix, options in (("", GgufOptions()), (", head in Q8_0", GgufOptions(embedding="q8_0"))):
            path = folder / f"{out.name}{'-q8' * bool(suffix)}.gguf"
            convert_checkpoint(out, path, "gguf", ConvertOptions(overwrite=True), gguf=options)
            files[out.name + suffix] = path
        own[out.name] = here(model, out, windows)
    names = [str(path) for path in files.values()]
    steps = [{"do": "speed", "file": name, "tokens": STEPS, "threads": THREADS} for name in names]
    kl, *seconds = ask(python, folder, {"do": "kl", "base": str(base), "files": names, "windows": windows}, *steps)
    click.echo("| file | MB | KL in llama.cpp | here | ms per step in llama.cpp | here |\n|---|---|---|---|---|---|")
    for (name, path), of_file in zip(files.items(), seconds, strict=True):
        means = np.array(kl[str(path)]).reshape(-1, WINDOW).mean(axis=1).tolist()
        ours, step = own.get(name, ("", ""))
        size, found = path.stat().st_size / 1e6, "" if name == "BF16" else interval(means)
        click.echo(f"| {name} | {size:.1f} | {found} | {ours} | {1e3 * statistics.median(of_file):.2f} | {step} |")


if __name__ == "__main__":
    main()
