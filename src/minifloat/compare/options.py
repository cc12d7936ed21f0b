"""How models are compared: the settings of `minifloat.compare.compare_models`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minifloat.compare.verdict import Tolerance
from minifloat.errors import UnknownNameError, UsageError

KV_CACHES = ("auto", "none", "fp8")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class CompareOptions:
    """How models are compared.

    Attributes:
        window: Tokens per window; by default 256, or what the models can attend to if that is less.
        max_tokens: Use only so many tokens of the start of each text.
        tolerance: What the verdict holds the candidates against.
        dtype: "bfloat16", "float16" or "float32" for all; by default what each config.json says. Loaded models keep
            theirs.
        device: Where folders are loaded to.
        weight_only: Load folders with all inputs in `dtype`. Loaded models keep what they were loaded with.
        kv_cache: "auto": candidates that declare an FP8 KV cache get a simulated one; "none": none does; "fp8": all do,
            with scales of 1 where they have none. Loaded models get none.
        variants: Compare each candidate also without what it declares besides its weights, see `compare_models`.
        prompts: So many beginnings of documents are continued greedily by all models; 0: none.
        new_tokens: Tokens of a continuation at most.
        tasks: Names of tasks of lm-evaluation-harness, see `minifloat.compare.tasks.load_tasks`.
        task_path: A folder of task files.
        task_limit: Use only so many items of each task.
        attribute: Seconds to spend on finding out which modules do the damage, for each candidate; 0: none.
        impl: What multiplies the quantized weights of folders, as in `minifloat.runtime.load.load`. The kernels do not
            round weights to the 16 bits of `dtype`; "reference" does, as servers that dequantize first.
        resume: A folder that scores are written down in while they are measured, and read from if it has some.
        revision: Of the baseline, if it is of the hub, as in `minifloat.hub.model_folder`.
        command: For the record.
    """

    window: int | None = None
    max_tokens: int | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    dtype: str | None = None
    device: str | torch.device = "cpu"
    weight_only: bool = False
    kv_cache: str = "auto"
    variants: bool = False
    prompts: int = 32
    new_tokens: int = 64
    tasks: Sequence[str] = ()
    task_path: str | os.PathLike[str] | None = None
    task_limit: int | None = None
    attribute: float = 0.0
    impl: str = "auto"
    resume: str | os.PathLike[str] | None = None
    revision: str | None = None
    command: str = ""

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise UnknownNameError("dtype", self.dtype, _DTYPES)
        if self.kv_cache not in KV_CACHES:
            raise UnknownNameError("kv_cache", self.kv_cache, KV_CACHES)
        if self.prompts < 0 or self.new_tokens < 1:
            raise UsageError(f"expected prompts >= 0 and new_tokens >= 1, got {self.prompts} and {self.new_tokens}")

    def of_load(self) -> dict[str, Any]:
        """What `minifloat.runtime.load.load` is told."""
        dtype = None if self.dtype is None else _DTYPES[self.dtype]
        return {"dtype": dtype, "device": self.device, "weight_only": self.weight_only, "impl": self.impl}
