"""The options of an engine that say how a model is opened."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from minifloat.errors import UnknownNameError, UsageError
from minifloat.model.runtime.activations import ENGINE_ACTIVATIONS
from minifloat.model.runtime.lm_head import LM_HEADS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: `kv_cache_dtype` -> the element of the cache; "auto" follows the checkpoint, then the dtype of the model.
KV_DTYPES = {"auto": None, "bfloat16": "bfloat16", "fp8": "E4M3", "float32": "float32"}
#: What can propose tokens.
SPECULATIONS = ("self", "prompt", "draft")
#: Default of `draft_tokens`: with one sequence, a step of one token and seven drafts reads the weights once.
DRAFT_TOKENS = 7
_RUNNERS = ("auto", "native", "device", "transformers")


class EngineKeywords(TypedDict, total=False):
    """Keyword arguments of `minifloat.engine.Engine`, for functions that make one."""

    dtype: str | None
    device: str
    kv_cache_memory: int | None
    kv_cache_dtype: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    lm_head: str
    activations: str
    packed_cache: str | os.PathLike[str] | None
    prefix_cache: bool
    runner: str
    impl: str
    revision: str | None
    speculate: str | None
    draft: str | None
    draft_tokens: int
    deterministic: bool


@dataclass(frozen=True)
class EngineOptions:
    """How a model is opened.

    Attributes:
        dtype: Dtype of the activations, a name in `DTYPES`; None: that of the checkpoint.
        kv_cache_memory: Bytes of the KV cache; None: chosen from the memory that is available.
        max_model_len: Tokens of the longest sequence; None: what model and cache hold.
        packed_cache: Folder of packed weights, which the native decoder maps or writes; None: it packs.
        speculate: "self" drafts tokens by a copy of the model in MXFP4, "prompt" by what followed the same tokens
            before, "draft" by the checkpoint `draft`; None: no drafts.
    """

    dtype: str | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    prefix_cache: bool = True
    lm_head: str = "auto"
    activations: str = "auto"
    packed_cache: Path | None = None
    runner: str = "auto"
    impl: str = "auto"
    device: str = "cpu"
    speculate: str | None = None
    draft: str | None = None
    draft_tokens: int = DRAFT_TOKENS
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.draft is not None and self.speculate not in (None, "draft"):
            raise UsageError(f"draft: goes with speculate='draft', not with {self.speculate!r}")
        if self.speculate == "draft" and self.draft is None:
            raise UsageError("speculate: 'draft' needs the folder of a draft model (draft)")
        for kind, name, table in (
            ("dtype", self.dtype or "bfloat16", tuple(DTYPES)),
            ("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_DTYPES)),
            ("lm_head", self.lm_head, LM_HEADS),
            ("activations", self.activations, ENGINE_ACTIVATIONS),
            ("runner", self.runner, _RUNNERS),
            ("speculate", self.speculate or "self", SPECULATIONS),
        ):
            if name not in table:
                raise UnknownNameError(kind, name, table)
        for field in ("kv_cache_memory", "max_model_len", "max_num_seqs", "draft_tokens"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UsageError(f"{field}: expected at least 1, got {value}")

        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        if self.device != "cpu" or self.runner == "device":
            where = "runner 'device'" if self.device == "cpu" else f"device {self.device}"
            raise UsageError(
                f"deterministic: only the native decoder of the CPU has it, and not {where}: its products choose the "
                "order of their sums by the number of rows"
            )
        if self.runner == "transformers":
            raise UsageError("deterministic: runner 'transformers' multiplies with torch, which does not promise it")
        if self.impl == "reference":
            raise UsageError("deterministic: impl 'reference' multiplies with torch, which does not promise it")
        if self.activations == "int8":
            raise UsageError(
                "deterministic: excludes activations int8, which rounds inputs only where a step has many rows"
            )

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The dtype of the activations; None: that of the checkpoint."""
        return None if self.dtype is None else DTYPES[self.dtype]
