"""Linear layers with a quantized weight, packed or as stored, in the place of `torch.nn.Linear`; no gradients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.errors import KernelUnavailable, UnknownNameError
from minifloat.kernels import native
from minifloat.kernels.dtypes import DTYPES
from minifloat.kernels.linear import int8, linear, scaled_mm
from minifloat.kernels.linear import triton as gpu
from minifloat.kernels.linear.triton import GpuWeight
from minifloat.kernels.pack import Arena, PackedWeight, pack, why_not
from minifloat.model.runtime.tensors import listing
from minifloat.numerics.activation import can_quantize
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.scheme import ActivationSpec
from minifloat.numerics.tensor import QuantizedTensor

_GPU = "gpu_"  #: prefix of the buffers of a GpuWeight's tensors
#: With `prefill`, inputs of this many rows and more are multiplied by FP8 tensor cores, which are then far faster than
#: kernels that decode weights. Published figures for an H100: 1.55 times BF16 against 0.52. Not measured here.
PREFILL_ROWS = 256

_BUFFERS = ("codes", "scale", "global_scale", "zero_point", "packed")


class QuantizedWeight(nn.Module):
    """One quantized weight ``[N, K]``, packed or as stored, and how its input is quantized.

    ``model.half()`` would round float32 scales; here it only changes `dtype`. A move to another device, or to a dtype
    that the kernels do not have, unpacks the weight until `pack` is called again.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    zero_point: Tensor | None
    input_scale: Tensor | None
    prefill: QuantizedWeight | None  #: the same weight with quantized inputs, for `PREFILL_ROWS` rows and more

    def __init__(
        self,
        quantized: QuantizedTensor,
        dtype: torch.dtype,
        activation: ActivationSpec | None = None,
        input_scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.int8_inputs = False
        self.dtype = dtype
        self._hold(quantized)
        self.register_buffer("input_scale", input_scale)
        self.prefill = None

    def _hold(self, weight: QuantizedTensor | PackedWeight | GpuWeight) -> None:
        for name in [name for name in self._buffers if name in _BUFFERS or name.startswith(_GPU)]:
            del self._buffers[name]
        self.shape = weight.shape
        self._packed: PackedWeight | GpuWeight | None = None
        self._on_gpu = isinstance(weight, GpuWeight)
        if isinstance(weight, GpuWeight):
            self._packed = weight
            for name, tensor in weight.tensors():
                self.register_buffer(_GPU + name, tensor)
            return
        if isinstance(weight, PackedWeight):
            self.register_buffer("packed", weight.data)
            return
        self.spec = weight.spec
        self.global_divides = weight.global_divides
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("global_scale", weight.global_scale)
        self.register_buffer("zero_point", weight.zero_point)

    @property
    def is_packed(self) -> bool:
        return self._on_gpu or "packed" in self._buffers

    @property
    def held(self) -> QuantizedTensor | PackedWeight | GpuWeight:
        """The weight in the form that it is held in, as `linear` takes it; shares the memory of this module."""
        if isinstance(self._packed, GpuWeight):
            if self._packed.codes is not self._buffers[_GPU + "codes"]:  # the buffers were copied or assigned
                names = [name for name, _ in self._packed.tensors()]
                self._packed = self._packed.with_tensors({name: getattr(self, _GPU + name) for name in names})
            return self._packed
        data = self._buffers.get("packed")
        if data is None:
            return QuantizedTensor(
                self.spec, self.shape, self.codes, self.scale, self.global_scale, self.global_divides, self.zero_point
            )
        if self._packed is None or self._packed.data is not data:  # the buffer was moved or assigned
            self._packed = PackedWeight(data, self.spec, self.shape)
        return self._packed

    @property
    def quantized(self) -> QuantizedTensor:
        """The weight as checkpoints store it; shares the memory of this module unless the weight is packed."""
        held = self.held
        return held if isinstance(held, QuantizedTensor) else _unpacked(held)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight ``[N, K]`` in `dtype`, computed at every access."""
        # some models read it outside of forward: Mamba's lm_head, T5's wo, routers, latent attention
        return self.held.dequantize(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as checkpoints store it; the packed form is padded to whole panels and pages."""
        rows, cols = self.shape
        return round(self.spec.bits_per_weight(self.shape) * rows * cols / 8)

    def pack(self, arena: Arena | None = None) -> str:
        """Replace the stored form by the packed form, and return why that is not possible, or an empty text."""
        if self.is_packed:
            return ""
        if self.codes.device.type == "cuda":
            return self._pack_on_gpu()
        reason = native.why_unavailable() or why_not(self.spec, self.shape, self.codes.device)
        if not reason:
            self._hold(pack(self.quantized, arena=arena))
        return reason

    def _pack_on_gpu(self) -> str:
        weight, activation = self.quantized, self.activation
        # `scaled_mm` takes the stored form
        if activation is not None and can_quantize(activation, self.spec) and not scaled_mm.why_not(weight, activation):
            return ""
        reason = gpu.why_not(self.spec, self.shape, self.codes.device)
        if not reason:
            self._hold(gpu.pack(weight))
        return reason

    def unpack(self) -> None:
        """Replace the packed form by the stored form; the tensor scale of NVFP4 then multiplies."""
        if self.is_packed:
            self._hold(self.quantized)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``, ``[..., K]`` to ``[..., N]``, in the dtype of `x`; `activation` applies."""
        if self.prefill is not None and x.numel() >= PREFILL_ROWS * self.shape[1]:
            return self.prefill.multiply(x, bias)
        return linear(
            x,
            self.held,
            bias,
            activation=self.activation,
            input_scale=self.input_scale,
            int8_inputs=self.int8_inputs,
        )

    def extra_repr(self) -> str:
        """Return shape, formats, granularity, quantization of the inputs, and whether the weight is packed."""
        rows, cols = self.shape
        inputs = "" if self.activation is None else f", inputs {self.activation}"
        inputs += ", inputs may be int8" if self.int8_inputs else ""
        spec = self.spec
        form = ", packed" if self.is_packed else ""
        return f"[{rows}, {cols}], {spec.element.name}, {spec.granularity}, {spec.scale.name} scales{inputs}{form}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        """Let `fn` move all tensors, but cast only those that are not part of the quantized weight (a bias)."""
        device = next(buffer.device for buffer in self._buffers.values() if buffer is not None)
        result = fn(torch.empty(0, dtype=self.dtype, device=device))
        self.dtype = result.dtype
        if result.device != device or result.dtype not in DTYPES:
            self.unpack()
        held = {id(buffer) for buffer in self._buffers.values()}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) not in held or moved.dtype == tensor.dtype:
                return moved
            return tensor.to(moved.device)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        if not self._on_gpu:
            self._packed = None  # share_memory_ replaces the memory of a tensor object
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Copy into the buffers; a packed weight is checked again before the kernels read it."""
        super()._load_from_state_dict(*args, **kwargs)
        if not self._on_gpu:
            self._packed = None


def _unpacked(weight: PackedWeight | GpuWeight) -> QuantizedTensor:
    stored = weight.unpack()
    if not isinstance(stored, QuantizedTensor):
        raise TypeError("a BF16 weight in a module for quantized ones")
    return stored


class QuantizedLinear(QuantizedWeight):
    """A linear layer whose weight stays quantized: ``y = x @ weight.T + bias`` by `minifloat.kernels.linear`."""

    bias: nn.Parameter | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.out_features, self.in_features = self.shape
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply ``[..., K]`` to ``[..., N]``, in the dtype of `x`."""
        return self.multiply(x, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"


_LOG = logging.getLogger(__name__)

#: Values of `impl`: what multiplies quantized weights.
IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_DEVICES = {"cpu": "cpu", "triton": "cuda"}  # the device type of each implementation
NOT_MULTIPLIED = "the code of their experts does more with a weight than multiply"


class Packing:
    """Packs the weights of one model, one by one."""

    def __init__(self, impl: str, device: torch.device, *, int8_inputs: bool = False) -> None:
        if impl not in IMPLEMENTATIONS:
            raise UnknownNameError("impl", impl, IMPLEMENTATIONS)
        self._impl = impl
        if impl in _DEVICES and device.type != _DEVICES[impl]:
            raise KernelUnavailable(
                f"impl={impl!r} computes on {_DEVICES[impl]} devices, and the model goes to {device}"
            )
        self._packs = impl in _DEVICES or (impl == "auto" and device.type in _DEVICES.values())
        self._int8_inputs = int8_inputs
        self._num_packed = self._num_rounded = 0
        self._not_rounded: dict[str, list[str]] = {}
        self._unpacked: dict[str, list[str]] = {}

    def pack(
        self, weight: QuantizedWeight, module: str, *, multiplied: bool = True, arena: Arena | None = None
    ) -> None:
        """Pack a weight, unless `impl` is the reference, or note the reason why it cannot be packed."""
        reason = ""
        if self._packs:
            reason = weight.pack(arena) if multiplied else NOT_MULTIPLIED
        if self._int8_inputs:
            self._allow_int8(weight, module, reason)
        if not self._packs:
            return
        if reason and self._impl in _DEVICES:
            raise KernelUnavailable(f"{module}: the kernels cannot multiply it: {reason}")
        if reason:
            self._unpacked.setdefault(reason, []).append(module)
        else:
            self._num_packed += 1

    def _allow_int8(self, weight: QuantizedWeight, module: str, reason: str) -> None:
        """Let a weight round its inputs to int8, or note the reason why it cannot."""
        held = weight.held
        if not reason and isinstance(held, PackedWeight):
            reason = int8.why_not(held)
        elif not reason and not (isinstance(held, QuantizedTensor) and held.spec.element in (E4M3, E2M1)):
            reason = "they are no floating-point numbers"
        weight.int8_inputs = not reason
        if reason:
            self._not_rounded.setdefault(reason, []).append(module)
        else:
            self._num_rounded += 1

    def _warn_of_int8(self) -> None:
        total = self._num_rounded + sum(map(len, self._not_rounded.values()))
        if self._int8_inputs and not self._num_rounded:
            reasons = "; ".join(self._not_rounded) or "none is quantized"
            raise KernelUnavailable(f"activations int8: no weight of the model can have inputs in int8: {reasons}")
        for reason, modules in self._not_rounded.items():
            _LOG.warning(
                "inputs of %d of %d quantized weights are not rounded to int8, because %s: %s",
                len(modules),
                total,
                reason,
                listing(modules),
            )

    def warn(self) -> None:
        """Log the weights that were not packed, and those whose inputs are not rounded; one warning per reason."""
        self._warn_of_int8()
        total = self._num_packed + sum(map(len, self._unpacked.values()))
        for reason, modules in self._unpacked.items():
            _LOG.warning(
                "%d of %d quantized weights are multiplied by the slow reference, because %s: %s",
                len(modules),
                total,
                reason,
                listing(modules),
            )
