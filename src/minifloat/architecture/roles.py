"""What a tensor of a checkpoint is for, told from its name and shape.

The streaming quantizer never builds the model, so it reads roles off names, which for the weights of linears are the
same in every server. The rule is conservative: only matrices named ``.weight`` inside a numbered decoder layer, and
fused experts, are quantized unasked; embeddings, lm_head, norms, routers and vision or audio towers are kept. Every
decision is shown in the report, so a wrong guess is visible and can be overridden.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any

from minifloat.checkpoint import TensorInfo


class Role(enum.Enum):
    """What a tensor is for; the value is how reports name it."""

    LINEAR = "linear"
    EXPERTS = "fused experts"
    LM_HEAD = "lm_head"
    EMBEDDING = "embedding"
    ROUTER = "router"
    TOWER = "vision or audio tower"
    VECTOR = "norm or bias"
    OTHER = "other"


_LAYER = re.compile(r"(^|\.)(layers|h|blocks?|decoder_layers)\.\d+\.")
_TOWER = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|image\w*|multi_modal_projector|mm_projector|speech\w*)\.")
_EMBEDDINGS = re.compile(r"(^|\.)(\w*embed(ding)?s?(_tokens|_in|_positions)?|\w*_embeddings?|wte|wpe)\.weight$")
_LM_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output|head)\.weight$")
_ROUTER = re.compile(r"(^|\.)(gate|router|gating|shared_expert_gate|gate\.wg|router\.\w+)\.weight$")
_FUSED_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)(\.weight)?$")
_DENSE_FLOATS = ("BF16", "F16", "F32")

#: Architectures whose matrices are Conv1D, stored ``[in, out]``: quantized as linears they would be transposed.
CONV1D_MODEL_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})


def role_of(info: TensorInfo) -> Role:
    """The role of a tensor of a checkpoint that is not quantized."""
    name, dimensions = info.name, len(info.shape)
    if dimensions < 2:
        return Role.VECTOR
    if _TOWER.search(name):
        return Role.TOWER
    if dimensions == 3 and _FUSED_EXPERTS.search(name):
        return Role.EXPERTS
    if dimensions != 2 or not name.endswith(".weight"):
        return Role.OTHER
    if _EMBEDDINGS.search(name):
        return Role.EMBEDDING
    if _LM_HEADS.search(name):
        return Role.LM_HEAD
    if _ROUTER.search(name):
        return Role.ROUTER
    return Role.LINEAR if _LAYER.search(name) else Role.OTHER


def is_matrix(info: TensorInfo) -> bool:
    """Whether a tensor is the weight of something that multiplies, so that a server may ask whether it is quantized."""
    return info.dtype in _DENSE_FLOATS and len(info.shape) == 2 and info.name.endswith(".weight")


def is_dense_float(info: TensorInfo) -> bool:
    """Whether the dtype is one that weights are quantized from."""
    return info.dtype in _DENSE_FLOATS


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's own part of a config that nests it."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
