"""`QuantizeOptions`: what `quantize_checkpoint` and `preview_quantization` take beside models, text and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.model.plan.overrides import Override
from minifloat.quantize.rounding.budget.target import Budget


@dataclass(frozen=True)
class QuantizeOptions:
    """How a checkpoint is quantized.

    Attributes:
        layout: A name of `layouts.WRITERS`; by default compressed-tensors, and for gpt-oss in MXFP4 its own.
        overrides: ``REGEX=SCHEME`` or ``REGEX=bf16``; the last override that matches a module decides.
        method: A name of `minifloat.quantize.rounding.methods.METHODS`; by default ``"match"`` with data.
        budget: Bits, bytes or KL divergence within which the formats of fused groups of weights are chosen; needs
            data. `overrides` keep the format of the modules that they match.
        kv_cache: Write scales of an FP8 KV cache; needs activation statistics or data.
        from_quantized: The source is quantized already. It is decoded row by row, and errors are against its
            dequantized values. Weights that it stores in the format of the scheme keep their codes and scales.
        target: Where the output is to run, as in ``"vllm:h100:tp4"``; a checkpoint that would not load is an error.
        mtp: Quantize layers of multi-token prediction too, which are kept otherwise.
        allow_partial: Accept that less than half of the linear weights is quantized, which is an error otherwise.
        device: Where weights are cast: "cpu", "cuda" or "cuda:N". The output is the same, bit for bit; the sums of
            errors in the report differ by the order of summation.
        impl: Implementation of the cast: "auto", "cpu", "reference" or "triton"; CUDA devices run "triton".
        workers: Threads; by default one per core that this process may use, at most 8.
        overwrite: Replace an existing destination, at the end.
        revision: Branch, tag or commit of a model of the hub, as in `minifloat.checkpoint.hub.model_folder`.
        base_model: For the model card: the source's id on the hub, where the source is a folder.
    """

    layout: str | None = None
    overrides: Sequence[str | Override] = ()
    method: str | None = None
    budget: Budget | None = None
    kv_cache: bool = False
    from_quantized: bool = False
    target: str | None = None
    mtp: bool = False
    allow_partial: bool = False
    device: str = "cpu"
    impl: str = "auto"
    workers: int | None = None
    overwrite: bool = False
    revision: str | None = None
    base_model: str | None = None

    def parsed_overrides(self) -> list[Override]:
        """Return the overrides, those that are text parsed."""
        return [item if isinstance(item, Override) else Override.parse(item) for item in self.overrides]


DEFAULT_OPTIONS = QuantizeOptions()
