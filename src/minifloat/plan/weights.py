"""Bytes and multiplications of a model's weights, on one of the devices that share them.

Tensor parallelism as vLLM and SGLang do it, after Megatron: what comes out of the residual stream (q, k, v, gate, up)
is divided by rows, what goes back into it (o, down) by columns, embedding and lm_head by tokens. Norms, routers, the
down-projections of MLA and whatever is not known by name are copied to every device; key-value heads are divided as
far as there are any, then copied. A divided weight is counted as a weight of that shape, scales and all.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from minifloat.architecture.roles import Role
from minifloat.errors import UsageError
from minifloat.layouts import WriteLayout
from minifloat.plan.quantization import Part, TensorPlan
from minifloat.plan.shape import ModelShape

_BY_ROWS = frozenset({"q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "fc1"})
_BY_KV_HEADS = frozenset({"k_proj", "v_proj"})
_BY_COLUMNS = frozenset({"o_proj", "down_proj", "w2", "fc2", "out_proj"})
_QKV = "qkv_proj"
_ROUTED = re.compile(r"\.experts\.")
_MULTIPLIES = (Role.LINEAR, Role.EXPERTS, Role.LM_HEAD, Role.ROUTER)


@dataclass(frozen=True)
class Weights:
    """The weights of a model as one scheme stores them. Multiplications are elements of matrices, per token.

    Attributes:
        total: Bytes of all tensors, over all devices once.
        device: Bytes on one device.
        fixed: Of `device`, the bytes that every decode step reads; a table that is only looked up is not among them.
        routed: Of `device`, the bytes of routed experts.
        quantized: Multiplications with quantized weights that every token makes.
        quantized_routed: Those with all quantized routed experts.
        plain: Multiplications with weights in 16 bits or more that every token makes, but for those of `head`.
        plain_routed: Those with all routed experts in 16 bits or more.
        head: Multiplications of lm_head, which a prompt needs for its last token only.
    """

    total: int = 0
    device: int = 0
    fixed: int = 0
    routed: int = 0
    quantized: int = 0
    quantized_routed: int = 0
    plain: int = 0
    plain_routed: int = 0
    head: int = 0


@dataclass(frozen=True)
class Counts:
    """Weights as people count them: elements of the model, whatever stores them.

    Attributes:
        total: All.
        active: Those that a token meets: of routed experts the ones that it visits.
    """

    total: int
    active: int


def check_parallel(shape: ModelShape, gpus: int) -> None:
    """Refuse a number of devices that engines refuse.

    Raises:
        UsageError: Heads cannot be divided.
    """
    if gpus < 1:
        raise UsageError(f"gpus: expected at least 1, got {gpus}")
    if shape.heads % gpus:
        raise UsageError(f"gpus: {gpus} devices do not divide {shape.heads} heads of attention")
    if shape.kv_heads and shape.kv_heads % gpus and gpus % shape.kv_heads:
        raise UsageError(f"gpus: {gpus} devices neither divide {shape.kv_heads} key-value heads nor are a multiple")


def count(tensors: Iterable[TensorPlan], copies: Mapping[str, int], shape: ModelShape) -> Counts:
    """Elements of a model; arguments as for `weigh`."""
    total = routed = 0
    for tensor in tensors:
        shapes: list[tuple[int, ...]] = [part.shape for part in tensor.parts] or [tensor.source.shape]
        elements = copies[tensor.source.name] * sum(map(math.prod, shapes))
        total += elements
        routed += elements if _is_routed(tensor) else 0
    share = shape.chosen / shape.experts if shape.experts else 0.0
    return Counts(total, total - round(routed * (1 - share)))


def weigh(
    tensors: Iterable[TensorPlan], copies: Mapping[str, int], layout: WriteLayout, shape: ModelShape, gpus: int
) -> Weights:
    """Sum up what becomes of every tensor.

    Args:
        tensors: Of a `Plan`; tensors without parts are copied.
        copies: Name of a source tensor -> how many are like it.
        layout: Names and shapes of divided weights come from it.
        shape: Of the model.
        gpus: Devices that share it.
    """
    tensors = tuple(tensors)
    tied = not any(tensor.role is Role.LM_HEAD for tensor in tensors)
    sums = dict.fromkeys(Weights.__dataclass_fields__, 0)
    for tensor in tensors:
        alike = copies[tensor.source.name]
        device, elements = (alike * size for size in _on_device(tensor, layout, shape, gpus))
        sums["total"] += alike * sum(output.nbytes for output in tensor.outputs)
        sums["device"] += device
        is_head = tensor.role is Role.LM_HEAD or (tied and _is_token_embedding(tensor, shape))
        if _is_routed(tensor):
            sums["routed"] += device
            sums["quantized_routed" if tensor.parts else "plain_routed"] += elements
        elif tensor.role is Role.TOWER or (tensor.role is Role.EMBEDDING and not is_head):
            continue  # in memory; a decode step does not read it
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
    """Bytes and elements of one device's part of a tensor."""
    nbytes = sum(constant.tensor.nbytes for constant in tensor.constants)
    if not tensor.parts:
        extents = _divided(tensor.source.name, tensor.role, tensor.source.shape, shape, gpus)
        whole = max(math.prod(tensor.source.shape), 1)
        return nbytes + -(-tensor.source.nbytes * math.prod(extents) // whole), math.prod(extents)
    elements = 0
    for part in tensor.parts:
        extents = _part_extents(part, shape, gpus)
        elements += math.prod(extents)
        nbytes += sum(output.nbytes for output in layout.weight_tensors(part.module, part.scheme.weight, extents).all)
    return nbytes, elements


def _part_extents(part: Part, shape: ModelShape, gpus: int) -> tuple[int, int]:
    rows, cols = _divided(f"{part.module}.weight", Role.LINEAR, part.shape, shape, gpus)
    return rows, cols


def _divided(name: str, role: Role, extents: tuple[int, ...], shape: ModelShape, gpus: int) -> tuple[int, ...]:
    """The shape of one device's part, the largest where they are not equal."""
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
