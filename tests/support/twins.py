"""Twins of the models in `hub_configs`: one or two layers and a small vocabulary, with the true widths.

A twin is written tensor by tensor, each a repeated block of random BF16, so that memory is a few megabytes. Mixtures
keep at most `EXPERTS` experts, because one layer of the largest takes 20 GB.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hub_configs import HUB_CONFIGS

from minifloat import Engine, EngineOptions, LoadOptions, load
from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.deploy.estimate.model_source import tensors_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "storybook-4m"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
VOCABULARY = 4096  # that of the example, whose tokenizer a twin has
EXPERTS = 16
_BLOCK = 1_000_003  # values of the repeated block; a prime, so that rows differ
_STDDEV = 0.02


def twin_config(name: str) -> dict[str, Any]:
    """The config.json of a twin."""
    values: dict[str, Any] = json.loads(json.dumps(HUB_CONFIGS[name]))
    values.pop("quantization_config", None)
    values.pop("auto_map", None)
    text = values.get("text_config", values)
    for config in (values, text):
        config.update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    text.update(vocab_size=VOCABULARY, num_hidden_layers=_layers(text))
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = VOCABULARY
    _cut_layers(text)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if text.get(key):
            text[key] = min(text[key], EXPERTS)
    vision = values.get("vision_config")
    if vision:
        vision.update({key: 1 for key in ("depth", "num_hidden_layers") if key in vision})
    return values


def _layers(text: dict[str, Any]) -> int:
    """Two layers where they differ, or one."""
    differ = len(set(text.get("layer_types") or [])) > 1 or text.get("first_k_dense_replace")
    differ = differ or text["model_type"] in ("gemma2", "gemma3_text") or len(set(text.get("no_rope_layers", []))) > 1
    return 2 if differ else 1


def _cut_layers(text: dict[str, Any]) -> None:
    """Keep one layer of each kind."""
    count = text["num_hidden_layers"]
    if text.get("layer_types"):
        kinds = sorted(set(text["layer_types"]), key=lambda kind: kind == "full_attention")
        text["layer_types"] = (kinds * count)[-count:]
    elif text["model_type"] == "gemma3_text":
        text["layer_types"] = ["sliding_attention", "full_attention"]
    if text.get("no_rope_layers"):
        text["no_rope_layers"] = [1, 0]
    if text.get("first_k_dense_replace"):
        text["first_k_dense_replace"] = 1
    if "num_nextn_predict_layers" in text:
        text["num_nextn_predict_layers"] = 0


def _values(info: OutputTensor) -> Iterator[bytes]:
    """The bytes of a tensor, a block at a time; norms are near one, of classes that add one too."""
    seed = sum(info.name.encode())
    random = np.random.default_rng(seed).standard_normal(_BLOCK, np.float32) * _STDDEV
    if len(info.shape) == 1 and "norm" in info.name:
        random += 1
    block = random.tobytes() if info.dtype == "F32" else (random.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    left = info.nbytes
    while left:
        yield block[:left]
        left -= min(left, len(block))


def write_twin(name: str, folder: Path, *, data: bool = True) -> Path:
    """Write a twin; without `data` its file is sparse, for what reads headers only."""
    folder.mkdir(parents=True, exist_ok=True)
    config = twin_config(name)
    for nested in (config, config.get("text_config", config)):
        nested.pop("torch_dtype", None)
        nested["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    for file in TOKENIZER_FILES:
        shutil.copy(EXAMPLE / file, folder / file)
    tensors, header, end = tensors_of(config, folder), {}, 0
    for info in tensors:
        header[info.name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": [end, end + info.nbytes]}
        end += info.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as stored:
        stored.write(len(encoded).to_bytes(8, "little") + encoded)
        if data:
            for info in tensors:
                for block in _values(info):
                    stored.write(block)
        else:
            stored.truncate(8 + len(encoded) + end)
    return folder


@dataclass(frozen=True)
class Run:
    """What a run of `quantize` took, of the process as a whole."""

    seconds: float
    peak_bytes: int
    problem: str  # the message of its error; empty: it succeeded


#: The peak that the system counts for a child (`ru_maxrss`) begins with what its parent had; this one does not.
_CHILD = """
import atexit, re, runpy, sys
status = lambda: int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
atexit.register(lambda: print(status() * 1024))
runpy.run_module("minifloat", run_name="__main__", alter_sys=True)
"""


def quantize_twin(folder: Path, out: Path, scheme: str, more: Sequence[str] = ()) -> Run:
    """Quantize in a process of its own, by the command line."""
    arguments = ["quantize", str(folder), str(out), "--scheme", scheme, "--quiet", "--no-report", *more]
    started = time.perf_counter()
    child = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True)
    peak = int(child.stdout.split()[-1])
    return Run(time.perf_counter() - started, peak, child.stderr.strip() if child.returncode else "")


@dataclass(frozen=True)
class Step:
    """The engine's answer to a prompt, against `minifloat.load`, which is transformers' code on the decoded weights."""

    load_seconds: float
    step_seconds: float
    runner: str
    error: float  # norm of the difference of logits over their norm, each row without its mean


def step_of(out: Path, *, reference: bool = True) -> Step:
    """Load a quantized twin with the engine, and compute the logits of a short prompt."""
    tokens = list(range(40, 56))
    started = time.perf_counter()
    engine = Engine(out, EngineOptions(dtype="float32", max_num_seqs=1, max_model_len=64, lm_head="bf16"))
    loaded = time.perf_counter()
    logits = torch.cat(list(engine.logits(tokens)))
    stepped = time.perf_counter()
    runner = engine.info.runner
    del engine
    error = float("nan")
    if reference:
        model = load(out, LoadOptions(dtype=torch.float32, weight_only=True, lm_head="bf16"))
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([tokens])).logits[0].float()
        logits, expected = (rows - rows.mean(-1, keepdim=True) for rows in (logits, expected))
        error = float((logits - expected).norm() / expected.norm())
    return Step(loaded - started, stepped - loaded, runner, error)


def layer_bytes(folder: Path) -> int:
    """Bytes of the largest layer of a checkpoint."""
    layers: dict[str, int] = {}
    with Checkpoint.open(folder) as checkpoint:
        for name, info in checkpoint.tensors.items():
            layer = re.search(r"layers\.\d+\.", name)
            if layer is not None:
                layers[layer[0]] = layers.get(layer[0], 0) + info.nbytes
    return max(layers.values())
