"""Runs under the Python of llama-cpp-python: a file of JSON requests, and a file for a line of JSON for each.

{"do": "tokens", "file": F, "texts": [[text, special], ...]}  tokens of texts; special: whether such tokens are parsed
{"do": "logits", "file": F, "window": [token, ...]}  the logarithms of the probabilities after each token
{"do": "kl", "base": F, "files": [F, ...], "windows": [[token, ...], ...]}  the KL divergences of each file from base
{"do": "quantize", "file": F, "out": F, "type": "Q4_0"}  llama.cpp's own quantizer
{"do": "speed", "file": F, "tokens": N, "threads": T}  seconds of N steps of one sequence, behind a first one
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import llama_cpp

_QUIET = llama_cpp.llama_log_callback(lambda *_: None)


class Model:
    """A GGUF file that is loaded."""

    def __init__(self, file: str, tokens: int = 0, threads: int = 1) -> None:
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp does not load {file}")
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        if tokens:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = params.n_batch = params.n_ubatch = tokens
            params.n_threads = params.n_threads_batch = threads
            self.context = llama_cpp.llama_init_from_model(self.model, params)

    def tokens(self, text: str, special: bool) -> list[int]:
        data = text.encode()
        found = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), found, len(found), True, special)
        return list(found[:count])

    def log_probabilities(self, window: list[int]) -> Any:
        """The logarithms of the probabilities after each token, float32 ``[tokens, V]``."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        batch = llama_cpp.llama_batch_init(len(window), 0, 1)
        batch.n_tokens = len(window)
        for at, token in enumerate(window):
            batch.token[at], batch.pos[at], batch.logits[at] = token, at, 1
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        assert llama_cpp.llama_decode(self.context, batch) == 0
        size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        pointer = ctypes.cast(llama_cpp.llama_get_logits(self.context), ctypes.POINTER(ctypes.c_float))
        logits = np.ctypeslib.as_array(pointer, (len(window), size)).astype(np.float64)
        llama_cpp.llama_batch_free(batch)
        logits -= logits.max(axis=-1, keepdims=True)
        return (logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))).astype(np.float32)


def divergences(request: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """The KL divergence of each file from the base at each token."""
    windows = request["windows"]
    base = Model(request["base"], max(map(len, windows)))
    expected = [base.log_probabilities(window) for window in windows]
    for file in request["files"]:
        model, found = Model(file, max(map(len, windows))), []
        for window, wanted in zip(windows, expected, strict=True):
            difference = wanted - model.log_probabilities(window)
            found += np.sum(np.exp(wanted.astype(np.float64)) * difference, axis=-1).tolist()
        yield file, found


def step_seconds(request: dict[str, Any]) -> list[float]:
    """The seconds of each step, with the most probable token as the next one."""
    model, seconds = Model(request["file"], request["tokens"] + 1, request["threads"]), []
    token = llama_cpp.llama_token(1)
    for at in range(request["tokens"] + 1):
        started = time.perf_counter()
        assert llama_cpp.llama_decode(model.context, llama_cpp.llama_batch_get_one(ctypes.pointer(token), 1)) == 0
        logits = llama_cpp.llama_get_logits(model.context)
        token.value = int(np.ctypeslib.as_array(logits, (llama_cpp.llama_vocab_n_tokens(model.vocabulary),)).argmax())
        seconds += [time.perf_counter() - started] if at else []
    return seconds


def answer(request: dict[str, Any]) -> Any:
    match request["do"]:
        case "speed":
            return step_seconds(request)
        case "tokens":
            model = Model(request["file"])
            return [model.tokens(text, special) for text, special in request["texts"]]
        case "logits":
            model = Model(request["file"], len(request["window"]))
            return model.log_probabilities(request["window"]).tolist()
        case "kl":
            return dict(divergences(request))
        case "quantize":
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{request['type']}")
            return llama_cpp.llama_model_quantize(request["file"].encode(), request["out"].encode(), params)


if __name__ == "__main__":
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_QUIET, None)
    requests, answers = map(Path, sys.argv[1:])
    for request in json.loads(requests.read_text()):
        with answers.open("a") as file:
            file.write(json.dumps(answer(request)) + "\n")
