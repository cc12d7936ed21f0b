"""The settings of `minifloat.evaluate.compare.compare_models`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch

from minifloat.errors import UnknownNameError, UsageError
from minifloat.evaluate.compare.verdict import Tolerance
from minifloat.model.runtime.activations import ACTIVATIONS
from minifloat.model.runtime.lm_head import LM_HEADS

KV_CACHES = ("auto", "none", "fp8")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ServedKeywords(TypedDict, total=False):
    """Those fields of `CompareOptions` that have a meaning for a server too; the others are about loaded models."""

    window: int | None
    max_tokens: int | None
    tolerance: Tolerance
    dtype: str | None
    device: str | torch.device
    impl: str
    revision: str | None
    command: str


class CompareKeywords(ServedKeywords, total=False):
    """The fields of `CompareOptions`, as keyword arguments."""

    weight_only: bool
    kv_cache: str
    variants: bool
    lm_head: str
    activations: str
    prompts: int
    new_tokens: int
    tasks: Sequence[str]
    task_path: str | os.PathLike[str] | None
    task_limit: int | None
    attribute: float
    resume: str | os.PathLike[str] | None


@dataclass(frozen=True)
class CompareOptions:
    """The settings of a comparison.

    Attributes:
        max_tokens: Number of tokens to use from the start of each text; None: all.
        task_limit: Number of items of each task to use; None: all.
    """

    window: int | None = None
    max_tokens: int | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    dtype: str | None = None
    device: str | torch.device = "cpu"
    weight_only: bool = False
    kv_cache: str = "auto"
    variants: bool = False
    lm_head: str = "auto"
    activations: str = "bf16"
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
        if self.lm_head not in LM_HEADS:
            raise UnknownNameError("lm_head", self.lm_head, LM_HEADS)
        if self.activations not in ACTIVATIONS:
            raise UnknownNameError("activations", self.activations, ACTIVATIONS)
        if self.prompts < 0 or self.new_tokens < 1:
            raise UsageError(f"expected prompts >= 0 and new_tokens >= 1, got {self.prompts} and {self.new_tokens}")

    def load_options(self) -> dict[str, Any]:
        """Return the keyword arguments for `minifloat.model.runtime.load.load` of the baseline."""
        dtype = None if self.dtype is None else _DTYPES[self.dtype]
        return {"dtype": dtype, "device": self.device, "weight_only": self.weight_only, "impl": self.impl}

    def candidate_options(self) -> dict[str, Any]:
        """Return the keyword arguments for `minifloat.model.runtime.load.load` of the candidates."""
        return self.load_options() | {"lm_head": self.lm_head, "activations": self.activations}
