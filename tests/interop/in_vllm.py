"""Load checkpoints in vLLM, one after the other in one process, and write their answers; runs in vLLM's environment."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

# The engine runs in this process, so that a load error is raised here as the engine's own exception.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

PROCESSORS = sorted(os.sched_getaffinity(0))
HAS_AMX = torch.cpu._is_amx_tile_supported()
_SHARED = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "skip_tokenizer_init": True}


def answer(checkpoint: dict[str, Any], prompts: list[list[int]], tokens: int, logprobs: int) -> list[dict[str, Any]]:
    """Return greedy continuations, with the top log-probabilities at each position of prompt and answer."""
    params = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=logprobs, prompt_logprobs=logprobs, detokenize=False
    )
    processes = checkpoint.get("tp", 1)
    # Without an explicit binding, vLLM gives each process a NUMA node of its own.
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, PROCESSORS[:processes])) if processes > 1 else "auto"
    torch.cpu._is_amx_tile_supported = lambda: HAS_AMX or checkpoint.get("as_if_amx", False)
    engine = LLM(model=checkpoint["path"], tensor_parallel_size=processes, enable_prefix_caching=False, **_SHARED)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "top": [
                {token: entry.logprob for token, entry in position.items()}
                for position in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)
            ],
        }
        for output in outputs
    ]


def main() -> None:
    """Run the request file's checkpoints, and append the answers or the error of each as one line when it ends."""
    with open(sys.argv[1]) as file:
        request = json.load(file)
    for checkpoint in request["checkpoints"]:
        line: dict[str, Any] = {"name": checkpoint["name"], "error": None, "outputs": []}
        try:
            line["outputs"] = answer(checkpoint, request["prompts"], request["tokens"], request["logprobs"])
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"
        with open(sys.argv[2], "a") as file:
            print(json.dumps(line), file=file)
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
