"""Measure what ``import minifloat.transformers`` gains: memory and decode steps of models that transformers runs.

    python benchmarks/transformers_load.py BF16 FP8 MXFP4

Each folder is loaded in a process of its own, quantized ones twice, with the import and without. A step is a token of
`generate`, without cache of compilation: the time of the longer of two runs less that of the shorter, per token.
Memory is the resident set after these runs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import click

SHORT, LONG = 4, 20
_PROGRAM = """
import json, sys, time
folder, ours, short, long, rounds = sys.argv[1], sys.argv[2] == "1", *map(int, sys.argv[3:6])
if ours:
    import minifloat.transformers
import psutil, torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
began = time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
loaded = time.perf_counter() - began
ids = torch.arange(32)[None]
def seconds(tokens):
    began = time.perf_counter()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return time.perf_counter() - began
seconds(2)
steps = [(seconds(long) - seconds(short)) / (long - short) for _ in range(rounds)]
print(json.dumps({"load": loaded, "steps": steps, "rss": psutil.Process().memory_info().rss}))
"""


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=3, show_default=True)
def main(folders: tuple[Path, ...], rounds: int) -> None:
    """Print a line for each folder and each way of loading it."""
    print(f"{'model':20} {'loaded by':12} {'load s':>7} {'ms/step':>8} {'spread':>7} {'RSS MB':>7}")
    for folder in folders:
        is_quantized = "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for ours in (False, True) if is_quantized else (False,):
            arguments = [str(folder), str(int(ours)), str(SHORT), str(LONG), str(rounds)]
            output = subprocess.run(
                [sys.executable, "-c", _PROGRAM, *arguments], check=True, capture_output=True, text=True
            ).stdout
            found = json.loads(output.splitlines()[-1])
            steps = found["steps"]
            step = statistics.median(steps)
            print(
                f"{folder.name:20} {'minifloat' if ours else 'transformers':12} {found['load']:7.1f} {1e3 * step:8.1f} "
                f"{(max(steps) - min(steps)) / step:7.0%} {found['rss'] / 1e6:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
