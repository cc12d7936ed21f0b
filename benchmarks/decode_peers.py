"""Run one other engine for `benchmarks/decode.py`, which starts this file as a process per engine.

    PYTHON benchmarks/decode_peers.py ENGINE MODEL THREADS BATCH LENGTH

PYTHON is the Python of an environment that has the engine; this file does not import minifloat. The process prints one
JSON object when the model is loaded. For each line of its input, which is a batch of prompts, it prints the time to
first token and the time of a decode step, in seconds. Every engine decodes greedily from token ids, with the same
number of threads, and the time of a step is the median over the steps of a batch.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
#: Seconds until all sequences have their first token, and seconds of each decode step after that.
Times = tuple[float, float]


class Transformers:
    """Eager BF16 of `AutoModelForCausalLM`, with the faster of its two KV caches for each batch size."""

    def __init__(self, model: str, threads: int, batch: int, length: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self.model: Any = loaded.eval()  # type: ignore[no-untyped-call, unused-ignore]
        embedding = self.model.get_input_embeddings().weight
        self.nbytes = sum(weight.nbytes for weight in self.model.parameters()) - embedding.nbytes
        self.length = length
        self.best: dict[int, str] = {}

    def run(self, prompts: Prompts, output_len: int) -> Times:
        """Return the time to first token and the time of a decode step, in seconds."""
        batch = len(prompts)
        if batch not in self.best:
            self.loop(prompts, 3, "dynamic")
            seconds = {kind: self.loop(prompts, 8, kind)[1] for kind in ("dynamic", "static")}
            self.best[batch] = min(seconds, key=lambda kind: seconds[kind])
            print(f"transformers, batch {batch}: {seconds}", file=sys.stderr)
        return self.loop(prompts, output_len, self.best[batch])

    def loop(self, prompts: Prompts, output_len: int, kind: str) -> Times:
        """Return the time to first token and the time of a decode step with one kind of KV cache."""
        import torch
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        cache = (
            DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=self.length)
        )
        ids, times = torch.tensor(prompts), []
        with torch.inference_mode():
            for _ in range(output_len):
                start = time.perf_counter()
                logits = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                ids = logits[:, -1].argmax(-1, keepdim=True)
                times.append(time.perf_counter() - start)
        return times[0], statistics.median(times[1:])


#: The type of the function that llama.cpp calls with a level, a text, and a pointer that it was given.
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR = 4


def _print_errors(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        print(text.decode(errors="replace"), end="", file=sys.stderr)


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python: one decode call per step for all sequences."""

    def __init__(self, model: str, threads: int, batch: int, length: int) -> None:
        self.lib = lib = self.library()
        self.log = _LOG(_print_errors)
        lib._lib.llama_log_set(self.log, None)
        lib.llama_backend_init()
        self.handle = lib.llama_model_load_from_file(model.encode(), self.model_params())
        if not self.handle:
            raise SystemExit(f"{lib.__name__} cannot load {model}")
        params = lib.llama_context_default_params()
        # Room for each sequence is rounded up to the multiple of 256 that both libraries need.
        params.n_ctx, params.n_seq_max = batch * -(-length // 256) * 256, batch
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.adjust(params)
        self.context = lib.llama_init_from_model(self.handle, params)
        if not self.context:
            raise SystemExit(f"{lib.__name__} makes no context of {params.n_ctx} tokens for {batch} sequences")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.handle))
        self.nbytes = Path(model).stat().st_size - int(Path(f"{model}.embedding").read_text())
        self.tokens = lib.llama_batch_init(512, 0, 1)

    def library(self) -> Any:
        """Return the Python module with the library's functions."""
        from llama_cpp import llama_cpp

        return llama_cpp

    def model_params(self) -> Any:
        """Return the options of loading."""
        return self.lib.llama_model_default_params()

    def adjust(self, params: Any) -> None:
        """Change options of the context."""

    def forget(self) -> None:
        """Empty the KV cache."""
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)

    def run(self, prompts: Prompts, output_len: int) -> Times:
        """Return the time to first token and the time of a decode step, in seconds."""
        self.forget()
        start = time.perf_counter()
        tokens = self.step(
            [
                (token, at, s, at == len(prompt) - 1)
                for s, prompt in enumerate(prompts)
                for at, token in enumerate(prompt)
            ]
        )
        first = time.perf_counter() - start
        times = []
        for number in range(output_len - 1):
            start = time.perf_counter()
            rows = [(token, len(prompts[s]) + number, s, True) for s, token in enumerate(tokens)]
            tokens = self.step(rows)
            times.append(time.perf_counter() - start)
        return first, statistics.median(times)

    def step(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute rows (token, position, sequence, needs logits); return the next token of each row with logits."""
        import numpy as np

        batch = self.tokens
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, needs_logits) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index] = token, position, 1
            batch.seq_id[index][0], batch.logits[index] = sequence, needs_logits
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        next_tokens = []
        for index, row in enumerate(rows):
            if row[3]:
                logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, index), (self.vocab,))
                next_tokens.append(int(logits.argmax()))
        return next_tokens


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp through the C functions of ik-llama-cpp-python, its weights repacked while they are loaded."""

    def library(self) -> Any:
        """Return the Python module with the library's functions."""
        from ik_llama_cpp import _ctypes_api

        return _ctypes_api

    def model_params(self) -> Any:
        """Return the options of loading."""
        params = super().model_params()
        params.repack_tensors, params.use_mmap = True, False
        return params

    def adjust(self, params: Any) -> None:
        """Turn flash attention off, which aborts if the sequences of a batch do not share keys (0.1.5)."""
        params.flash_attn = False

    def forget(self) -> None:
        """Empty the KV cache."""
        self.lib.llama_kv_cache_clear(self.context)


class OpenVino:
    """OpenVINO GenAI's pipeline, timed by its own metrics.

    A model is a folder and, after an "@", how it computes: "bf16", or "f32", in float32 with dynamic INT8 activations.
    """

    def __init__(self, model: str, threads: int, batch: int, length: int) -> None:
        import openvino_genai

        self.genai = openvino_genai
        folder, _, mode = model.partition("@")
        properties = {"KV_CACHE_PRECISION": "u8", "INFERENCE_NUM_THREADS": threads}
        if mode == "f32":
            properties |= {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "128"}
        else:
            properties |= {"INFERENCE_PRECISION_HINT": "bf16"}
        self.pipeline = openvino_genai.LLMPipeline(folder, "CPU", **properties)
        self.nbytes = (Path(folder) / "openvino_model.bin").stat().st_size - int(
            (Path(folder) / "embedding_bytes").read_text()
        )

    def run(self, prompts: Prompts, output_len: int) -> Times:
        """Return the time to first token and the time of a decode step, in seconds."""
        import numpy as np
        import openvino

        ids = np.array(prompts, np.int64)
        inputs = self.genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = self.genai.GenerationConfig(max_new_tokens=output_len, ignore_eos=True, do_sample=False)
        result = self.pipeline.generate(inputs, config)
        num_tokens = sum(map(len, result.tokens))
        if num_tokens != output_len * len(prompts):
            raise SystemExit(f"openvino generated {num_tokens} tokens instead of {output_len * len(prompts)}")
        metrics = result.perf_metrics.raw_metrics  # time of the first token in us, times of the tokens in ms
        steps = [b - a for a, b in itertools.pairwise(metrics.m_new_token_times)]
        return metrics.m_times_to_first_token[0] / 1e6, statistics.median(steps) / 1e3


class Vllm:
    """vLLM in eager mode, entirely in this process. On AMD processors it uses zentorch where that is installed."""

    def __init__(self, model: str, threads: int, batch: int, length: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
            "HF_HUB_OFFLINE": "1",
        }
        import vllm

        self.vllm = vllm
        self.engine = vllm.LLM(
            model,
            max_model_len=length,
            max_num_seqs=batch,
            enforce_eager=True,
            enable_prefix_caching=False,
            dtype="bfloat16",
        )
        self.nbytes = 0

    def run(self, prompts: Prompts, output_len: int) -> Times:
        """Return the time to first token and the time of a decode step, in seconds."""
        params = self.vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        engine, counts = self.engine.llm_engine, dict.fromkeys(map(str, range(len(prompts))), 0)
        times: list[float] = []
        start = time.perf_counter()
        for name, prompt in zip(counts, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if min(counts.values()) > len(times):  # every sequence has one token more
                times.append(time.perf_counter() - start)
        if set(counts.values()) != {output_len}:
            raise SystemExit(f"vllm generated {sorted(set(counts.values()))} tokens instead of {output_len}")
        return times[0], statistics.median(b - a for a, b in itertools.pairwise(times))


ENGINES: dict[str, type[Transformers | LlamaCpp | OpenVino | Vllm]] = {
    "transformers": Transformers,
    "llama.cpp": LlamaCpp,
    "ik_llama.cpp": IkLlamaCpp,
    "openvino": OpenVino,
    "vllm": Vllm,
}


def main() -> None:
    engine, model, *counts = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the engines' own output must not mix with the JSON answers
    running = ENGINES[engine](model, *map(int, counts))
    print(json.dumps({"nbytes": running.nbytes}), file=answers, flush=True)
    for line in sys.stdin:
        first, step = running.run(**json.loads(line))
        print(json.dumps({"first": first, "step": step}), file=answers, flush=True)


if __name__ == "__main__":
    main()
