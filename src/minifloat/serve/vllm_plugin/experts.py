"""Mixtures: the quantized experts of one of vLLM's layers, whose tokens are multiplied expert by expert in one call.

Source: vLLM 0.32.0 and 0.33.0, `fused_moe/routed_experts.py: RoutedExperts.weight_loader`, `runner/moe_runner.py`,
`compressed_tensors_moe.py: get_moe_method`, `quantization/fp8.py: Fp8MoEMethod`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.runner.moe_runner import get_layer_from_name
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped
from vllm.model_executor.utils import set_weight_attrs

from minifloat.errors import UnsupportedTensorError
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.moe import PackedExperts, moe_linear, sort_by_expert
from minifloat.kernels.pack import Arena, pack, why_not
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.granularity import BLOCK_128, CHANNEL, TENSOR
from minifloat.numerics.scheme import WeightSpec
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.serve.vllm_plugin import packed

_LOG = init_logger("vllm.minifloat")

#: Activations whose operators vLLM's build for CPUs has.
_ACTIVATIONS = (MoEActivation.SILU, MoEActivation.GELU, MoEActivation.GELU_TANH, MoEActivation.RELU2_NO_MUL)
_BLOCKS = WeightSpec(E4M3, BLOCK_128)
_BLOCK_SIZE = list(BLOCK_128.block((1, 1)))
_SCALE_DTYPES = {FLOAT32: torch.float32, E8M0: torch.uint8, E4M3: torch.float8_e4m3fn}
#: Granularity -> how vLLM's loader of weights cuts the scales; those of groups are what is left.
_CUTS = {TENSOR: "tensor", CHANNEL: "channel", BLOCK_128: "block"}


def method_of(config: Any, layer: Any, prefix: str) -> Any:
    """Return the method for the experts of a layer in a config of compressed-tensors; None: vLLM chooses."""
    config._add_fused_moe_to_target_scheme_map()
    names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
    scheme, *others = [config.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names if name]
    spec = _spec_of(config, scheme["weights"]) if scheme and all(other == scheme for other in others) else None
    if spec is None or _has_kernel_for_amx(spec):
        return None
    inputs = scheme["input_activations"]
    return MinifloatExpertsMethod(layer, prefix, spec, static_inputs=inputs is not None and inputs.dynamic is not True)


def _spec_of(config: Any, weights: Any) -> WeightSpec | None:
    """Return the format of the weights of a config group; None for those that the kernels do not multiply."""
    groups = {packed.MXFP4: config._is_mxfp4, packed.MXFP8: config._is_mxfp8, packed.NVFP4: config._is_nvfp4_format}
    specs = [spec for spec, is_format in groups.items() if is_format(weights)]
    if not specs and weights.num_bits == E4M3.bits and config._is_fp8_w8a16(weights, None):
        if weights.strategy != "block":
            return WeightSpec(E4M3, TENSOR if weights.strategy == "tensor" else CHANNEL)
        specs = [_BLOCKS] if list(weights.block_structure) == _BLOCK_SIZE else []
    return specs[0] if specs else None


def _has_kernel_for_amx(spec: WeightSpec) -> bool:
    """Return whether vLLM has a kernel of its own on this processor."""
    return spec == _BLOCKS and bool(torch.cpu._is_amx_tile_supported())


class MinifloatFp8Config(Fp8Config):
    """vLLM's config of layout fp8, with our method for experts in blocks."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        is_ours = isinstance(layer, RoutedExperts) and self.weight_block_size == _BLOCK_SIZE and not self.store_dtype
        skipped, match = (self.ignored_layers, self.packed_modules_mapping), self.ignored_layers_match_mode
        if not is_ours or _has_kernel_for_amx(_BLOCKS) or is_layer_skipped(prefix, *skipped, match_mode=match):
            return super().get_quant_method(layer, prefix)
        return MinifloatExpertsMethod(layer, prefix, _BLOCKS, scale="weight_scale_inv")


