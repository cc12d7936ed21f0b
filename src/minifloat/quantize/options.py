"""What `quantize_checkpoint`, `preview_quantization` and `convert_checkpoint` take beside models, text and statistics.

Imports nothing heavy, so that commands can list the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minifloat.engine.options import Dtype
from minifloat.model.plan.overrides import Override
from minifloat.numerics.ranges import Count, check_fields
from minifloat.quantize.rounding.budget.target import Budget


@dataclass(frozen=True)
class QuantizeOptions:
    """How a checkpoint is quantized.

    Attributes:
        layout: compressed-tensors, fp8 (DeepSeek) or gpt-oss; None: gpt-oss for its experts in mxfp4, else the first.
        overrides: ``REGEX=SCHEME`` or ``REGEX=bf16``; the last override that matches a module decides.
        method: How codes are chosen: nearest, gptq, match or tune; None: match with data, else nearest.
        budget: Bits, bytes or KL divergence within which the formats of fused groups of weights are chosen; needs
            data. `overrides` keep the format of the modules that they match.
        kv_cache: Whether to write scales of an FP8 KV cache; needs activation statistics or data.
        from_quantized: Whether to decode a source that is quantized already, row by row, and quantize its values again.
            Weights that it stores in the format of the scheme keep their codes and scales.
        target: Refuse what will not load there, e.g. vllm:h100:tp4; the default scheme becomes one that does.
        mtp: Whether to quantize layers of multi-token prediction too, which are kept otherwise.
        allow_partial: Whether to accept that less than half of the linear weights is quantized.
        device: Where to cast: cpu, cuda or cuda:N. The output is the same, bit for bit; the sums of errors in the
            report differ by the order of summation.
        impl: Implementation of the cast: "auto", "cpu", "reference" or "triton"; CUDA devices run "triton".
        workers: Threads; None: one per core, at most 8.
        overwrite: Whether to replace the destination if it exists, once the new checkpoint is complete.
        revision: Branch, tag or commit of a model of the hub.
        base_model: For the model card: the source's id on the hub, if the source is a folder.
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
    workers: Count | None = None
    overwrite: bool = False
    revision: str | None = None
    base_model: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def parsed_overrides(self) -> list[Override]:
        """Return the overrides, those that are text parsed."""
        return [item if isinstance(item, Override) else Override.parse(item) for item in self.overrides]


DEFAULT_OPTIONS = QuantizeOptions()


@dataclass(frozen=True)
class ConvertOptions:
    """How a quantized checkpoint is converted.

    Attributes:
        dequantize: Whether to write plain weights in place of codes and scales.
        dtype: Dtype of plain weights; None: that of config.json.
        allow_rounding: Whether to round NVFP4 scales whose reciprocal, which some layouts store, is no float32.
        workers: Threads; None: one per core, at most 8.
        overwrite: Whether to replace the destination if it exists, once the new checkpoint is complete.
        revision: Branch, tag or commit of a model of the hub.
    """

    dequantize: bool = False
    dtype: Dtype | None = None
    allow_rounding: bool = False
    workers: Count | None = None
    overwrite: bool = False
    revision: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
