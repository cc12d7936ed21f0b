"""Which kernel an engine chooses for linears and experts: the name that a server's log should show."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from minifloat.deploy.check import vllm_plugin
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, NVFP4_KINDS, Case, Kind
from minifloat.deploy.check.target import BEFORE_BLACKWELL, BEFORE_HOPPER, CPUS, HOPPER, LOCALS, NVIDIA
from minifloat.model.layouts import compressed_tensors, fp8, gguf, gpt_oss, mlx


@dataclass(frozen=True)
class EngineKernel:
    """The kernel that an engine chooses for linears, or experts, of some kinds."""

    engine: str
    hardware: tuple[str, ...]
    kinds: tuple[Kind, ...]
    name: str
    computes: str
    confirmed: bool = False
    layout: str | None = None  # layout of the checkpoint; None: every layout that the engine reads
    experts: bool = False
    without_flashinfer: str = ""  # what is chosen where vLLM cannot use FlashInfer; empty: the same
    source: str = ""  # the function that chooses


_CT, _FP8, _GPT_OSS = compressed_tensors.NAME, fp8.NAME, gpt_oss.NAME
_ADA_UP = ("l40s", *HOPPER, "b200")
_W8A8 = (Kind.FP8_STATIC, Kind.FP8_DYNAMIC)
_WEIGHT_ONLY = "16-bit inputs"
_FP8_INPUTS = "FP8 inputs"
_DECODED = "BF16, decoded at load or at the first pass"
_MLX = (Kind.MXFP4, Kind.NVFP4, Kind.MXFP8)
_GGUF = (*MXFP4_KINDS, *NVFP4_KINDS)
_ALL_KINDS = tuple(kind for kind in Kind if kind is not Kind.OTHER)

_LINEARS, _MOE = "kernels/linear/__init__.py", "layers/fused_moe/oracle"
_fp8 = partial(EngineKernel, "vllm", source=f"{_LINEARS}: init_fp8_linear_kernel")
_w8a16 = partial(EngineKernel, "vllm", source=f"{_LINEARS}: init_wfp8_a16_linear_kernel")
_mxfp8 = partial(EngineKernel, "vllm", source=f"{_LINEARS}: init_mxfp8_linear_kernel")
_mxfp4 = partial(EngineKernel, "vllm", source=f"{_LINEARS}: init_mxfp4_linear_kernel")
_nvfp4 = partial(EngineKernel, "vllm", source=f"{_LINEARS}: init_nvfp4_linear_kernel")
_experts = partial(EngineKernel, "vllm", experts=True)
_fp8_experts = partial(_experts, source=f"{_MOE}/fp8.py: select_fp8_moe_backend")
_ct_experts = partial(_fp8_experts, layout=_CT)
_mxfp8_experts = partial(_experts, source=f"{_MOE}/mxfp8.py: select_mxfp8_moe_backend")
_mxfp4_experts = partial(
    _experts, layout=_CT, source="compressed_tensors_moe_w4a4_mxfp4.py: CompressedTensorsW4A4Mxfp4MoEMethod"
)
_w4a8_experts = partial(_experts, layout=_CT, source=f"{_MOE}/mxfp4.py: select_deepseek_v4_mxfp4_moe_backend")
_nvfp4_experts = partial(_experts, source=f"{_MOE}/nvfp4.py: select_nvfp4_moe_backend")
_ADA, _B200, _MI300 = ("l40s",), ("b200",), ("mi300",)
_BLOCKS, _STATIC, _DYNAMIC, _W8A16 = (Kind.FP8_BLOCK,), (Kind.FP8_STATIC,), (Kind.FP8_DYNAMIC,), (Kind.FP8_WEIGHT_ONLY,)
_W4A8 = (Kind.MXFP4_W4A8,)
_NOT_W4A8 = (Kind.MXFP4, Kind.MXFP4_W4A4)
_MARLIN_MXFP4 = "MarlinMxFp4LinearKernel, 16-bit inputs"
_CUTLASS_EXPERTS, _TRTLLM_FP8 = "TritonOrCutlassExperts", "TrtLlmFp8ExpertsMonolithic"

#: What vLLM 0.33.0 chooses on GPUs for models in BF16 without environment variables, where Humming is installed, which
#: its package requires. FlashInfer counts only with its compiled kernels or nvcc (utils/flashinfer.py: has_flashinfer).
VLLM_ON_GPUS: tuple[EngineKernel, ...] = (
    _w8a16(("a100",), (*_W8A8, *_BLOCKS), "HummingFP8ScaledMMLinearKernel", _WEIGHT_ONLY, layout=_CT),
    _fp8(("a100",), (*_W8A8, *_BLOCKS), "MarlinFP8ScaledMMLinearKernel", _WEIGHT_ONLY),
    _fp8(("l40s",), _BLOCKS, "MarlinFP8ScaledMMLinearKernel", _WEIGHT_ONLY),
    _fp8(
        HOPPER,
        _BLOCKS,
        "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
        _FP8_INPUTS,
        without_flashinfer="DeepGemmFp8BlockScaledMMKernel",
    ),
    _fp8(_B200, _BLOCKS, "DeepGemmFp8BlockScaledMMKernel", _FP8_INPUTS),
    _fp8((*_ADA, *HOPPER), _W8A8, "CutlassFP8ScaledMMLinearKernel", _FP8_INPUTS),
    _fp8(
        _B200,
        _STATIC,
        "FlashInferFP8ScaledMMLinearKernel",
        _FP8_INPUTS,
        without_flashinfer="CutlassFP8ScaledMMLinearKernel",
    ),
    _fp8(_B200, _DYNAMIC, "CutlassFP8ScaledMMLinearKernel", _FP8_INPUTS),
    _w8a16(NVIDIA, _W8A16, "HummingFP8ScaledMMLinearKernel", _WEIGHT_ONLY),
    _mxfp8(BEFORE_HOPPER, MXFP8_KINDS, "MarlinMxfp8LinearKernel", _WEIGHT_ONLY),
    _mxfp8(HOPPER, MXFP8_KINDS, "HummingMxfp8LinearKernel", _WEIGHT_ONLY),
    _mxfp8(
        _B200,
        MXFP8_KINDS,
        "FlashInferCutedslMxfp8LinearKernel",
        "MXFP8 inputs",
        without_flashinfer="MarlinMxfp8LinearKernel, 16-bit inputs",
    ),
    _mxfp4(BEFORE_HOPPER, _NOT_W4A8, "MarlinMxFp4LinearKernel", _WEIGHT_ONLY),
    _mxfp4(HOPPER, _NOT_W4A8, "HummingMxFp4LinearKernel", "FP8 inputs, scaled per token"),
    _mxfp4(_B200, _NOT_W4A8, "FlashInferMxFp4LinearKernel", "MXFP4 inputs", without_flashinfer=_MARLIN_MXFP4),
    _mxfp4((*_ADA, *HOPPER, *_B200), _W4A8, "HummingMxFp4LinearKernel", "FP8 inputs, scaled per 32"),
    _nvfp4(BEFORE_HOPPER, NVFP4_KINDS, "MarlinNvFp4LinearKernel", _WEIGHT_ONLY),
    _nvfp4(HOPPER, NVFP4_KINDS, "HummingNvFp4LinearKernel", _WEIGHT_ONLY),
    _nvfp4(
        _B200,
        (Kind.NVFP4,),
        "FlashInferCuteDslNvFp4W4A16LinearKernel",
        _WEIGHT_ONLY,
        without_flashinfer="MarlinNvFp4LinearKernel",
    ),
    _nvfp4(
        _B200,
        (Kind.NVFP4_W4A4,),
        "FlashInferCuteDslNvFp4LinearKernel",
        "NVFP4 inputs",
        without_flashinfer="CutlassNvFp4LinearKernel",
    ),
    _fp8(_MI300, _BLOCKS, "TritonFp8BlockScaledMMKernel", _FP8_INPUTS),
    _fp8(_MI300, _STATIC, "ROCmFP8ScaledMMLinearKernel", _FP8_INPUTS),
    _fp8(_MI300, _DYNAMIC, "RowWiseTorchFP8ScaledMMLinearKernel", _FP8_INPUTS),
    _mxfp8(_MI300, MXFP8_KINDS, "EmulationMxfp8LinearKernel", _DECODED),
    _mxfp4(_MI300, MXFP4_KINDS, "EmulationMxfp4LinearKernel", _DECODED),
    _nvfp4(_MI300, (Kind.NVFP4_W4A4,), "EmulationNvFp4LinearKernel", _DECODED),
    _fp8_experts(("a100",), (*_W8A8, *_BLOCKS), "MarlinExperts", _WEIGHT_ONLY),
    _fp8_experts(_ADA, (*_W8A8, *_BLOCKS), "TritonExperts", _FP8_INPUTS),
    _fp8_experts(HOPPER, _BLOCKS, "TritonExperts", _FP8_INPUTS),
    _ct_experts(HOPPER, _STATIC, "FlashInferExperts", _FP8_INPUTS, without_flashinfer=_CUTLASS_EXPERTS),
    _ct_experts((*HOPPER, *_B200), _DYNAMIC, _CUTLASS_EXPERTS, _FP8_INPUTS),
    _fp8_experts(_B200, _BLOCKS, _TRTLLM_FP8, _FP8_INPUTS, without_flashinfer="TritonOrDeepGemmExperts"),
    _ct_experts(_B200, _STATIC, _TRTLLM_FP8, _FP8_INPUTS, without_flashinfer=_CUTLASS_EXPERTS),
    _mxfp8_experts(BEFORE_HOPPER, MXFP8_KINDS, "MarlinExperts", _WEIGHT_ONLY),
    _mxfp8_experts(HOPPER, MXFP8_KINDS, "HummingIndexedExperts", _WEIGHT_ONLY),
    _mxfp8_experts(_B200, MXFP8_KINDS, _TRTLLM_FP8, "MXFP8 inputs", without_flashinfer="DeepGemmExperts"),
    _mxfp4_experts(BEFORE_BLACKWELL, _NOT_W4A8, "MarlinExperts", _WEIGHT_ONLY),
    _mxfp4_experts(_B200, _NOT_W4A8, "CutlassExpertsMxfp4", "MXFP4 inputs"),
    _w4a8_experts(BEFORE_HOPPER, _W4A8, "MarlinExperts", _WEIGHT_ONLY),
    _w4a8_experts(HOPPER, _W4A8, "HummingIndexedExperts", "FP8 inputs"),
    _w4a8_experts(
        _B200,
        _W4A8,
        "TrtLlmMxfp4ExpertsMonolithic",
        "MXFP8 inputs",
        without_flashinfer="DeepGemmFP4Experts",
    ),
    _nvfp4_experts(BEFORE_HOPPER, NVFP4_KINDS, "MarlinExperts", _WEIGHT_ONLY),
    _nvfp4_experts(HOPPER, NVFP4_KINDS, "HummingIndexedExperts", _WEIGHT_ONLY),
    _nvfp4_experts(_B200, (Kind.NVFP4,), "MarlinExperts", _WEIGHT_ONLY),
    _nvfp4_experts(
        _B200,
        (Kind.NVFP4_W4A4,),
        "TrtLlmNvFp4ExpertsMonolithic",
        "NVFP4 inputs",
        without_flashinfer="CutlassExpertsFp4",
    ),
    _fp8_experts(_MI300, (*_W8A8, *_BLOCKS), "TritonExperts", _FP8_INPUTS),
    _mxfp8_experts(_MI300, MXFP8_KINDS, "Mxfp8EmulationTritonExperts", _DECODED),
    _w4a8_experts(_MI300, _W4A8, "OCP_MXQuantizationEmulationTritonExperts", _DECODED),
    _nvfp4_experts(_MI300, (Kind.NVFP4_W4A4,), "Nvfp4QuantizationEmulationTritonExperts", _DECODED),
)

KERNELS: tuple[EngineKernel, ...] = (
    EngineKernel("vllm", ("cpu",), (Kind.FP8_BLOCK,), "CPUFp8BlockScaledMMKernel (AMX)", _WEIGHT_ONLY, confirmed=True),
    EngineKernel(
        "vllm",
        ("cpu",),
        (Kind.FP8_DYNAMIC,),
        "ChannelWiseTorchFP8ScaledMMLinearKernel, since 0.33 CPUFp8ChannelWiseScaledMMLinearKernel (AMX)",
        "FP8 inputs, since 0.33 16-bit inputs",
    ),
    EngineKernel(
        "vllm", CPUS, (Kind.FP8_DYNAMIC,), "ChannelWiseTorchFP8ScaledMMLinearKernel", _FP8_INPUTS, confirmed=True
    ),
    *VLLM_ON_GPUS,
    EngineKernel(
        "vllm", ("cpu",), (Kind.MXFP4,), "the CPU's fused experts", _WEIGHT_ONLY, layout=_GPT_OSS, experts=True
    ),
    EngineKernel("sglang", ("a100",), _W8A8, "CompressedTensorsW8A16Fp8", _WEIGHT_ONLY, layout=_CT),
    EngineKernel("sglang", _ADA_UP, (*_W8A8, Kind.FP8_BLOCK), "CompressedTensorsW8A8Fp8", _FP8_INPUTS, layout=_CT),
    EngineKernel("sglang", NVIDIA, (Kind.FP8_WEIGHT_ONLY,), "CompressedTensorsW8A16Fp8", _WEIGHT_ONLY, layout=_CT),
    EngineKernel("sglang", ("mi300",), (*_W8A8, Kind.FP8_BLOCK), "CompressedTensorsW8A8Fp8", _FP8_INPUTS, layout=_CT),
    EngineKernel("sglang", ("a100",), (*_W8A8, Kind.FP8_BLOCK), "Fp8LinearMethod (Marlin)", _WEIGHT_ONLY, layout=_FP8),
    EngineKernel("sglang", (*_ADA_UP, "mi300"), (*_W8A8, Kind.FP8_BLOCK), "Fp8LinearMethod", _FP8_INPUTS, layout=_FP8),
    EngineKernel("sglang", ("cpu",), (Kind.FP8_BLOCK,), "fp8_scaled_mm_cpu (AMX)", _WEIGHT_ONLY, layout=_FP8),
    EngineKernel("sglang", ("b200",), MXFP8_KINDS, "Fp8LinearMethod", "MXFP8 inputs", layout=fp8.MXFP8_NAME),
    EngineKernel("sglang", NVIDIA, (Kind.NVFP4,), "CompressedTensorsW4A16Fp4 (Marlin)", _WEIGHT_ONLY, layout=_CT),
    EngineKernel("sglang", BEFORE_BLACKWELL, (Kind.NVFP4_W4A4,), "CompressedTensorsW4A16Fp4", _WEIGHT_ONLY, layout=_CT),
    EngineKernel("sglang", ("b200",), (Kind.NVFP4_W4A4,), "CompressedTensorsW4A4Fp4", "NVFP4 inputs", layout=_CT),
    EngineKernel("transformers", (*NVIDIA, "mi300"), tuple(Kind), "torch's BF16 linear", _DECODED, layout=_CT),
    EngineKernel("transformers", (*NVIDIA, "mi300"), tuple(Kind), "torch's BF16 linear", _DECODED, layout=gguf.NAME),
    EngineKernel("transformers", ("a100",), (Kind.FP8_BLOCK, Kind.OTHER), "torch's BF16 linear", _DECODED, layout=_FP8),
    EngineKernel(
        "transformers", _ADA_UP, (Kind.FP8_BLOCK,), "FP8Linear (DeepGEMM or Triton)", _FP8_INPUTS, layout=_FP8
    ),
    EngineKernel("transformers", CPUS, tuple(Kind), "torch's BF16 linear", _DECODED, confirmed=True),
    EngineKernel("minifloat", NVIDIA, tuple(Kind), "minifloat.kernels.linear", _WEIGHT_ONLY),
    EngineKernel("minifloat", CPUS, _ALL_KINDS, "minifloat.kernels.linear", _WEIGHT_ONLY, confirmed=True),
    EngineKernel(
        "minifloat", CPUS, (Kind.OTHER,), "minifloat.kernels.linear or its reference", _WEIGHT_ONLY, confirmed=True
    ),
    EngineKernel("llama.cpp", CPUS, _GGUF, "ggml_mul_mat", "inputs in 8 bits", confirmed=True),
    *(EngineKernel(name, LOCALS, _GGUF, "ggml_mul_mat", "inputs in 8 or 16 bits") for name in ("llama.cpp", "ollama")),
    *(EngineKernel(name, LOCALS, tuple(Kind), "ggml_mul_mat", "Q8_0 or BF16") for name in ("llama.cpp", "ollama")),
    EngineKernel("mlx", CPUS, _MLX, "mx.quantized_matmul", _WEIGHT_ONLY, confirmed=True, layout=mlx.NAME),
    EngineKernel("mlx", LOCALS, _MLX, "mx.quantized_matmul", _WEIGHT_ONLY, layout=mlx.NAME),
    EngineKernel("mlx", LOCALS, (Kind.MXFP4,), "mx.gather_qmm", _WEIGHT_ONLY, layout=_GPT_OSS, experts=True),
)


def kernel_for(case: Case, kind: Kind, *, experts: bool = False) -> EngineKernel | None:
    """Return the kernel of the case's engine for linears, or experts, of a kind; None where it is not known."""
    if case.target.plugin == vllm_plugin.NAME and not experts:
        name = vllm_plugin.kernel_of(kind, case.subject.layout)
        if name is not None:
            return EngineKernel("vllm", CPUS, (kind,), f"{name} (plugin)", _WEIGHT_ONLY, confirmed=True)
    for kernel in KERNELS:
        if kernel.engine != case.target.engine or case.target.hardware.name not in kernel.hardware:
            continue
        if kernel.experts is experts and kind in kernel.kinds and kernel.layout in (None, case.subject.layout):
            return kernel
    return None
