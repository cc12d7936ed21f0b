"""config.json of checkpoints, quantized and not: every command that reads it, and the engine with the native decoder.

An input is JSON: `model` names a form of the small Llama, `config` is its config.json.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from fuzzing import small
from fuzzing.mutation import decoded, encoded, json_mutator, words_of
from fuzzing.target import Target
from minifloat import check_checkpoint, inspect_checkpoint, plan_model, preview_quantization
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.errors import MinifloatError
from minifloat.model.runtime.tokenizer import load_tokenizer

FORMS = (
    "bf16", "fp8-dynamic", "fp8-block", "fp8-block/fp8", "mxfp8", "mxfp4", "nvfp4", "fp8-dynamic/modelopt",
    "nvfp4/modelopt",
)  # fmt: skip
_TARGETS = ("vllm:h100", "sglang:b200:tp2", "transformers:cpu", "minifloat:cpu", "vllm+minifloat:cpu")


@functools.cache
def _tokenizer() -> Any:
    return load_tokenizer(small.STORYBOOK)


def _run(data: bytes) -> None:
    value = decoded(data)
    if not isinstance(value, dict) or value.get("model") not in FORMS:
        return
    folder = small.fresh("config")
    folder.mkdir()
    for path in small.checkpoint(value["model"]).iterdir():
        if path.name != "config.json":
            os.link(path, folder / path.name)
    (folder / "config.json").write_bytes(encoded(value.get("config")))
    refused = 0
    steps = [lambda: inspect_checkpoint(folder), lambda: plan_model(folder, "all", "h100")]
    steps += [lambda target=target: check_checkpoint(folder, target) for target in _TARGETS]
    if value["model"] == "bf16":
        steps.append(lambda: preview_quantization(folder, small.scratch() / "never", "mxfp4"))
    for step in steps:
        try:
            step()
        except MinifloatError:
            refused += 1
    if refused < len(steps):
        engine = Engine(
            folder,
            EngineOptions(runner="native", dtype="float32", kv_cache_memory=1 << 20, max_num_seqs=2),
            tokenizer=_tokenizer(),
        )
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))


def _seeds() -> dict[str, bytes]:
    configs = {form: decoded((small.checkpoint(form) / "config.json").read_bytes()) for form in FORMS}
    return {form.replace("/", "-"): encoded({"model": form, "config": config}) for form, config in configs.items()}


_TEXTS = """
rope_scaling rope_parameters rope_type factor yarn linear dynamic llama3 sliding_window layer_types head_dim
num_experts num_local_experts text_config auto_map quantization_config mixtral qwen3 qwen3_moe gemma3_text
gpt_oss deepseek_v3 mistral group_size block_structure ignore targets config_groups weight_block_size
modules_to_not_convert kv_cache_scheme sparsity_config quant_method mxfp4 fp8 modelopt compressed-tensors
lm_head re:.* Linear partial_rotary_factor
"""
_WORDS = words_of(small.LLAMA) | set(_TEXTS.split())

TARGET = Target(_run, _seeds, seconds=10, mutate=json_mutator(_WORDS))
