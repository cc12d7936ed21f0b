"""Small random models of real families, quantized for a vLLM on a CPU without AMX."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import small_models

from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

#: The only format of linears that such a vLLM computes; it has none for experts.
SCHEME = "fp8-dynamic"
_KEEP_EXPERTS = (r"\.experts\.=bf16",)


@dataclass(frozen=True)
class Family:
    """A family, by its model type in transformers."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    torchvision: bool = False
    refusal: str = ""

    def make(self, source: Path, folder: Path) -> None:
        """Write the BF16 model into `source`, and the quantized one into `folder`."""
        small_models.make_model(small_models.Case(self.model_type, self.model_type, self.config), source)
        quantize_checkpoint(
            source, folder, SCHEME, QuantizeOptions(overrides=self.overrides, allow_partial=bool(self.overrides))
        )


#: Sizes of heads that vLLM's linear attention computes on a CPU; those of the released models.
_DELTA_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 64}
_NO_EXPERTS = "Unsupported FP8 MoE backend: NONE"

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen3": Family("qwen3"),
    "gemma2": Family("gemma2"),
    "gemma3": Family("gemma3_text"),
    "glm4": Family("glm4"),
    "phi3": Family("phi3"),
    "qwen3-moe": Family("qwen3_moe", overrides=_KEEP_EXPERTS),
    "mixtral": Family("mixtral", overrides=_KEEP_EXPERTS),
    # vLLM reads head_dim from the config, where every released model has it.
    "glm4-moe": Family("glm4_moe", {"head_dim": 32}, overrides=_KEEP_EXPERTS),
    "qwen3-next": Family("qwen3_next", _DELTA_HEADS | {"num_experts_per_tok": 4}, overrides=_KEEP_EXPERTS),
    "qwen3.5": Family("qwen3_5_text", _DELTA_HEADS, torchvision=True),
    # Every token takes all 4 experts: with 2, answers of one run exceeded the tolerance.
    "gpt-oss": Family("gpt_oss", {"num_experts_per_tok": 4}, overrides=_KEEP_EXPERTS),
    "granite-moe": Family("granitemoe", overrides=(r"(input|output)_linear=bf16",)),
    "granite-moe-experts": Family("granitemoe", refusal=_NO_EXPERTS),
}
