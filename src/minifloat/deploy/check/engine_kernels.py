"""Which kernel an engine chooses for a linear: the name that a server's log should show."""

from __future__ import annotations

from dataclasses import dataclass

from minifloat.deploy.check import vllm_plugin
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, NVFP4_KINDS, Case, Kind
from minifloat.deploy.check.target import BEFORE_BLACKWELL, CPUS, LOCALS, NVIDIA
from minifloat.model.layouts import compressed_tensors, fp8, gguf, gpt_oss, mlx


@dataclass(frozen=True)
class EngineKernel:
    """The kernel that an engine chooses for linears of some kinds."""

    engine: str
    hardware: tuple[str, ...]
    kinds: tuple[Kind, ...]
    name: str
    computes: str
    confirmed: bool = False
    layout: str | None = None  # layout of the checkpoint; None: every layout that the engine reads


_CT, _FP8, _GPT_OSS = compressed_tensors.NAME, fp8.NAME, gpt_oss.NAME
_HOPPER = ("h100", "h200")
_ADA_UP = ("l40s", *_HOPPER, "b200")
_W8A8 = (Kind.FP8_STATIC, Kind.FP8_DYNAMIC)
_WEIGHT_ONLY = "16-bit inputs"
_FP8_INPUTS = "FP8 inputs"
_DECODED = "BF16, decoded at load or at the first pass"
_MLX = (Kind.MXFP4, Kind.NVFP4, Kind.MXFP8)
_GGUF = (*MXFP4_KINDS, *NVFP4_KINDS)
_ALL_KINDS = tuple(kind for kind in Kind if kind is not Kind.OTHER)

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
    EngineKernel("vllm", ("a100",), _W8A8, "Humming, else MarlinFP8ScaledMMLinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("a100", "l40s"), (Kind.FP8_BLOCK,), "MarlinFP8ScaledMMLinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("l40s", *_HOPPER), _W8A8, "CutlassFP8ScaledMMLinearKernel", _FP8_INPUTS),
    EngineKernel("vllm", ("b200",), (Kind.FP8_STATIC,), "FlashInferFP8ScaledMMLinearKernel", _FP8_INPUTS),
    EngineKernel("vllm", ("b200",), (Kind.FP8_DYNAMIC,), "CutlassFP8ScaledMMLinearKernel", _FP8_INPUTS),
    EngineKernel("vllm", (*_HOPPER, "b200"), (Kind.FP8_BLOCK,), "DeepGemmFp8BlockScaledMMKernel", _FP8_INPUTS),
    EngineKernel("vllm", NVIDIA, (Kind.FP8_WEIGHT_ONLY,), "Humming, else MarlinFP8ScaledMMLinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("a100", "l40s"), MXFP4_KINDS, "MarlinMxFp4LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", _HOPPER, MXFP4_KINDS, "Humming, else MarlinMxFp4LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("b200",), MXFP4_KINDS, "FlashInferMxFp4LinearKernel", "MXFP4 inputs"),
    EngineKernel("vllm", ("a100", "l40s"), MXFP8_KINDS, "MarlinMxfp8LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", _HOPPER, MXFP8_KINDS, "Humming, else MarlinMxfp8LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("b200",), MXFP8_KINDS, "FlashInferCutedslMxfp8LinearKernel", "MXFP8 inputs"),
    EngineKernel("vllm", ("a100", "l40s"), (Kind.NVFP4, Kind.NVFP4_W4A4), "MarlinNvFp4LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", _HOPPER, (Kind.NVFP4, Kind.NVFP4_W4A4), "Humming, else MarlinNvFp4LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("b200",), (Kind.NVFP4,), "FlashInferCuteDslNvFp4W4A16LinearKernel", _WEIGHT_ONLY),
    EngineKernel("vllm", ("b200",), (Kind.NVFP4_W4A4,), "FlashInferCuteDslNvFp4LinearKernel", "NVFP4 inputs"),
    EngineKernel("vllm", ("mi300",), (Kind.FP8_BLOCK,), "AITER, else TritonFp8BlockScaledMMKernel", _FP8_INPUTS),
    EngineKernel("vllm", ("mi300",), _W8A8, "AITER, else ROCmFP8ScaledMMLinearKernel or torch._scaled_mm", _FP8_INPUTS),
    EngineKernel("vllm", ("mi300",), (*MXFP4_KINDS, *MXFP8_KINDS, Kind.NVFP4_W4A4), "Emulation*LinearKernel", _DECODED),
    EngineKernel("vllm", ("cpu",), (Kind.MXFP4,), "the CPU's fused experts", _WEIGHT_ONLY, layout=_GPT_OSS),
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
    EngineKernel("mlx", LOCALS, (Kind.MXFP4,), "mx.gather_qmm", _WEIGHT_ONLY, layout=_GPT_OSS),
)


def kernel_for(case: Case, kind: Kind) -> EngineKernel | None:
    """Return the kernel of the case's engine for linears of a kind; None where it is not known."""
    if case.target.plugin == vllm_plugin.NAME:
        name = vllm_plugin.kernel_of(kind, case.subject.layout)
        if name is not None:
            return EngineKernel("vllm", CPUS, (kind,), f"{name} (plugin)", _WEIGHT_ONLY, confirmed=True)
    for kernel in KERNELS:
        if kernel.engine != case.target.engine or case.target.hardware.name not in kernel.hardware:
            continue
        if kind in kernel.kinds and kernel.layout in (None, case.subject.layout):
            return kernel
    return None
