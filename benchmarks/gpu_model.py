"""Section "model" of `benchmarks/gpu.py`: quantize a random model on the GPU, decode it, compare with BF16."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from gpu_run import Run

from minifloat.evaluate.bench.shapes import SHAPES, Shape, write_random
from minifloat.evaluate.bench.worker import Worker
from minifloat.evaluate.bench.workload import Workload
from minifloat.kernels.processors import TeamOptions
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

NAME = "llama-8b"
SCHEMES = ("fp8", "mxfp4")
BATCHES = (1, 16, 64)
INPUT, OUTPUT = 128, 64
DRY_SHAPE = replace(SHAPES[NAME], hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=300)


def model(run: Run) -> None:
    """Log tokens per second by format and batch size, and the share of the speed that the read bandwidth allows."""
    shape = DRY_SHAPE if run.dry else SHAPES[NAME]
    with tempfile.TemporaryDirectory(dir=run.out) as folder:
        paths = {"bf16": write_random(Path(folder) / "bf16", shape)}
        for scheme in SCHEMES:
            with run.attempt("model", f"quantize {scheme}"):
                report = quantize_checkpoint(
                    paths["bf16"], Path(folder) / scheme, scheme, QuantizeOptions(device=str(run.device))
                )
                paths[scheme] = Path(folder) / scheme
                gbps = report.source_bytes / report.seconds / 1e9
                run.log("streaming", what=f"quantize {scheme}", seconds=report.seconds, source_gbps=gbps)
        baseline: dict[int, float] = {}
        for name, path in paths.items():
            if run.left <= 0:
                run.log("model", what=f"from {name} on", failed="no time left")
                return
            with run.attempt("model", name):
                _decode(run, name, path, shape, baseline)


def _decode(run: Run, name: str, path: Path, shape: Shape, baseline: dict[int, float]) -> None:
    batches = (1, 2) if run.dry else BATCHES
    input_len, output_len = (8, 4) if run.dry else (INPUT, OUTPUT)
    options = {
        "device": str(run.device),
        "max_num_seqs": max(batches),
        "max_model_len": input_len + output_len,
        "prefix_cache": False,
    }
    load = Workload(input_len, output_len, batches)
    with Worker(path, options, TeamOptions()) as worker:
        info = worker.info
        for batch in batches:
            steps: list[float] = []
            for number in range(-1, 2):  # round -1 warms up
                sample = worker.run(load.prompts(number, batch, shape.vocab), output_len)
                if number >= 0:
                    steps += [s.seconds for s in sample.steps if s.generation_tokens == batch and not s.prompt_tokens]
            seconds = statistics.median(steps)
            if name == "bf16":
                baseline[batch] = seconds
            read = int(info["step_bytes"]) / seconds / 1e9
            run.log(
                "model",
                what=name,
                runner=info["runner"],
                batch=batch,
                tokens_per_second=batch / seconds,
                ms_per_step=seconds * 1e3,
                step_gb=int(info["step_bytes"]) / 1e9,
                bound_share=run.share("read_gbps", read),
                ratio=baseline[batch] / seconds if batch in baseline else None,
            )
