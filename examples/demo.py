"""Quantize the example model to FP8 and MXFP4, compare both with BF16, serve MXFP4, and measure what was gained.

    python examples/demo.py [OUT]

The same on the command line:

    minifloat quantize examples/storybook-4m OUT/fp8-block --scheme fp8-block
    minifloat quantize examples/storybook-4m OUT/mxfp4 --scheme mxfp4 --data self --calibration-samples 128
    minifloat compare  examples/storybook-4m OUT/fp8-block OUT/mxfp4
    minifloat generate OUT/fp8-block "Once upon a time"
    minifloat serve    OUT/mxfp4
    minifloat bench    OUT/mxfp4 --baseline examples/storybook-4m --input-len 64 --output-len 32 --batch-sizes 1,4
    minifloat report   OUT/mxfp4
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import minifloat
from minifloat.calibration.options import TextOptions
from minifloat.evaluate.checkpoint_report import document, read_results
from minifloat.evaluate.compare.words import verdict_line
from minifloat.report import terminal
from minifloat.report.text import size_text
from minifloat.serve.client import Connection, ServerError

MODEL = Path(__file__).parent / "storybook-4m"
#: FP8 is rounded to nearest; the codes of MXFP4 are chosen with text that the model writes itself.
SAMPLES = 128
WORKLOAD = minifloat.Workload(input_len=64, output_len=32, batch_sizes=(1, 4))
PROMPT = "Once upon a time, there was a little girl named Lily."
NEW_TOKENS = 60


def heading(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text} {'=' * (100 - len(text))}\n", flush=True)


def tell(model: Path) -> None:
    """Stream a continuation of the prompt."""
    print(PROMPT, end="", flush=True)
    for piece in minifloat.generate(model, PROMPT, max_new_tokens=NEW_TOKENS):
        print(piece, end="", flush=True)
    print()


def quantize(out: Path, scheme: str) -> None:
    """Quantize the model into `out`, and print the sizes."""
    text = TextOptions(samples=SAMPLES, seq_len=256)
    data = minifloat.DataOptions(["self"], text) if scheme == "mxfp4" else None
    report = minifloat.quantize_checkpoint(MODEL, out, scheme, minifloat.QuantizeOptions(overwrite=True), data=data)
    print(
        f"{scheme:<10} {size_text(report.source_bytes)} -> {size_text(report.output_bytes)} "
        f"({report.source_bytes / report.output_bytes:.2f}x smaller), SQNR {report.total.sqnr_db:.1f} dB, "
        f"{report.seconds:.1f} s{'' if data is None else f', with {SAMPLES} texts that the model wrote'}",
        flush=True,
    )


def compare(checkpoints: list[Path]) -> None:
    """Compare the checkpoints with the model on the texts that come with minifloat, and keep the result beside each."""
    comparison = minifloat.compare_models(MODEL, checkpoints)
    print(
        f"{'':<10} {'perplexity':>11} {'KL, nats':>9} {'same top-1':>11}   on {comparison.candidates[0].overall.name}"
    )
    print(f"{'bf16':<10} {comparison.candidates[0].overall.baseline_perplexity:>11.3f}")
    for folder, candidate in zip(checkpoints, comparison.candidates, strict=True):
        overall = candidate.overall
        print(
            f"{folder.name:<10} {overall.candidate_perplexity:>11.3f} {overall.kl_mean.value:>9.5f} "
            f"{overall.same_top1.value:>11.2%}   {verdict_line(candidate)}"
        )
        minifloat.write_report(folder, comparison)


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """Run `minifloat serve MODEL` on a free port during the block; yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", model.with_name("serve.log")
    command = [sys.executable, "-m", "minifloat", "serve", str(model), "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until_ready(url, server, log)
        yield url
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server has loaded its model.

    Raises:
        SystemExit: The server ended, or is not ready after a minute.
    """
    for _ in range(600):
        with contextlib.suppress(ServerError):
            Connection(url).json("GET", "/ready")
            return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"minifloat serve did not become ready:\n{log.read_text()}")


def ask(url: str, model: str) -> None:
    """Ask the server to continue the prompt: with OpenAI's client where it is installed, else with a plain request."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
    try:
        from openai import OpenAI
    except ImportError:
        how = "a plain request; `pip install openai` asks with OpenAI's client"
        text = Connection(url).json("POST", "/v1/completions", request)["choices"][0]["text"]
    else:
        how = f'OpenAI(base_url="{url}/v1").completions.create(model="{model}", ...)'
        text = OpenAI(base_url=f"{url}/v1", api_key="none").completions.create(**request).choices[0].text
    print(f"{how}:\n\n{PROMPT}{text}")


def main(out: Path) -> None:
    """Run the demo, which writes its checkpoints into `out`."""
    start = time.monotonic()
    small, smallest = out / "fp8-block", out / "mxfp4"
    heading("The BF16 model tells a story")
    tell(MODEL)
    heading("minifloat quantize: two checkpoints")
    for folder in (small, smallest):
        quantize(folder, folder.name)
    heading("minifloat compare: are they still the same model?")
    compare([small, smallest])
    heading("minifloat generate: FP8 tells a story")
    tell(small)
    heading("minifloat serve: MXFP4 behind OpenAI's API")
    with served(smallest) as url:
        ask(url, smallest.name)
    heading("minifloat bench, minifloat report: what was done to MXFP4, is it the same model, what was gained")
    gains = minifloat.bench_checkpoint(smallest, MODEL, WORKLOAD)
    report = minifloat.write_report(smallest, gains)
    terminal.write(document(read_results(smallest)))
    print("These are the gains of a model of 4 million parameters; docs/results.md has those of larger ones.")
    print(f"\nThe demo took {time.monotonic() - start:.0f} s. Each checkpoint in {out} has a report.")
    print(f"Report: {report}")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir()) / "minifloat-demo"
    if len(sys.argv) == 1:
        shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True, exist_ok=True)
    main(target)
