"""Time lm-evaluation-harness with minifloat's engine beside its own model of transformers, on one checkpoint.

    python benchmarks/lm_eval_model.py OUT

Questions of four answers behind a common prefix (as tasks with examples have), and texts to continue, all made of the
words of one text. Each model type runs in a process of its own: "hf" is the harness' own, which decodes quantized
weights, "hf, kernels" the same after ``import minifloat.transformers``, "minifloat" the engine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click

TEXT = Path(__file__).parents[1] / "examples" / "texts" / "stories_calibration.txt"
_PROGRAM = """
import json, sys, time
kind, folder, text, shared, questions, texts, tokens, batch = *sys.argv[1:4], *map(int, sys.argv[4:])
if kind == "hf, kernels":
    import minifloat.transformers
import psutil
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from minifloat.evaluate.lm_eval import register
register()
words = open(text).read().split()
def instances(kind, arguments):
    return [Instance(kind, {}, one, i, metadata=("task", i, 1)) for i, one in enumerate(arguments)]
began = time.perf_counter()
model = get_model(kind.split(",")[0])(pretrained=folder, batch_size=batch, device="cpu")
seconds = {"load": time.perf_counter() - began}
prefix = " ".join(words[:shared])
asked = [(prefix + " " + " ".join(words[at : at + 40]), " " + " ".join(words[at + 40 + 4 * n : at + 44 + 4 * n]))
         for at in range(1000, 1000 + 60 * questions, 60) for n in range(4)]
began = time.perf_counter()
answers = model.loglikelihood(instances("loglikelihood", asked), disable_tqdm=True)
seconds["questions"] = time.perf_counter() - began
began = time.perf_counter()
options = {"until": [], "max_gen_toks": tokens, "do_sample": False}
contexts = [(" ".join(words[at : at + 40]), options) for at in range(5000, 5000 + 60 * texts, 60)]
model.generate_until(instances("generate_until", contexts), disable_tqdm=True)
seconds["texts"] = time.perf_counter() - began
rss = psutil.Process().memory_info().rss
print(json.dumps({"seconds": seconds, "answers": [one for one, _ in answers], "rss": rss}))
"""


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--shared", default=300, show_default=True, help="Words that all questions begin with.")
@click.option("--questions", default=8, show_default=True)
@click.option("--texts", default=8, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="Tokens of each text.")
@click.option("--batch", default=8, show_default=True)
def main(folder: Path, shared: int, questions: int, texts: int, tokens: int, batch: int) -> None:
    """Print a line for each model type."""
    print(f"{'model type':12} {'load s':>7} {'questions s':>12} {'texts s':>8} {'RSS MB':>7}  log-likelihoods differ")
    first: list[float] | None = None
    for kind in ("hf", "hf, kernels", "minifloat"):
        numbers = [str(number) for number in (shared, questions, texts, tokens, batch)]
        ran = subprocess.run(
            [sys.executable, "-c", _PROGRAM, kind, str(folder), str(TEXT), *numbers], capture_output=True, text=True
        )
        if ran.returncode:
            raise click.ClickException(f"{kind}: {ran.stderr[-2000:]}")
        found = json.loads(ran.stdout.splitlines()[-1])
        seconds, answers = found["seconds"], found["answers"]
        first = first or answers
        furthest = max(abs(one - other) / abs(other) for one, other in zip(answers, first, strict=True))
        print(
            f"{kind:12} {seconds['load']:7.1f} {seconds['questions']:12.1f} {seconds['texts']:8.1f} "
            f"{found['rss'] / 1e6:7.0f}  at most {furthest:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
