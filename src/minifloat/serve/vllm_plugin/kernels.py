"""The kernel classes that vLLM's tables hold: which layers they take, what they do after loading and in a step.

All of them are weight-only: inputs stay in 16 bits, as `minifloat serve` leaves them on a CPU, also where a checkpoint
declares that inputs are quantized.

Source: vLLM 0.32.0, `model_executor/kernels/linear`, whose classes these implement.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    MxFp4LinearKernel,
    MxFp4LinearLayerConfig,
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.platforms import current_platform

from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.pack import why_not
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, block_granularity
from minifloat.numerics.scheme import WeightSpec
from minifloat.serve.vllm_plugin import packed

_LOG = init_logger("vllm.minifloat")

Answer = tuple[bool, str | None]


class WeightOnly:
    """What the kernels of all formats share."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        """Return whether the kernel runs here, and why not."""
        return (True, None) if current_platform.is_cpu() else (False, "requires a CPU.")

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        """Return ``x @ weight.T + bias``: ``[..., K]`` to ``[..., N]``."""
        return packed.multiply(layer, x, bias)

    def announce(self) -> None:
        """Log once that inputs stay as they are, and what computes."""
        _LOG.info_once(
            "minifloat: inputs of quantized linears stay in 16 bits, also where the checkpoint declares quantized "
            "inputs (kernels for %s, %d threads)",
            native.isa(),
            threads.count(),
        )


class MinifloatFp8LinearKernel(WeightOnly, FP8ScaledMMLinearKernel):
    """FP8 with a scale per tensor, per row, or per block."""

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> Answer:
        """Return whether the kernel multiplies the weights of a layer, and why not."""
        if c.input_dtype not in DTYPES or c.out_dtype != c.input_dtype:
            return False, f"has no inputs in {c.input_dtype} and outputs in {c.out_dtype}"
        group = c.weight_quant_key.scale.group_shape
        if group.is_per_tensor():
            granularity = TENSOR
        elif group.is_per_channel() or group.is_per_token():
            granularity = CHANNEL
        else:
            granularity = block_granularity(group.row, group.col)
        reason = why_not(WeightSpec(E4M3, granularity), tuple(c.weight_shape), "cpu")
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight; vLLM has transposed it, except if its scales are per block."""
        self.announce()
        _LOG.info_once("Using %s for FP8 GEMM", type(self).__name__)  # vLLM logs the choice of most of its tables
        block = getattr(layer, "weight_block_size", None)
        scale = getattr(layer, "weight_scale_inv", None)
        scale = layer.weight_scale if scale is None else scale
        codes = layer.weight.data if block is not None else layer.weight.data.t()
        packed.hold(layer, packed.fp8(codes, scale.data, None if block is None else (block[0], block[1])))

    def apply_scaled_mm(self, **_: Any) -> Tensor:
        """Never called, since `apply_weights` does not quantize inputs."""
        raise NotImplementedError("inputs are not quantized")


class MinifloatMxfp8LinearKernel(WeightOnly, Mxfp8LinearKernel):
    """MXFP8: E4M3 with an E8M0 scale per 32 elements."""

    @classmethod
    def can_implement(cls, c: Mxfp8LinearLayerConfig) -> Answer:
        """Return whether the kernel multiplies the weights of a layer, and why not."""
        if c.bmm_batch_size is not None:
            return False, "has no batched products"
        reason = why_not(packed.MXFP8, tuple(c.weight_shape), "cpu")
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight."""
        self.announce()
        packed.hold(layer, packed.mxfp8(layer.weight.data, layer.weight_scale.data))


class MinifloatMxfp4LinearKernel(WeightOnly, MxFp4LinearKernel):
    """MXFP4: E2M1 with an E8M0 scale per 32 elements."""

    @classmethod
    def can_implement(cls, config: MxFp4LinearLayerConfig) -> Answer:
        """Return that the kernel multiplies every layer."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight."""
        self.announce()
        packed.hold(layer, packed.mxfp4(layer.weight.data, layer.weight_scale.data))


class MinifloatNvfp4LinearKernel(WeightOnly, NvFp4LinearKernel):
    """NVFP4: E2M1 with an E4M3 scale per 16 elements and a float32 scale per tensor."""

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> Answer:
        """Return that the kernel multiplies every layer."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight; vLLM has inverted the scale of the tensor, so that it multiplies."""
        self.announce()
        weight = packed.nvfp4(layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data)
        packed.hold(layer, weight)


#: Type of `vllm.model_executor.kernels.linear.register_linear_kernel`, or the table's name -> kernel.
TABLES: dict[str, type] = {
    "_POSSIBLE_FP8_KERNELS": MinifloatFp8LinearKernel,
    "_POSSIBLE_FP8_BLOCK_KERNELS": MinifloatFp8LinearKernel,
    "_POSSIBLE_WFP8A16_KERNELS": MinifloatFp8LinearKernel,
    "_POSSIBLE_MXFP8_KERNELS": MinifloatMxfp8LinearKernel,
    "_POSSIBLE_MXFP4_KERNELS": MinifloatMxfp4LinearKernel,
    "_POSSIBLE_NVFP4_KERNELS": MinifloatNvfp4LinearKernel,
}
