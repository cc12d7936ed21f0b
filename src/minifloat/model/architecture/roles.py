"""The role of a tensor in the model, decided from its name and shape.

The streaming quantizer never builds the model, so it decides roles by names, which are the same in every server for the
weights of linears. The rule is conservative: by default only matrices named ``.weight`` inside a numbered decoder
layer, and fused experts, are quantized; embeddings, lm_head, norms, routers and vision or audio towers are kept. The
report shows every decision, so that a user can see and override a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.family import GENERAL, Family, Role

_LAYER = re.compile(r"(^|\.)(layers?|h|blocks?|decoder_layers)\.\d+\.")
_TOWER = re.compile(
    r"(^|\.)(visual|vision\w*|video\w*|audio\w*|image\w*|multi_modal_projector|mm_projector|speech\w*|sam_model"
    r"|perceiver_resampler)\."
)
_EMBEDDINGS = re.compile(
    r"(^|\.)(\w*embed(ding)?s?(_tokens|_in|_positions)?(_per_layer)?|\w*_embeddings?|wte|wpe|shared)\.weight$"
)
_LM_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output|head)\.weight$")
_ROUTER = re.compile(r"(^|\.)(gate|router|gating|shared_expert_gate|gate\.wg|router\.\w+)\.weight$")
#: Linears that vLLM and SGLang build without quantization (DeepSeek's indexer, the projection of MTP layers), and the
#: gates of linear attention, one row per head, which no block of 128 rows fits.
#: Source: vLLM 0.32.0, models/deepseek_v2.py: Indexer (wk and weights_proj are one linear), models/deepseek_mtp.py,
#: layers/mamba/gdn/qwen_gdn_linear_attn.py: create_ba_proj; SGLang 0.5.23, layers/attention/dsa/dsa_indexer.py,
#: models/deepseek_nextn.py, models/qwen3_5.py: create_ba_proj.
_UNQUANTIZED = re.compile(r"\.(indexer\.(wk|weights_proj)|eh_proj|in_proj_ba|linear_attn\.in_proj_[ab])\.weight$")
#: Names of the field with the number of routed experts of a layer.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_DENSE_FLOATS = ("BF16", "F16", "F32")


def role_of(info: TensorInfo, family: Family = GENERAL) -> Role:
    """Return the role of a tensor of an unquantized checkpoint."""
    name, dimensions = info.name, len(info.shape)
    if dimensions < 2:
        return Role.VECTOR
    if _TOWER.search(name):
        return Role.TOWER
    if dimensions == 3 and family.fused_tensor(name) is not None:
        return Role.EXPERTS
    if dimensions != 2 or not name.endswith(".weight"):
        return Role.OTHER
    own = family.own_role(name)
    if own is not None:
        return own
    if _EMBEDDINGS.search(name):
        return Role.EMBEDDING
    if _LM_HEADS.search(name):
        return Role.LM_HEAD
    if _ROUTER.search(name):
        return Role.ROUTER
    if _UNQUANTIZED.search(name):
        return Role.UNQUANTIZED_IN_SERVERS
    return Role.LINEAR if _LAYER.search(name) else Role.OTHER


def is_matrix(info: TensorInfo) -> bool:
    """Return whether a tensor is an unquantized matrix named ``.weight``, which a server may look up as a linear."""
    return info.dtype in _DENSE_FLOATS and len(info.shape) == 2 and info.name.endswith(".weight")


def is_dense_float(info: TensorInfo) -> bool:
    """Return whether the dtype is BF16, F16 or F32, from which weights are quantized."""
    return info.dtype in _DENSE_FLOATS


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a config: ``text_config`` if there is one, else the config itself."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
