"""The engines that `benchmarks/decode.py` measures: each is a process of its own, loaded when it is created."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minifloat.errors import MinifloatError
from minifloat.evaluate.bench.shapes import make_pair
from minifloat.evaluate.bench.worker import Worker
from minifloat.kernels.linear import int8
from minifloat.kernels.processors import TeamOptions

SHAPE = "tinyllama-1.1b"
BASELINE = "transformers BF16"
FP8, MXFP4 = "minifloat FP8", "minifloat MXFP4"
#: The same with inputs rounded to int8.
FP8_INT8, MXFP4_INT8 = "minifloat FP8, int8 inputs", "minifloat MXFP4, int8 inputs"
#: Engines that are measured in the same rounds. Ours of `COMMON` are in all of them, so that every ratio is of one run.
COMMON = (FP8, MXFP4)
PIECES: dict[str, tuple[str, ...]] = {
    "minifloat": (BASELINE, "minifloat BF16", FP8, "minifloat FP8 block", MXFP4, "minifloat MXFP4 + FP8 head"),
    "llama.cpp": (
        *COMMON,
        FP8_INT8,
        MXFP4_INT8,
        "minifloat MXFP4 + FP8 head",
        *(f"llama.cpp {kind}" for kind in ("BF16", "Q8_0", "Q4_0", "MXFP4")),
    ),
    "ik_llama.cpp": (*COMMON, *(f"ik_llama.cpp {kind}" for kind in ("BF16", "Q8_0", "Q4_0", "MXFP4"))),
    "openvino": (*COMMON, FP8_INT8, MXFP4_INT8, *(f"OpenVINO {kind}" for kind in ("BF16", "INT8", "INT4"))),
    "vllm": (*COMMON, "minifloat FP8 block", "vLLM FP8", "vLLM FP8 block"),
    "zentorch": (*COMMON, "vLLM zentorch BF16", "vLLM zentorch W8A8"),
}
#: Settings of OpenMP that other engines do not inherit: minifloat shortens the time that threads spin.
_OPENMP = frozenset({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MKL_NUM_THREADS"})
#: Our engines: the scheme of the checkpoint (None: BF16), and the engine's `lm_head` and `activations`.
_OURS: dict[str, tuple[str | None, str, str]] = {
    "minifloat BF16": (None, "bf16", "bf16"),
    FP8: ("fp8", "bf16", "bf16"),
    "minifloat FP8 block": ("fp8-block", "bf16", "bf16"),
    MXFP4: ("mxfp4", "bf16", "bf16"),
    "minifloat MXFP4 + FP8 head": ("mxfp4", "fp8", "bf16"),
    FP8_INT8: ("fp8", "bf16", "int8"),
    MXFP4_INT8: ("mxfp4", "bf16", "int8"),
}
#: vLLM's engines: the scheme of the checkpoint. vLLM rounds inputs too: dynamically for "fp8-dynamic".
_VLLM = {"vLLM FP8": "fp8-dynamic", "vLLM FP8 block": "fp8-block"}


class Engine(Protocol):
    """A loaded engine.

    Attributes:
        nbytes: Bytes of weights that a decode step reads; 0 if unknown.
        process: Id of its process.
    """

    nbytes: int
    process: int

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        """Return the time to first token and the time of a decode step, in seconds."""

    def close(self) -> None:
        """End the engine's process."""


