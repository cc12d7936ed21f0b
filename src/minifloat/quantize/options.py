"""What `quantize_checkpoint`, `preview_quantization` and `convert_checkpoint` take beside models, text and statistics.

Imports nothing heavy, so that commands can list the options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from minifloat.engine.options import Dtype
from minifloat.errors import UsageError
from minifloat.model.plan.overrides import Override
from minifloat.numerics.ranges import Bytes, Count, check_fields


@dataclass(frozen=True)
class Budget:
    """One bound; exactly one of the three is given.

    Attributes:
        bits: Bits per weight of the linears and experts of the decoder layers, scales included.
        nbytes: Bytes of all tensors of the output.
        max_kl: KL divergence from the original model on held-out text, in nats per token.

    Raises:
        UsageError: None or several bounds are given, or one is not a positive number.
    """

    bits: float | None = None
    nbytes: int | None = None
    max_kl: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in self._bounds.items() if value is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise UsageError(f"a budget is one of {', '.join(self._bounds)}; got {found}")
        name, value = next(iter(given.items()))
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name}: expected a positive number, got {value}")

    @property
    def _bounds(self) -> dict[str, float | int | None]:
        return {"--target-bits": self.bits, "--target-bytes": self.nbytes, "--max-kl": self.max_kl}

    def __str__(self) -> str:
        """Return the bound in words, for messages."""
        if self.bits is not None:
            return f"{self.bits:g} bits per weight"
        return f"{self.nbytes:,} bytes" if self.nbytes is not None else f"a KL divergence of {self.max_kl:g}"

    def to_dict(self) -> dict[str, Any]:
        """Return the bound as JSON values."""
        return {"bits": self.bits, "bytes": self.nbytes, "max_kl": self.max_kl}


@dataclass(frozen=True)
class GgufOptions:
    """How a checkpoint is written as a GGUF file.

    Attributes:
        fp8: Type of weights that GGUF has no codes for, as FP8: q8_0 or bf16; both round, and the report says how much.
        embedding: Type of the embedding and of the output layer: bf16 or q8_0; None: as stored.
        max_size: Bytes of tensors in a file; a larger model becomes several files, which llama.cpp loads together;
            None: one file.
        pre_tokenizer: llama.cpp's name for the way a tokenizer of GPT-2's kind splits words; None: found.
    """

    fp8: Literal["q8_0", "bf16"] = "q8_0"
    embedding: Literal["bf16", "q8_0"] | None = None
    max_size: Bytes | None = None
    pre_tokenizer: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class QuantizeOptions:
    """How a checkpoint is quantized.

    Attributes:
        layout: compressed-tensors, fp8 (DeepSeek), gpt-oss, mlx or gguf; None: gpt-oss for its experts in mxfp4, else
            the first.
        overrides: ``REGEX=SCHEME`` or ``REGEX=bf16``; the last override that matches a module decides.
        method: How codes are chosen: nearest, gptq or match; None: match with data, else nearest.
        budget: Bits, bytes or KL divergence within which the formats of fused groups of weights are chosen; needs
            data. `overrides` keep the format of the modules that they match.
        kv_cache: Whether to write scales of an FP8 KV cache; needs activation statistics or data.
        from_quantized: Whether to decode a source that is quantized already, row by row, and quantize its values again.
            Weights that it stores in the format of the scheme keep their codes and scales.
        target: Refuse what will not load there, e.g. vllm:h100:tp4; the default scheme becomes one that does.
        lm_head: Format of the output layer: bf16 (kept), fp8 (a scale per row) or mxfp8. One that is tied to the
            embedding has none of its own.
        embedding: Format of the embedding, and of an output layer that is tied to it: bf16 (kept) or fp8 (a scale per
            row). Servers other than minifloat do not load it.
        mtp: Whether to quantize layers of multi-token prediction too, which are kept otherwise.
        allow_partial: Whether to accept that less than half of the linear weights is quantized.
        allow_nonfinite: Regular expression on names of tensors that are copied although they hold NaN or Inf; None: no
            tensor.
        device: Where to cast: cpu, cuda or cuda:N. The output is the same, bit for bit; the sums of errors in the
            report differ by the order of summation.
        impl: Implementation of the cast: "auto", "cpu", "reference" or "triton"; CUDA devices run "triton".
        workers: Threads; None: one per core, at most 8.
        overwrite: Whether to replace the destination if it exists, once the new checkpoint is complete.
        revision: Branch, tag or commit of a model of the hub.
        base_model: For the model card: the source's id on the hub, if the source is a folder.
        gguf: Types in a GGUF file.
    """

    layout: str | None = None
    overrides: Sequence[str | Override] = ()
    method: str | None = None
    budget: Budget | None = None
    kv_cache: bool = False
    from_quantized: bool = False
    target: str | None = None
    lm_head: Literal["bf16", "fp8", "mxfp8"] = "bf16"
    embedding: Literal["bf16", "fp8"] = "bf16"
    mtp: bool = False
    allow_partial: bool = False
    allow_nonfinite: str | None = None
    device: str = "cpu"
    impl: str = "auto"
    workers: Count | None = None
    overwrite: bool = False
    revision: str | None = None
    base_model: str | None = None
    gguf: GgufOptions = field(default_factory=GgufOptions)

    def __post_init__(self) -> None:
        check_fields(self)

    def parsed_overrides(self) -> list[Override]:
        return [item if isinstance(item, Override) else Override.parse(item) for item in self.overrides]


DEFAULT_OPTIONS = QuantizeOptions()


@dataclass(frozen=True)
class ConvertOptions:
    """How a quantized checkpoint is converted.

    Attributes:
        dequantize: Whether to write plain weights in place of codes and scales.
        dtype: Dtype of plain weights; None: that of config.json.
        allow_rounding: Whether to round NVFP4 scales whose reciprocal, which some layouts store, is no float32.
        allow_nonfinite: Regular expression on names of tensors that are copied although they hold NaN or Inf; None: no
            tensor.
        workers: Threads; None: one per core, at most 8.
        overwrite: Whether to replace the destination if it exists, once the new checkpoint is complete.
        revision: Branch, tag or commit of a model of the hub.
    """

    dequantize: bool = False
    dtype: Dtype | None = None
    allow_rounding: bool = False
    allow_nonfinite: str | None = None
    workers: Count | None = None
    overwrite: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
