"""compressed-tensors' schemes on a CPU that vLLM decides on before it looks into a table of kernels.

vLLM lets a plugin replace a quantization config (`register_quantization_config`). This one differs from vLLM's in two
schemes, and only on a CPU, because it is registered only there:

- NVFP4 with 16-bit inputs: vLLM asks for Marlin, which needs a GPU, without looking into its table.
- FP8 per tensor with quantized inputs: vLLM rounds the weights of fused layers again, to one scale, by an operator
  that its build for CPUs does not have. Its own scheme for 16-bit inputs keeps each scale.

Source: vLLM 0.32.0, `compressed_tensors.py: _get_scheme_from_parts`, `kernels/linear/__init__.py:
init_nvfp4_linear_kernel`, `w8a8_utils.py: requantize_with_max_scale`.
"""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationStrategy
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import NvFp4LinearLayerConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsW4A4Fp4,
    CompressedTensorsW8A16Fp8,
)

from minifloat.serve.vllm_plugin.kernels import MinifloatNvfp4LinearKernel

_LOG = init_logger("vllm.minifloat")


class WeightOnlyNvfp4(CompressedTensorsW4A4Fp4):
    """NVFP4 with 16-bit inputs, multiplied by our kernel."""

    def __init__(self) -> None:
        self.use_a16 = True
        self.group_size = 16
        self.kernel = MinifloatNvfp4LinearKernel(NvFp4LinearLayerConfig())
        _LOG.info_once("Using %s for NVFP4 GEMM", MinifloatNvfp4LinearKernel.__name__)  # as vLLM does


class MinifloatCompressedTensorsConfig(CompressedTensorsConfig):
    """vLLM's config of compressed-tensors, with these schemes."""

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_nvfp4_format(weight_quant) and input_quant is None:
            return WeightOnlyNvfp4()
        per_tensor = weight_quant.strategy == QuantizationStrategy.TENSOR
        if per_tensor and weight_quant.num_bits == 8 and self._is_fp8_w8a8(weight_quant, input_quant):
            return CompressedTensorsW8A16Fp8(weight_quant, is_static_input_scheme=not input_quant.dynamic)
        return super()._get_scheme_from_parts(weight_quant, input_quant, *args, **kwargs)