class Peer:
    """Another engine, running in a process of `decode_peers.py`."""

    def __init__(self, python: str, engine: str, model: str, sizes: Sizes) -> None:
        script = Path(__file__).with_name("decode_peers.py")
        arguments = [python, str(script), engine, model, *map(str, (sizes.threads, sizes.batch, sizes.length))]
        environment = {name: value for name, value in os.environ.items() if name not in _OPENMP}
        environment["OMP_NUM_THREADS"] = str(sizes.threads)
        self.child = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.process = self.child.pid
        self.nbytes = int(self.answer()["nbytes"])

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        """Return the time to first token and the time of a decode step, in seconds."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        self.child.stdin.flush()
        answer = self.answer()
        return answer["first"], answer["step"]

    def answer(self) -> dict[str, float]:
        """Return the next JSON object that the process prints."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise MinifloatError(f"{self.child.args!r} ended with status {self.child.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the engine's process."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


class Ours:
    """minifloat's engine."""

    def __init__(self, path: Path, sizes: Sizes, lm_head: str, activations: str) -> None:
        options = {
            "max_model_len": sizes.length,
            "max_num_seqs": sizes.batch,
            "prefix_cache": False,
            "lm_head": lm_head,
            "activations": activations,
            "kv_cache_memory": sizes.batch * sizes.room * sizes.kv_bytes,
        }
        self.worker = Worker(path, options, TeamOptions(threads=sizes.threads))
        self.process = self.worker.process_id
        self.nbytes = int(self.worker.info["step_bytes"])

    def run(self, prompts: list[list[int]], output_len: int) -> tuple[float, float]:
        """Return the time to first token and the time of a decode step, in seconds."""
        sample = self.worker.run(prompts, output_len)
        steps = [s.seconds for s in sample.steps if s.generation_tokens == len(prompts) and not s.prompt_tokens]
        return max(sample.ttfts), statistics.median(steps)

    def close(self) -> None:
        """End the engine's process."""
        self.worker.close()


@dataclass(frozen=True)
class Sizes:
    """What an engine makes room for.

    Attributes:
        threads: Threads to compute with.
        batch: Sequences of the largest batch.
        length: Tokens of the longest sequence.
        kv_bytes: Bytes of keys and values of a token in 16 bits.
    """

    threads: int
    batch: int
    length: int
    kv_bytes: int

    @property
    def room(self) -> int:
        """Tokens that the KV cache holds for each sequence: `length`, rounded up as llama.cpp does."""
        return -(-self.length // 256) * 256


@dataclass(frozen=True)
class Installed:
    """Where engines and models are.

    Attributes:
        models: Folder of our checkpoints; those that are missing are written.
        peer_models: The OUT argument of `decode_models.py`, or an empty string.
        pythons: The Python of each environment, by the name of its option ("llama-cpp", "vllm", ...).
        has_amx: Whether vLLM can multiply in FP8 blocks here.
    """

    models: Path
    peer_models: str
    pythons: Mapping[str, str]
    has_amx: bool

    def missing(self, name: str) -> str | None:
        """Return why an engine cannot be measured, or None."""
        if name in _OURS and _OURS[name][2] == "int8" and (reason := int8.why_not()):
            return reason
        option, model = self._needs(name)
        if option and not self.pythons.get(option):
            return f"--{option}-python is not given"
        if model and not self.peer_models:
            return "--peer-models is not given"
        if model and not Path(f"{self.peer_models}{model}").exists():
            return f"{self.peer_models}{model} does not exist: write it with decode_models.py"
        if name == "vLLM FP8 block" and not self.has_amx:
            return "vLLM multiplies no FP8 blocks on a processor without AMX"
        return None

    def loader(self, name: str, sizes: Sizes) -> Callable[[], Engine]:
        """Return a function that loads an engine."""
        if name in _OURS:
            scheme, lm_head, activations = _OURS[name]
            return lambda: Ours(self.checkpoint(scheme), sizes, lm_head, activations)
        if name == BASELINE:
            return lambda: Peer(sys.executable, "transformers", str(self.checkpoint(None)), sizes)
        option, model = self._needs(name)
        python, path = self.pythons[option], f"{self.peer_models}{model}"
        if name.startswith("OpenVINO"):
            path += "@bf16" if name.endswith("BF16") else "@f32"
        elif name in _VLLM:
            path = str(self.checkpoint(_VLLM[name]))
        elif not model:
            path = str(self.checkpoint(None))
        engine = {"llama-cpp": "llama.cpp", "ik-llama": "ik_llama.cpp", "zentorch": "vllm"}.get(option, option)
        return lambda: Peer(python, engine, path, sizes)

    def checkpoint(self, scheme: str | None) -> Path:
        """Return one of our checkpoints, which is written if it is missing."""
        base, quantized = make_pair(self.models, SHAPE, scheme or "fp8")
        return quantized if scheme else base

    @staticmethod
    def _needs(name: str) -> tuple[str, str]:
        """Return the option with an engine's Python and what follows `peer_models` in the name of its model."""
        engine, _, kind = name.rpartition(" ")
        match engine:
            case "llama.cpp":
                return "llama-cpp", f"-{kind}.gguf"
            case "ik_llama.cpp":
                return "ik-llama", f"-{kind}.gguf"
            case "OpenVINO":
                return "openvino", f"-{kind}"
            case "vLLM zentorch":
                return "zentorch", f"-{kind}" if kind == "W8A8" else ""
        return ("vllm" if name in _VLLM else ""), ""


def memory(engine: Engine) -> tuple[int, int]:
    """Return the resident memory of an engine's process now and the largest so far, in bytes."""
    return rss(engine.process), peak_rss(engine.process)


def peak_rss(process: int) -> int:
    """Return the largest resident memory of a process so far, in bytes; 0 where the system does not say."""
    status = Path(f"/proc/{process}/status")
    if not status.exists():
        return 0
    lines = (line.split() for line in status.read_text().splitlines())
    return next((int(words[1]) << 10 for words in lines if words[0] == "VmHWM:"), 0)


def rss(process: int) -> int:
    """Return the resident memory of a process, in bytes; 0 where the system does not say."""
    status = Path(f"/proc/{process}/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0
