"""Asks vLLM which kernels it chooses on a GPU that is not here: its Python code runs with a platform put in.

    python in_vllm_kernels.py REQUEST ANSWERS

The request names a machine, says whether FlashInfer can be used, and has a quantization_config for each scheme. What
vLLM's compiled library, DeepGEMM, FlashInfer and amd-quark would say of themselves on the machine is said here.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

#: Machine -> compute capability, or the name of AMD's architecture.
MACHINES: dict[str, tuple[int, int] | str] = {
    "a100": (8, 0),
    "l40s": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "mi300": "gfx942",
}
SIZE, EXPERTS = 4096, 8


class Present(ModuleType):
    """A module that counts as installed and has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self.__path__ = []
        sys.modules[name] = self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


request, answers = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
machine = MACHINES[request["machine"]]
if request["flashinfer"]:
    for name in ("", ".fused_moe", ".gemm", ".cute_dsl", ".cute_dsl.utils"):
        Present(f"flashinfer{name}")
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"

import vllm.platforms  # noqa: E402

for name in ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn", "quark"):
    Present(name)
if isinstance(machine, str):
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(gcnArchName=machine)
    from vllm.platforms.rocm import RocmPlatform as Platform
else:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*machine)


vllm.platforms._current_platform = Platform()

import vllm._custom_ops as ops  # noqa: E402
from vllm import distributed  # noqa: E402
from vllm.utils import import_utils  # noqa: E402

import_utils.has_deep_gemm = lambda: True
for module in (distributed, distributed.parallel_state):
    module.get_tensor_model_parallel_rank = lambda: 0
    module.get_tensor_model_parallel_world_size = lambda: 1
# As in csrc: scaled_mm_entry.cu, nvfp4_scaled_mm_entry.cu and mxfp4_experts_quant.cu, built with CUDA 13.
ops.cutlass_scaled_mm_supports_fp8 = lambda capability: capability >= 89
ops.cutlass_scaled_mm_supports_block_fp8 = lambda capability: capability >= 90
ops.cutlass_scaled_mm_supports_fp4 = lambda capability: 100 <= capability < 130
ops.cutlass_group_gemm_supported = lambda capability: 90 <= capability < 110
ops.mxfp4_experts_quant_supported = lambda capability: 100 <= capability < 120

import vllm.config.vllm as config_module  # noqa: E402
from vllm.config.compilation import CompilationMode  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E402
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (  # noqa: E402
    CompressedTensorsMoEMethod,
)

config_module._current_vllm_config = SimpleNamespace(
    kernel_config=SimpleNamespace(linear_backend="auto", linear_backend_per_quant=None, moe_backend="auto"),
    model_config=SimpleNamespace(
        dtype=torch.bfloat16, quantization_config=None, hf_text_config=SimpleNamespace(model_type="llama")
    ),
    lora_config=None,
    compilation_config=SimpleNamespace(
        custom_ops=["none"],
        mode=CompilationMode.NONE,
        backend="eager",
        enabled_custom_ops=Counter(),
        disabled_custom_ops=Counter(),
    ),
)
torch.set_default_dtype(torch.bfloat16)


def linear_kernel(config: CompressedTensorsConfig) -> str:
    scheme = config.get_scheme(torch.nn.Linear(1, 1), "model.layers.0.self_attn.o_proj")
    scheme.create_weights(
        layer=torch.nn.Module(),
        input_size=SIZE,
        input_size_per_partition=SIZE,
        output_partition_sizes=[SIZE],
        output_size=SIZE,
        params_dtype=torch.bfloat16,
        weight_loader=lambda *_: None,
    )
    (kernel,) = (getattr(scheme, name) for name in ("kernel", "fp8_linear", "linear_kernel") if hasattr(scheme, name))
    return type(kernel).__name__


def experts_kernel(config: CompressedTensorsConfig) -> str:
    one = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    parallel = FusedMoEParallelConfig(
        **one, **ranks, use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False
    )
    moe = FusedMoEConfig(
        num_experts=EXPERTS,
        experts_per_token=2,
        hidden_dim=SIZE,
        intermediate_size=SIZE,
        num_local_experts=EXPERTS,
        num_logical_experts=EXPERTS,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )

    class RoutedExperts(torch.nn.Module):
        moe_config = moe
        ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"

    method = CompressedTensorsMoEMethod.get_moe_method(config, RoutedExperts(), "model.layers.0.mlp.experts")
    return method.experts_cls.__name__


def chosen(kernel: Callable[[CompressedTensorsConfig], str], config: dict[str, Any]) -> str:
    """Return the name of the kernel, or the error."""
    try:
        return kernel(CompressedTensorsConfig.from_config(json.loads(json.dumps(config))))
    except (ValueError, NotImplementedError) as error:
        return f"refused: {error}"


kernels = {"linears": linear_kernel, "experts": experts_kernel}
answer = {
    scheme: {part: chosen(kernel, config) for part, kernel in kernels.items()}
    for scheme, config in request["configs"].items()
}
answers.write_text(json.dumps(answer) + "\n")
