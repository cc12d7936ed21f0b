"""`EngineOptions`: every option of an engine with its default. Imports no torch, so that commands can list them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from minifloat.errors import UsageError
from minifloat.numerics.ranges import Bytes, Count, check_fields

Dtype = Literal["bfloat16", "float16", "float32"]
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True)
class EngineOptions:
    """How an engine opens a model and runs it.

    Attributes:
        device: Where to compute: cpu, cuda or cuda:N.
        dtype: Dtype of the activations; None: that of config.json.
        max_model_len: Tokens of the longest sequence, prompt and answer; None: what model and cache hold.
        max_num_seqs: Sequences that run at a time; others wait. Fewer run where their states do not fit.
        max_num_batched_tokens: Tokens that one step computes; None: 512, on a GPU 4096.
        kv_cache_memory: Memory of the KV cache and of states of sequences; None: up to 1 GiB and the states, on a GPU
            most of what the weights leave free.
        kv_cache_dtype: Dtype of the KV cache. auto: FP8 where the checkpoint has scales for it, else that of the
            activations.
        lm_head: Output layer. auto: FP8 per channel beside weights that minifloat rounded to the nearest codes of
            MXFP4, else as it is stored; bf16: as it is stored; fp8: FP8 unless it is stored quantized.
        activations: Inputs of linears, for prompts and batches. int8 (CPU), fp8 (GPU, with a second copy of the
            weights): rounded, faster, less exact; auto: fp8 on a GPU where the checkpoint declares it, else bf16.
        prefix_cache: Share the keys and values of equal beginnings of prompts, and copies of states there.
        speculate: Draft tokens that one step verifies together, by the model's own copy in MXFP4 (self), by what
            followed the same tokens before (prompt) or by another model (draft); None: no, unless `draft` is given.
        draft: A smaller model that drafts, of the same tokenizer: a folder or a model of the hub.
        draft_tokens: Drafts per sequence and step at most; measured times and acceptance choose how many.
        task: What a checkpoint does that states how it makes a vector or a score of a text. auto: that; generate: it
            generates, as all others do.
        deterministic: The same bits whatever else runs: batch, chunks, prefixes from the cache, drafts, threads. Only
            the native decoder of the CPU has it; it costs some speed.
        runner: Code that computes; auto: the decoder of the device where it covers the model, else transformers'.
        impl: Implementation of the kernels, as in `minifloat.load`.
    """

    device: str = "cpu"
    dtype: Dtype | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count = 64
    max_num_batched_tokens: Count | None = None
    kv_cache_memory: Bytes | None = None
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "float32"] = "auto"
    lm_head: Literal["auto", "bf16", "fp8"] = "auto"
    activations: Literal["auto", "bf16", "int8", "fp8"] = "auto"
    prefix_cache: bool = True
    speculate: Literal["self", "prompt", "draft"] | None = None
    draft: str | None = None
    draft_tokens: Count = 7  # with one sequence, a step of one token and seven drafts reads the weights once
    task: Literal["auto", "generate"] = "auto"
    deterministic: bool = False
    runner: Literal["auto", "native", "device", "transformers"] = "auto"
    impl: str = "auto"

    def __post_init__(self) -> None:
        if self.draft is not None and self.speculate not in (None, "draft"):
            raise UsageError(f"draft: goes with speculate='draft', not with {self.speculate!r}")
        if self.speculate == "draft" and self.draft is None:
            raise UsageError("speculate: 'draft' needs the folder of a draft model (draft)")
        check_fields(self)
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
