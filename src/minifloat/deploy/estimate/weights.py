"""Bytes and multiplications of a model's weights, on one of the devices that share them.

Tensor parallelism is that of vLLM and SGLang (Megatron: Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from minifloat.deploy.estimate.hardware import Hardware
from minifloat.deploy.estimate.shape import ModelShape, cache_bytes, state_bytes
from minifloat.errors import UsageError
from minifloat.model.architecture.family import Role
from minifloat.model.layouts import WriteLayout
from minifloat.model.plan.tensor_plan import TensorPlan
from minifloat.numerics.formats import BFLOAT16, FLOAT32, ElementFormat

_BY_ROWS = frozenset(
    {
        *("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1"),
        *("in_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    }
)
_BY_KV_HEADS = frozenset({"k_proj", "v_proj"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj", "w2", "fc2", "out_proj"})
_QKV = "qkv_proj"
_ROUTED = re.compile(r"\.experts\.")
_MULTIPLIES = (Role.LINEAR, Role.EXPERTS, Role.LM_HEAD, Role.ROUTER, Role.UNQUANTIZED_IN_SERVERS)


@dataclass(frozen=True)
class Weights:
    """Bytes of a model's weights under one scheme, and their multiplications: elements of matrices, per token."""

    total: int = 0
    device: int = 0
    fixed: int = 0  # the bytes of `device` that every decode step reads; lookup tables are not among them
    routed: int = 0  # the bytes of `device` that belong to routed experts
    quantized: int = 0
    quantized_routed: int = 0
    plain: int = 0
    plain_routed: int = 0
    head: int = 0


@dataclass(frozen=True)
class Counts:
    """Number of parameters of the model, in whatever format they are stored."""

    total: int
    active: int


def check_parallel(shape: ModelShape, gpus: int) -> None:
    """Raise an error for a number of devices that engines refuse."""
    if gpus < 1:
        raise UsageError(f"gpus: expected at least 1, got {gpus}")
    if gpus > 1 and not shape.heads:
        raise UsageError(f"gpus: the config does not tell the heads of attention that {gpus} devices would share")
    if shape.heads % gpus:
        raise UsageError(f"gpus: {gpus} devices do not divide {shape.heads} heads of attention")
    if shape.kv_heads and shape.kv_heads % gpus and gpus % shape.kv_heads:
        raise UsageError(f"gpus: {gpus} devices neither divide {shape.kv_heads} key-value heads nor are a multiple")


def count(tensors: Iterable[TensorPlan], copies: Mapping[str, int], shape: ModelShape) -> Counts:
    total = routed = 0
    for tensor in tensors:
        shapes: list[tuple[int, ...]] = [part.shape for part in tensor.parts] or [tensor.source.shape]
        elements = copies[tensor.source.name] * sum(map(math.prod, shapes))
        total += elements
        routed += elements if _is_routed(tensor) else 0
    share = shape.experts_per_token / shape.experts if shape.experts else 0.0
    return Counts(total, total - round(routed * (1 - share)))


def weigh(
    tensors: Iterable[TensorPlan], copies: Mapping[str, int], layout: WriteLayout, shape: ModelShape, gpus: int
) -> Weights:
    """Return the bytes and multiplications of a model's weights."""
    tensors = tuple(tensors)
    tied = not any(tensor.role is Role.LM_HEAD for tensor in tensors)
    sums = dict.fromkeys(Weights.__dataclass_fields__, 0)
    for tensor in tensors:
        number = copies[tensor.source.name]
        device, elements = (number * size for size in _on_device(tensor, layout, shape, gpus))
        sums["total"] += number * sum(output.nbytes for output in tensor.outputs)
        sums["device"] += device
        is_head = tensor.role is Role.LM_HEAD or (tied and _is_token_embedding(tensor, shape))
        if _is_routed(tensor):
            sums["routed"] += device
            sums["quantized_routed" if tensor.parts else "plain_routed"] += elements
        elif tensor.drafts or tensor.role is Role.TOWER or (tensor.role is Role.EMBEDDING and not is_head):
            continue  # on the device, but no decode step reads it
        else:
            sums["fixed"] += device
            if tensor.parts:
                sums["quantized"] += elements
            elif is_head:
                sums["head"] += elements
            elif tensor.role in _MULTIPLIES:
                sums["plain"] += elements
    return Weights(**sums)


def _is_routed(tensor: TensorPlan) -> bool:
    return tensor.role is Role.EXPERTS or _ROUTED.search(tensor.source.name) is not None


def _is_token_embedding(tensor: TensorPlan, shape: ModelShape) -> bool:
    return tensor.role is Role.EMBEDDING and tensor.source.shape[0] == shape.vocab


