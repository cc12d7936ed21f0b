"""A vLLM of a few lines: the tables, base classes and functions that the plugin uses, and nothing else."""

from __future__ import annotations

import enum
import importlib
import logging
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

CPU, CUDA = "the CPU platform", "the CUDA platform"
_TABLES = (
    "_POSSIBLE_FP8_KERNELS",
    "_POSSIBLE_FP8_BLOCK_KERNELS",
    "_POSSIBLE_WFP8A16_KERNELS",
    "_POSSIBLE_MXFP8_KERNELS",
    "_POSSIBLE_MXFP4_KERNELS",
    "_POSSIBLE_NVFP4_KERNELS",
)
_LINEAR = "vllm.model_executor.kernels.linear"
_LAYERS = "vllm.model_executor.layers"
_EXPERTS = f"{_LAYERS}.fused_moe"
_COMPRESSED_TENSORS = f"{_LAYERS}.quantization.compressed_tensors"


class Logger(logging.Logger):
    """vLLM's logger, which can log a message once."""

    def __init__(self, name: str) -> None:
        super().__init__(name, logging.DEBUG)
        self.seen: set[str] = set()

    def info_once(self, message: str, *args: object) -> None:
        text = message % args
        if text not in self.seen:
            self.seen.add(text)
            self.info(text)


class Kernel:
    """Base class of vLLM's kernels."""

    def __init__(self, config: Any = None, layer_param_names: Any = None) -> None:
        self.config = config


class MxFp4LinearKernel(Kernel):
    """Base class of MXFP4's kernels, which since 0.33 says the formats of inputs that a kernel is chosen for."""

    @classmethod
    def _supports_quant_scheme(cls, weight_key: Any, activation_key: Any) -> bool:
        return weight_key == "MXFP4" and activation_key in (None, "MXFP4")


class AmxKernel(Kernel):
    """A kernel of vLLM that needs instructions which minifloat does not use."""


class TorchKernel(Kernel):
    """A kernel of vLLM that quantizes inputs with torch's operators."""


TorchKernel.__module__ = f"{_LINEAR}.scaled_mm.pytorch"


class QuantizationConfig:
    """Base class of vLLM's configs, reduced to what vLLM does without the plugin."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return "vLLM's choice"


class CompressedTensorsConfig(QuantizationConfig):
    """vLLM's config, reduced to the choice of schemes; `schemes` has those of experts by their names."""

    def __init__(self, **schemes: Any) -> None:
        self.schemes = schemes

    def _add_fused_moe_to_target_scheme_map(self) -> None:
        self.is_ready = True

    def get_scheme_dict(self, layer: Any, name: str) -> Any:
        assert self.is_ready
        return self.schemes.get(name.rpartition(".")[2], self.schemes["others"])

    _is_mxfp4 = staticmethod(lambda quantized: (quantized.num_bits, quantized.strategy) == (4, "group"))
    _is_mxfp8 = staticmethod(lambda quantized: (quantized.num_bits, quantized.strategy) == (8, "group"))
    _is_fp8_w8a16 = staticmethod(lambda weights, inputs: weights.type == "float")
    _is_nvfp4_format = staticmethod(
        lambda quantized: quantized is not None and (quantized.num_bits, quantized.strategy) == (4, "tensor_group")
    )
    _is_fp8_w8a8 = staticmethod(lambda weights, inputs: inputs is not None)

    def _get_scheme_from_parts(self, weight_quant: Any, input_quant: Any, *args: Any, **kwargs: Any) -> Any:
        return "vLLM's choice"


class Fp8Config(QuantizationConfig):
    """vLLM's config of layout fp8."""

    def __init__(self, weight_block_size: list[int] | None, ignored_layers: tuple[str, ...] = ()) -> None:
        self.weight_block_size, self.ignored_layers = weight_block_size, ignored_layers
        self.store_dtype, self.packed_modules_mapping, self.ignored_layers_match_mode = None, {}, "exact"


