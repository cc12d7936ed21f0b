"""Measure the prefill of long prompts: seconds, attention's share of them, and memory beyond the weights and the cache.

    python benchmarks/long_prompt.py
    python benchmarks/long_prompt.py --lengths 2048,32768 --cache fp8 --scheme fp8

The model is a Llama with random weights (4 layers, hidden 512, 8 heads, 2 key-value heads of 64), whose attention
takes far more of the time than that of a real model. Each prompt runs in a process of its own, through `Engine`, one
prompt and one token. A short prompt runs before it, so that the libraries have started. The cache holds the prompt
and no more. "beyond" is the peak of resident memory during the prompt, less resident memory before it, less the part
of the cache that the prompt fills: with chunked prefill it does not grow with the prompt.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import click

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 512, 4, 8, 2, 64, 1536, 8192
WARM_UP = 256


def make_model(folder: Path, scheme: str) -> Path:
    """Write the quantized model, with a context of 128 Ki tokens and scales for an FP8 cache."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from minifloat import QuantizeOptions, quantize_checkpoint
    from minifloat.calibration.calibrate import calibrate
    from minifloat.calibration.options import CalibrateOptions
    from minifloat.calibration.result import Calibration
    from minifloat.calibration.rules import parse_rule

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCAB,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    text = folder / "text.txt"
    text.write_text(" ".join(f"t{7 * i % VOCAB}" for i in range(4096)))
    stats = calibrate(folder / "model", [text], CalibrateOptions(samples=4, seq_len=512)).stats
    calibration = Calibration(stats, parse_rule("max"))  # for the scales of keys and values
    quantize_checkpoint(
        folder / "model", folder / scheme, scheme, QuantizeOptions(kv_cache=True), calibration=calibration
    )
    return folder / scheme


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that an engine can load; its texts do not matter."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCAB)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def memory() -> tuple[int, int]:
    """Return the resident bytes of this process now, and the most since `reset_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) << 10, int(lines["VmHWM"].split()[0]) << 10


def reset_peak() -> None:
    """Forget the largest resident memory so far."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(folder: str, length: int, cache: Literal["bfloat16", "fp8"], threads: int) -> dict[str, Any]:
    """Run one prompt in this process and return its figures."""
    import torch

    from minifloat.engine import Engine, EngineOptions, SamplingParams

    torch.set_num_threads(threads)
    room = -(-(length + 2) // 128) * 128
    engine = Engine(
        folder,
        EngineOptions(dtype="bfloat16", kv_cache_dtype=cache, max_model_len=room, max_num_seqs=1, prefix_cache=False),
    )
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.generate([[1 + i % (VOCAB - 1) for i in range(WARM_UP)]], params)
    prompt = [1 + (7 * i + i // 11) % (VOCAB - 1) for i in range(length)]
    parts = engine.part_seconds()
    reset_peak()
    before, _ = memory()
    started = time.perf_counter()
    engine.generate([prompt], params)
    seconds = time.perf_counter() - started
    _, peak = memory()
    parts = {name: value - parts[name] for name, value in engine.part_seconds().items()}
    filled = (length - WARM_UP) * engine.info.kv_bytes_per_token  # the warm-up touched the first blocks
    return {
        "seconds": seconds,
        "attention": parts["attention"] / sum(parts.values()),
        "cache": length * engine.info.kv_bytes_per_token,
        "grown": peak - before,
        "beyond": peak - before - filled,
    }


@click.command()
@click.option("--lengths", default="2048,8192,32768", show_default=True)
@click.option("--cache", "caches", multiple=True, default=("bfloat16", "fp8"), show_default=True)
@click.option("--scheme", default="fp8", show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--threads", default=2, show_default=True)
def main(lengths: str, caches: tuple[str, ...], scheme: str, rounds: int, threads: int) -> None:
    """Print a table of prompt lengths and formats of the cache; medians of all rounds."""
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool,
    ):
        model = str(pool.apply(make_model, (Path(folder), scheme)))
        click.echo(f"{'cache':<9} {'tokens':>7} {'seconds':>8} {'tokens/s':>9} {'attention':>10} {'cache MiB':>10} "
                   f"{'grown MiB':>10} {'beyond MiB':>11}")  # fmt: skip
        found: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for _ in range(rounds):
            for cache in caches:
                for length in map(int, lengths.split(",")):
                    row = pool.apply(measure, (model, length, cache, threads))
                    found.setdefault((cache, length), []).append(row)
        for (cache, length), rows in found.items():
            median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
            click.echo(
                f"{cache:<9} {length:>7,} {median['seconds']:>8.2f} {length / median['seconds']:>9,.0f} "
                f"{median['attention']:>10.0%} {median['cache'] / 2**20:>10.1f} {median['grown'] / 2**20:>10.1f} "
                f"{median['beyond'] / 2**20:>11.1f}"
            )


if __name__ == "__main__":
    main()
