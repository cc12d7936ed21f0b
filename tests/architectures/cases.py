"""The rows of the matrix."""

from __future__ import annotations

from dataclasses import replace

from small_configs import HEADS
from small_models import Case, model_classes

_WHOLE_BLOCKS = {"num_key_value_heads": HEADS}
#: Sources that are quantized already, by model type, with scheme and layout: as DeepSeek and MiniMax release models, as
#: llm-compressor and ModelOpt write them.
_QUANTIZED_SOURCES = (
    Case("llama", "llama", _WHOLE_BLOCKS, ("fp8-block", "fp8")),
    Case("minimax_m2", "minimax_m2", _WHOLE_BLOCKS, ("fp8-block", "fp8")),
    Case("llama", "llama", {}, ("fp8", "compressed-tensors")),
    Case("llama", "llama", {}, ("mxfp4", "compressed-tensors")),
    Case("qwen3_moe", "qwen3_moe", {}, ("nvfp4", "compressed-tensors")),
    Case("qwen3", "qwen3", {}, ("nvfp4", "modelopt")),
)


def all_cases() -> list[Case]:
    """Return a case for each model type of the installed transformers, then those of quantized sources."""
    plain = [Case(name, name) for name in sorted(model_classes())]
    stored = [replace(case, name=" ".join((case.name, "from", *(case.stored or ())))) for case in _QUANTIZED_SOURCES]
    return [*plain, *stored]