class RoutedExperts(torch.nn.Module):
    """vLLM's layer of experts, whose method makes its parameters."""

    ckpt_gate_proj_name, ckpt_up_proj_name, ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    layer_name = "model.layers.0.mlp.experts"
    apply_router_weight_on_input = False

    def __init__(self, moe_config: Any) -> None:
        super().__init__()
        self.moe_config, self.activation = moe_config, moe_config.activation


class FusedMoEMethodBase:
    """Base class of vLLM's methods for experts."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe


class MoEActivation(enum.Enum):
    """Activations of experts, some of which vLLM's build for CPUs lacks."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2_NO_MUL = "relu2_no_mul"
    SWIGLUOAI = "swigluoai"


def apply_moe_activation(activation: MoEActivation, output: torch.Tensor, x: torch.Tensor) -> None:
    """Write the activation of ``[T, 2 * inner]``, gate first, or of ``[T, inner]``."""
    if activation is MoEActivation.RELU2_NO_MUL:
        output.copy_(x.relu().square())
    else:
        gate, up = x.chunk(2, dim=-1)
        output.copy_(torch.nn.functional.silu(gate) * up)


def set_weight_attrs(parameter: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Set attributes that a parameter does not have yet."""
    for name, value in attributes.items():
        assert not hasattr(parameter, name)
        setattr(parameter, name, value)


class PluggableLayer(torch.nn.Module):
    """Base class of vLLM's layers, whose classes a plugin may replace."""

    replaced: dict[str, type]

    @classmethod
    def register_oot(cls, name: str) -> Callable[[type], type]:
        return lambda layer: cls.replaced.setdefault(name, layer)


class Unquantized:
    """vLLM's methods for unquantized layers, which note the layers that they were left."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def process_weights_after_loading(self, layer: Any) -> None:
        self.left.append(layer)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight, bias)


class W8A16:
    """vLLM's scheme for FP8 weights with 16-bit inputs."""

    def __init__(self, weight_quant: Any, is_static_input_scheme: bool) -> None:
        self.is_static_input_scheme = is_static_input_scheme


@dataclass
class Stub:
    """What the plugin sees of vLLM, and what it did to it."""

    linear: types.ModuleType
    platform: types.SimpleNamespace
    version: types.ModuleType
    envs: types.ModuleType
    log: list[logging.LogRecord]
    configs: dict[str, type] = field(default_factory=dict)
    layers: dict[str, type] = field(default_factory=dict)
    runners: dict[str, Any] = field(default_factory=dict)

    def table(self, name: str) -> list[type]:
        """The kernels of the CPU in one of the tables."""
        return list(getattr(self.linear, name).get(CPU, []))

    def kernel(self, name: str) -> Any:
        """A kernel class of the plugin."""
        return getattr(importlib.import_module("minifloat.serve.vllm_plugin.kernels"), name)

    def messages(self, level: int) -> list[str]:
        """What was logged at a level."""
        return [record.getMessage() for record in self.log if record.levelno == level]


def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """Put a vLLM into `sys.modules`: 0.32.0, on a CPU without AMX. The plugin's modules are imported anew."""
    forget_plugin()

    def module(name: str, **contents: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, made)
        return made

    platform = types.SimpleNamespace(is_cpu=lambda: True, device_name="cpu")
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels", _LAYERS):
        module(name)
    bases = ("FP8ScaledMMLinear", "Mxfp8Linear", "MxFp4Linear", "NvFp4Linear")
    contents: dict[str, Any] = {f"{base}Kernel": type(f"{base}Kernel", (Kernel,), {}) for base in bases}
    contents |= {f"{base}LayerConfig": types.SimpleNamespace for base in bases}
    contents["MxFp4LinearKernel"] = MxFp4LinearKernel
    linear = module(_LINEAR, **contents, **{table: {CPU: []} for table in _TABLES[:3]}, **{t: {} for t in _TABLES[3:]})
    stub = Stub(linear, platform, module("vllm.version", __version__="0.32.0"), module("vllm.envs"), [])
    vars(stub.envs).update(environment_variables={}, VLLM_DISABLED_KERNELS=[])
    linear._POSSIBLE_FP8_KERNELS[CPU] += [AmxKernel, TorchKernel]  # type: ignore[attr-defined]

    def init_logger(name: str) -> Logger:
        logger = Logger(name)
        logger.addFilter(lambda record: stub.log.append(record) or False)
        return logger

    def register(method: str) -> Callable[[type], None]:
        return lambda config: stub.configs.__setitem__(method, config)

    module("vllm.logger", init_logger=init_logger)
    module("vllm.platforms", PlatformEnum=types.SimpleNamespace(CPU=CPU, CUDA=CUDA), current_platform=platform)
    module(f"{_LAYERS}.quantization", register_quantization_config=register)
    module(f"{_LAYERS}.quantization.fp8", Fp8Config=Fp8Config)
    module(f"{_LAYERS}.quantization.utils")
    module(
        f"{_LAYERS}.quantization.utils.quant_utils",
        is_layer_skipped=lambda prefix, ignored_layers, fused_mapping, *, match_mode: prefix in ignored_layers,
    )
    module("vllm.model_executor.utils", set_weight_attrs=set_weight_attrs)
    module(_EXPERTS, FusedMoEMethodBase=FusedMoEMethodBase, RoutedExperts=RoutedExperts)
    module(f"{_EXPERTS}.activation", MoEActivation=MoEActivation, apply_moe_activation=apply_moe_activation)
    module(f"{_EXPERTS}.config", FUSED_MOE_UNQUANTIZED_CONFIG="unquantized")
    module(f"{_EXPERTS}.runner")
    module(f"{_EXPERTS}.runner.moe_runner", get_layer_from_name=lambda name: stub.runners[name])
    module(_COMPRESSED_TENSORS)
    module(f"{_COMPRESSED_TENSORS}.compressed_tensors", CompressedTensorsConfig=CompressedTensorsConfig)
    module(
        f"{_COMPRESSED_TENSORS}.schemes",
        CompressedTensorsW4A4Fp4=type("CompressedTensorsW4A4Fp4", (), {}),
        CompressedTensorsW8A16Fp8=W8A16,
    )
    PluggableLayer.replaced = stub.layers
    module("vllm.model_executor.custom_op", PluggableLayer=PluggableLayer, op_registry_oot=stub.layers)
    names = ("Replicated", "ColumnParallel", "MergedColumnParallel", "QKVParallel", "RowParallel")
    of_linears, of_heads = (type(f"Unquantized{kind}Method", (Unquantized,), {}) for kind in ("Linear", "Embedding"))
    linears = module(f"{_LAYERS}.linear", UnquantizedLinearMethod=of_linears)
    heads = module(f"{_LAYERS}.vocab_parallel_embedding", UnquantizedEmbeddingMethod=of_heads)
    for name in names:
        setattr(linears, f"{name}Linear", _layer(f"{name}Linear", of_linears))
    for name in ("VocabParallelEmbedding", "ParallelLMHead"):
        setattr(heads, name, _layer(name, of_heads))
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    yield stub
    forget_plugin()


def forget_plugin() -> None:
    """Let the plugin's modules be imported anew, which make subclasses of vLLM's classes."""
    for name in [name for name in sys.modules if name.startswith("minifloat.serve.vllm_plugin.")]:
        del sys.modules[name]
        vars(sys.modules["minifloat.serve.vllm_plugin"]).pop(name.rpartition(".")[2], None)


def _layer(name: str, method: type) -> type:
    """A layer class of vLLM, made with the method for its weight."""

    def init(self: Any, quant_method: Any = None) -> None:
        PluggableLayer.__init__(self)
        self.quant_method = method() if quant_method is None else quant_method

    return type(name, (PluggableLayer,), {"__init__": init})
