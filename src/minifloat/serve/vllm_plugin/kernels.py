"""The kernel classes that vLLM's tables hold, and what replaces vLLM's classes where it has no table.

All of them are weight-only: inputs stay in 16 bits, as `minifloat serve` leaves them on a CPU, also where a checkpoint
declares that inputs are quantized. BF16 linears are replaced only where that was measured to be faster: x86 with
AVX-512 BF16 instructions and without AMX.

Source: vLLM 0.32.0 and 0.33.0, `model_executor/kernels/linear`, `compressed_tensors.py: _get_scheme_from_parts`,
`w8a8_utils.py: requantize_with_max_scale`, `custom_op.py: PluggableLayer`, `layers/linear.py: UnquantizedLinearMethod`.
"""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import Tensor
from vllm import envs
from vllm.logger import init_logger
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    MxFp4LinearKernel,
    Mxfp8LinearKernel,
    Mxfp8LinearLayerConfig,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW8A16Fp8,
)
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from minifloat.kernels import native, threads
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.pack import why_not
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, block_granularity
from minifloat.numerics.scheme import WeightSpec
from minifloat.serve.vllm_plugin import experts, packed

_LOG = init_logger("vllm.minifloat")

Answer = tuple[bool, str | None]


class WeightOnly:
    """What the kernels of all formats share."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> Answer:
        return (True, None) if current_platform.is_cpu() else (False, "requires a CPU.")

    @classmethod
    def can_implement(cls, _: Any) -> Answer:
        """Return whether the kernel multiplies the weights of a layer, and why not."""
        return True, None

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
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
        if c.bmm_batch_size is not None:
            return False, "has no batched products"
        reason = why_not(packed.MXFP8, tuple(c.weight_shape), "cpu")
        return not reason, reason or None

    def process_weights_after_loading(self, layer: Any) -> None:
        self.announce()
        packed.hold(layer, packed.mxfp8(layer.weight.data, layer.weight_scale.data))


class MinifloatMxfp4LinearKernel(WeightOnly, MxFp4LinearKernel):
    """MXFP4: E2M1 with an E8M0 scale per 32 elements."""

    def process_weights_after_loading(self, layer: Any) -> None:
        self.announce()
        packed.hold(layer, packed.mxfp4(layer.weight.data, layer.weight_scale.data))


class MinifloatNvfp4LinearKernel(WeightOnly, NvFp4LinearKernel):
    """NVFP4: E2M1 with an E4M3 scale per 16 elements and a float32 scale per tensor."""

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


class WeightOnlyNvfp4(CompressedTensorsW4A4Fp4):
    """NVFP4 with 16-bit inputs, multiplied by our kernel."""

    def __init__(self) -> None:
        self.use_a16 = True
        self.group_size = 16
        self.kernel = MinifloatNvfp4LinearKernel(NvFp4LinearLayerConfig())
        _LOG.info_once("Using %s for NVFP4 GEMM", MinifloatNvfp4LinearKernel.__name__)  # as vLLM does


class MinifloatCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's config of compressed-tensors, with other schemes where vLLM decides before it looks into a table."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        method = experts.method_of(self, layer, prefix) if isinstance(layer, RoutedExperts) else None
        return super().get_quant_method(layer, prefix) if method is None else method

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_nvfp4_format(weight_quant) and input_quant is None:
            # vLLM asks for Marlin, which needs a GPU
            return WeightOnlyNvfp4()
        # vLLM rounds the weights of fused layers again, to one scale, by an operator that its build for CPUs lacks;
        # its own scheme for 16-bit inputs keeps each scale
        per_tensor = weight_quant.strategy == QuantizationStrategy.TENSOR
        if per_tensor and weight_quant.num_bits == 8 and self._is_fp8_w8a8(weight_quant, input_quant):
            return CompressedTensorsW8A16Fp8(weight_quant, is_static_input_scheme=not input_quant.dynamic)
        return super()._get_scheme_from_parts(weight_quant, input_quant, *args, **kwargs)


#: Layers whose BF16 weights are packed after loading, where vLLM gives them to oneDNN.
LAYERS: tuple[type, ...] = (
    linear.ReplicatedLinear,
    linear.ColumnParallelLinear,
    linear.MergedColumnParallelLinear,
    linear.QKVParallelLinear,
    linear.RowParallelLinear,
    vocab_parallel_embedding.VocabParallelEmbedding,
    vocab_parallel_embedding.ParallelLMHead,
)


class MinifloatBf16LinearMethod(UnquantizedLinearMethod):
    """vLLM's method for unquantized linears, with packed weights."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight, if it is a BF16 matrix that is only multiplied."""
        if packed.is_read_elsewhere(layer) or not packed.is_bf16_matrix(layer.weight):
            super().process_weights_after_loading(layer)
            return
        _LOG.info_once("Using %s for BF16 GEMM", type(self).__name__)
        packed.hold(layer, layer.weight.data)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if packed.is_held(layer):
            return packed.multiply(layer, x, bias)
        theirs: Tensor = super().apply(layer, x, bias)
        return theirs


class MinifloatBf16EmbeddingMethod(UnquantizedEmbeddingMethod):
    """vLLM's method for unquantized embeddings and output layers; the table of an output layer is packed beside it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave a BF16 table as it is."""
        if not packed.is_bf16_matrix(layer.weight):
            super().process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not packed.is_bf16_matrix(layer.weight):
            theirs: Tensor = super().apply(layer, x, bias)
            return theirs
        # An embedding may be an output layer too: packed when first multiplied, one that is none needs no second copy.
        if not packed.is_held(layer):
            packed.hold(layer, layer.weight.data, keep=True)
        return packed.multiply(layer, x, bias)


_METHODS: dict[type, type] = {
    UnquantizedLinearMethod: MinifloatBf16LinearMethod,
    UnquantizedEmbeddingMethod: MinifloatBf16EmbeddingMethod,
}


def why_not_bf16() -> str:
    """Return why BF16 layers are left to vLLM; empty if they are replaced."""
    if MinifloatBf16LinearMethod.__name__ in envs.VLLM_DISABLED_KERNELS:
        return "VLLM_DISABLED_KERNELS says so"
    if torch.cpu._is_amx_tile_supported():
        return "the processor has AMX, which vLLM uses and minifloat does not"
    if native.isa() != "avx512_bf16":
        return f"minifloat's kernels for {native.isa()} were not compared with vLLM's"
    return ""


def replace_bf16_layers() -> None:
    """Replace the classes of vLLM's layers, except those that another plugin has replaced."""
    for layer in LAYERS:
        if layer.__name__ not in op_registry_oot:
            PluggableLayer.register_oot(name=layer.__name__)(_packing(layer))


def _packing(layer: Any) -> type:
    """Return a subclass of a layer that packs an unquantized weight."""

    class Packing(layer):
        quant_method: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            method = _METHODS.get(type(self.quant_method))
            if method is not None:
                self.quant_method = method()

    Packing.__name__ = Packing.__qualname__ = f"Minifloat{layer.__name__}"
    Packing.__doc__ = layer.__doc__
    return Packing