def _on_device(tensor: TensorPlan, layout: WriteLayout, shape: ModelShape, gpus: int) -> tuple[int, int]:
    """Return the bytes and elements of one device's part of a tensor."""
    nbytes = sum(constant.tensor.nbytes for constant in tensor.constants)
    if not tensor.parts:
        extents = _divided(tensor.source.name, tensor.role, tensor.source.shape, shape, gpus)
        total = max(math.prod(tensor.source.shape), 1)
        return nbytes + -(-tensor.source.nbytes * math.prod(extents) // total), math.prod(extents)
    elements = 0
    for part in tensor.parts:
        if part.matrices > 1:  # experts that stay fused: their widths are cut
            elements += -(-math.prod(part.shape) // gpus)
            nbytes += sum(-(-output.nbytes // gpus) for output in part.tensors.all)
            continue
        rows, cols = _divided(f"{part.module}.weight", Role.LINEAR, part.shape, shape, gpus)
        elements += rows * cols
        nbytes += sum(
            output.nbytes for output in layout.weight_tensors(part.module, part.scheme.weight, (rows, cols)).all
        )
    return nbytes, elements


def _divided(name: str, role: Role, extents: tuple[int, ...], shape: ModelShape, gpus: int) -> tuple[int, ...]:
    """Return the shape of one device's part; of unequal parts, the largest."""
    if gpus == 1 or not extents:
        return extents
    stem, _, kind = name.rpartition(".")
    leaf = stem.rpartition(".")[2] if kind in ("weight", "bias") else kind
    if leaf.isdecimal():  # an expert of a fused tensor
        leaf = stem.split(".")[-2]
    if role is Role.EXPERTS:
        return (*extents[:-1], -(-extents[-1] // gpus))
    if role in (Role.TOWER, Role.ROUTER):
        return extents
    rows, rest = extents[0], extents[1:]
    if role in (Role.EMBEDDING, Role.LM_HEAD) or leaf in _BY_ROWS:
        return (-(-rows // gpus), *rest)
    if leaf in _BY_KV_HEADS and shape.kv_heads:
        return (-(-rows // min(gpus, shape.kv_heads)), *rest)
    if leaf == _QKV and shape.kv_heads:
        per_head = rows // (shape.heads + 2 * shape.kv_heads)
        return (per_head * (shape.heads // gpus + 2 * -(-shape.kv_heads // gpus)), *rest)
    if leaf in _BY_COLUMNS and len(extents) == 2:
        return (rows, -(-extents[1] // gpus))
    return extents


#: Tokens of a step of chunked prefill (the default of vLLM's API server).
STEP_TOKENS = 2048
#: Upper limits of searches that nothing else bounds.
_MOST_SEQUENCES, _LONGEST_CONTEXT = 1 << 16, 1 << 24
#: Devices up to which `devices_needed` searches.
MOST_DEVICES = 64


def activation_bytes(shape: ModelShape, context: int, batch: int, gpus: int) -> int:
    """Return the estimated bytes of activations of a step on one device."""
    # The residual stream twice; queries, keys and values; both halves of the gated MLP; float32 logits.
    tokens = max(batch, min(batch * context, STEP_TOKENS))
    heads = shape.heads // gpus + 2 * -(-shape.kv_heads // gpus)
    width = 2 * shape.hidden + heads * shape.query_dim + 2 * -(-shape.inner // gpus)
    return tokens * width * BFLOAT16.bits // 8 + batch * shape.vocab * FLOAT32.bits // 8


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device that holds a model."""

    hardware: Hardware
    keep_free: float
    shape: ModelShape
    weights: int
    element: ElementFormat
    gpus: int

    @property
    def usable(self) -> int:
        """Bytes for weights, KV cache and activations."""
        return int(self.hardware.memory * (1 - self.keep_free))

    def cache(self, context: int, batch: int) -> int:
        """Return the bytes of the KV cache and states of `batch` sequences of `context` tokens."""
        layers = self.shape.cache
        return batch * (cache_bytes(layers, context, self.element, self.gpus) + state_bytes(layers, self.gpus))

    def taken(self, context: int, batch: int) -> int:
        """Return the bytes of weights, KV cache and activations."""
        return self.weights + self.cache(context, batch) + activation_bytes(self.shape, context, batch, self.gpus)

    def fits(self, context: int, batch: int) -> bool:
        return self.taken(context, batch) <= self.usable

    def largest_batch(self, context: int) -> int:
        """Return the largest number of sequences of `context` tokens that fit; 0: not even one fits."""
        return _largest(lambda batch: self.fits(context, batch), _MOST_SEQUENCES)

    def largest_context(self, batch: int) -> int:
        """Return the largest number of tokens that each of `batch` sequences may have, up to the model's positions."""
        return _largest(lambda context: self.fits(context, batch), self.shape.positions or _LONGEST_CONTEXT)


def devices_needed(shape: ModelShape, more_than: int, fits: Callable[[int], bool]) -> int | None:
    """Return the smallest number of devices that can share a model by tensor parallelism and hold it."""
    for number in range(more_than + 1, MOST_DEVICES + 1):
        try:
            check_parallel(shape, number)
        except UsageError:
            continue
        if fits(number):
            return number
    return None


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to `limit` for which `holds` is true, or 0; it must be true below that."""
    return bisect_left(range(1, limit + 1), True, key=lambda number: not holds(number))