class MinifloatExpertsMethod(FusedMoEMethodBase):
    """vLLM's method for routed experts, with packed weights and inputs in 16 bits."""

    def __init__(
        self, layer: Any, prefix: str, spec: WeightSpec, *, scale: str = "weight_scale", static_inputs: bool = False
    ) -> None:
        super().__init__(layer.moe_config)
        #: Elements in a byte of codes.
        self.spec, self.scale, self.per_byte = spec, scale, 8 // spec.element.bits
        self.codes = "weight_packed" if self.per_byte > 1 else "weight"
        #: Parameters with a number for each of gate, up and down, which are then packed one by one.
        self.scalars = (
            [scale] if spec.granularity == TENSOR else ["weight_global_scale"] if spec.has_global_scale else []
        )
        self.parts = layer.moe_config.w13_num_shards if self.scalars else 1
        if static_inputs:
            self.scalars.append("input_global_scale" if spec.has_global_scale else "input_scale")
        if reason := self._why_not():
            raise UnsupportedTensorError(prefix, f"minifloat's kernels do not compute these experts: {reason}")

    def _why_not(self) -> str:
        """Return what of the layer the kernels lack, with the cure; empty if they compute it."""
        moe, elsewhere, inner = self.moe, "serve the model with minifloat", self.moe.intermediate_size_per_partition
        rows, cols = self.spec.granularity.block((1, 1))
        problems = {
            "vLLM divides them among processes; start it without --enable-expert-parallel": moe.use_ep,
            "adapters need weights as stored; start vLLM without --enable-lora": moe.is_lora_enabled,
            f"they have biases; {elsewhere}": moe.has_bias,
            f"their activation is {moe.activation.value}; {elsewhere}": moe.activation not in _ACTIVATIONS,
            f"their activation has a limit; {elsewhere}": moe.swiglu_limit is not None,
            f"inputs are {moe.in_dtype}; start vLLM with --dtype bfloat16": moe.in_dtype not in DTYPES,
            f"of the inner size each process has {inner}, which blocks of {rows}x{cols} do not divide; start fewer "
            f"processes, or {elsewhere}": inner % rows or (moe.tp_size > 1 and inner % cols),
            why_not(self.spec, (inner, moe.hidden_dim), "cpu"): True,
            why_not(self.spec, (moe.hidden_dim, inner), "cpu"): True,
        }
        return "; ".join(reason for reason, applies in problems.items() if reason and applies)

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int, **attributes: Any
    ) -> None:
        """Register parameters for the experts as the checkpoint stores them, gate above up."""
        inner, halves = intermediate_size_per_partition, self.moe.w13_num_shards
        cut = {"quant_method": _CUTS.get(self.spec.granularity, "group")}
        for name, count, shape in (("w13", halves, (inner, hidden_size)), ("w2", 1, (hidden_size, inner))):
            rows, cols = self.spec.granularity.scale_shape(shape)
            width, dtype = shape[1] // self.per_byte, torch.uint8 if self.per_byte > 1 else torch.float8_e4m3fn
            parameters = {
                self.scale: (torch.empty(num_experts, count * rows, cols, dtype=_SCALE_DTYPES[self.spec.scale]), cut),
                self.codes: (torch.empty(num_experts, count * shape[0], width, dtype=dtype), {}),
            }
            numbers = torch.ones((num_experts, count) if name == "w13" else (num_experts,))
            parameters |= {scalar: (numbers.clone(), {"quant_method": _CUTS[TENSOR]}) for scalar in self.scalars}
            for leaf, (value, more) in parameters.items():
                layer.register_parameter(f"{name}_{leaf}", nn.Parameter(value, requires_grad=False))
                set_weight_attrs(getattr(layer, f"{name}_{leaf}"), attributes | more)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the experts, and drop what the checkpoint has filled."""
        _LOG.info_once("Using %s for %s experts", type(self).__name__, self.spec.element.name)
        arena = Arena()
        self.gate_up = [self._packed(layer, "w13", part, self.parts, arena) for part in range(self.parts)]
        self.down = self._packed(layer, "w2", 0, 1, arena)
        for name in [name for name in layer._parameters if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)

    def _packed(self, layer: Any, name: str, part: int, parts: int, arena: Arena) -> PackedExperts:
        """Return one of several equal parts of the rows of all experts."""

        def stored(leaf: str) -> Tensor:
            value: Tensor = getattr(layer, f"{name}_{leaf}").data
            return value.chunk(parts, dim=1)[part] if parts > 1 else value

        codes, scales = stored(self.codes).view(torch.uint8), stored(self.scale)
        shape = (codes.shape[1], codes.shape[2] * self.per_byte)
        grid = self.spec.granularity.scale_shape(shape)
        scales = scales if self.spec.scale is FLOAT32 else scales.view(torch.uint8)
        factors = stored("weight_global_scale").reshape(-1) if self.spec.has_global_scale else [None] * len(codes)
        weights = [
            QuantizedTensor(self.spec, shape, expert, scale.reshape(grid), factor)
            for expert, scale, factor in zip(codes, scales, factors, strict=True)
        ]
        return PackedExperts([pack(weight, arena=arena) for weight in weights])

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return that of unquantized experts: no kernel of vLLM reads it."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.minifloat.vllm_experts(x, topk_weights, topk_ids, layer.layer_name)
            return y
        return self.compute(layer, x, topk_weights, topk_ids)

    def compute(self, layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Return the sum of what the experts of each token give, ``[T, hidden]``, by their weights ``[T, k]``."""
        if layer.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        offsets, tokens, order = sort_by_expert(ids.long(), len(self.down))
        products = torch.cat([moe_linear(x, part, offsets, tokens) for part in self.gate_up], dim=-1)
        inner = x.new_empty(len(order), self.down.shape[1])
        apply_moe_activation(layer.activation, inner, products)
        results = x.new_empty(len(order), self.down.shape[0])
        results[order] = moe_linear(inner, self.down, offsets)
        return (results.view(*ids.shape, -1) * weights[..., None]).sum(dim=1).to(x.dtype)


@torch.library.custom_op("minifloat::vllm_experts", mutates_args=(), device_types="cpu")
def _experts(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    """Compute the experts of a layer, which is found by its name: how many tokens each has is not known in a trace."""
    experts = get_layer_from_name(layer).routed_experts
    y: Tensor = experts.quant_method.compute(experts, x, weights, ids)
    return y


@_experts.register_fake
def _(x: Tensor, weights: Tensor, ids: Tensor, layer: str) -> Tensor:
    return torch.empty_like(x)
