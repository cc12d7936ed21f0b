"""What a tensor is, by its name and shape: its role, the linears that servers fuse with it, its layer, its text model.

By default only matrices named ``.weight`` in a numbered decoder layer, and fused experts, are quantized.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.families import OUTER
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
#: Names of the field of a config that says how many experts a token visits.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "top_k")
_DENSE_FLOATS = ("BF16", "F16", "F32")


def role_of(info: TensorInfo, family: Family = GENERAL) -> Role:
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


def is_embedding(module: str) -> bool:
    return _EMBEDDINGS.search(f"{module}.weight") is not None


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


#: Names that hold these layers: ``mtp.layers.0.``, ``model.mtp_layers.0.``, ``model.mtp_block.0.``
_NAMED = re.compile(r"(^|\.)(mtp|nextn)(_\w+)?\.")
#: A layer of the decoder, below the names that outer models put before it; towers have other names.
_DECODER_LAYER = re.compile(r"^((model|language_model|llm|thinker|transformer)\.)*layers\.(?P<index>\d+)\.")
#: Parts that only these layers have: the norms of embedding and hidden state, and the projection of both.
_OWN_PARTS = re.compile(r"\.(enorm|hnorm|eh_proj)\.")
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_num_layers")


def is_mtp(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor or module belongs to a layer of multi-token prediction (MTP)."""
    if _NAMED.search(name):
        return True
    layers = text_config(config).get("num_hidden_layers")
    match = _DECODER_LAYER.match(name)
    return match is not None and isinstance(layers, int) and int(match["index"]) >= layers


def mtp_layers(config: Mapping[str, Any]) -> int:
    """Return the number of layers of multi-token prediction that a config declares."""
    text = text_config(config)
    return next((count for key in _COUNTS if isinstance(count := text.get(key), int) and count > 0), 0)


def decoder_layer(name: str) -> int | None:
    match = _DECODER_LAYER.match(name)
    return None if match is None else int(match["index"])


def is_own_part(name: str) -> bool:
    """Return whether only layers of multi-token prediction have a tensor of this name."""
    return _OWN_PARTS.search(name) is not None


#: Name of the group and last components of the names of linears that servers fuse into one.
_FUSED_SIBLINGS = (
    ("qkv", ("q_proj", "k_proj", "v_proj")),
    ("qkv", ("query", "key", "value")),
    ("gate_up", ("gate_proj", "up_proj")),
    ("gate_up", ("w1", "w3")),
    ("qkv_a", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_GROUP_OF_LEAF = {leaf: group for group, leaves in _FUSED_SIBLINGS for leaf in leaves}
_EXPERT = re.compile(r"^(?P<parent>.*\.experts)(\.\d+)?\.\w+$")


def fused_group(module: str, family: Family = GENERAL) -> str:
    """Return the name of the group of linears that a server fuses; the module's own name if it is not fused."""
    parent, _, leaf = module.rpartition(".")
    group = next((group for group, leaves in family.fused if leaf in leaves), _GROUP_OF_LEAF.get(leaf))
    return module if group is None else f"{parent}.{group}"


def expert_group(module: str) -> str | None:
    """Return the name of the expert block of a module, None for other modules."""
    match = _EXPERT.match(module)
    return match["parent"] if match else None


def serving_group(module: str, family: Family = GENERAL) -> str:
    """Return the name of the group of modules that servers run as one and that must share a scheme."""
    return expert_group(module) or fused_group(module, family)


class TextModel(NamedTuple):
    """The text model of a config."""

    config: Any
    architecture: str = ""
    renamings: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()


#: What the log and `check` say of them.
TEXT_ONLY = "text part native; images are not served"
_RENAMINGS = (
    (r"^(?:model\.)?language_model\.lm_head\.", "lm_head."),
    (r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
)
_UNUSED = (
    r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|image_newline|audio_tower"
    r"|embed_vision|embed_audio)(\.|$)",
)


def text_of(config: Any) -> TextModel:
    around = OUTER.get(config.model_type)
    if around is None:
        return TextModel(config)
    return TextModel(config.text_config, around.architecture, _RENAMINGS, _UNUSED)


def text_type(model_type: str, stated: str = "") -> str:
    around = OUTER.get(model_type)
    return model_type if around is None else stated or around.text


def has_towers(model_type: str) -> bool:
    """Return whether a model has a text model that the decoders run beside what they do not."""
    return model_type in OUTER
