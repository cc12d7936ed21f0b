"""The places of a decoder layer where scales of input channels can move into the tensor before a linear.

``y = W x`` stays the same with the columns of W multiplied by s and x divided by s. Where x comes from a norm, v_proj
or up_proj, the division changes their weights and costs nothing; with powers of two the logits keep their bits. Left
out: norms that multiply by ``1 + w`` (not exact in BF16), norms of results (OLMo 2), latent attention (DeepSeek).

Source: AWQ (arXiv 2306.00978), section 3.2; SmoothQuant (arXiv 2211.10438), section 4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minifloat.checkpoint import TensorInfo
from minifloat.model.architecture.families import FAMILIES, family_of
from minifloat.model.architecture.family import FoldKind
from minifloat.model.architecture.roles import is_dense_float, text_config


@dataclass(frozen=True)
class FoldPart:
    """A tensor of the checkpoint, or a part of it."""

    tensor: str
    expert: int | None = None  #: index in ``[E, N, K]``
    rows: tuple[int, int] | None = None  #: first and end


@dataclass(frozen=True)
class FoldSite:
    """A place where scales of input channels can be folded."""

    kind: FoldKind
    producers: tuple[FoldPart, ...]
    readers: tuple[FoldPart, ...]  #: every reader of the scaled tensor, also those that are not quantized
    channels: int
    head_dim: int
    sharing: int = 1

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that change, without repetition."""
        return tuple(dict.fromkeys(part.tensor for part in (*self.producers, *self.readers)))


_MLP = r"(mlp|block_sparse_moe)\."
_EXPERT = r"(experts\.\d+\.|shared_expert\.)"
_ATTENTION_READERS = re.compile(r"self_attn\.(q|k|v|qkv)_proj\.weight")
_MLP_READERS = re.compile(
    rf"{_MLP}((gate|shared_expert_gate)\.weight"
    rf"|{_EXPERT}?(gate_proj|up_proj|gate_up_proj|w1|w3|c_fc)\.weight|experts\.gate_up_proj(\.weight)?)"
)
_ATTENTION_OUTPUT = "self_attn.o_proj.weight"
_MLP_OUTPUTS = re.compile(rf"{_MLP}({_EXPERT}?(down_proj|w2|c_proj)\.weight|experts\.down_proj(\.weight)?)")
#: Tensors without an input that is scaled: norms and the biases of linears.
_OTHERS = re.compile(
    r"(input|post_attention|pre_feedforward|post_feedforward|post_self_attn|post_mlp)_layernorm\.(weight|bias)"
    r"|self_attn\.((q|k|v|qkv|o)_proj\.bias|(q_norm|k_norm|query_layernorm|key_layernorm)\.weight"
    r"|rotary_emb\.inv_freq)"
    rf"|{_MLP}{_EXPERT}?(gate_proj|up_proj|gate_up_proj|down_proj|c_fc|c_proj)\.bias"
)
_KNOWN = (_ATTENTION_READERS, _MLP_READERS, re.compile(re.escape(_ATTENTION_OUTPUT)), _MLP_OUTPUTS, _OTHERS)
#: Norms and the linears that read their output, in families that have the kind NORM.
_NORMS = (("input_layernorm", _ATTENTION_READERS), ("post_attention_layernorm", _MLP_READERS))


def folding_types() -> tuple[str, ...]:
    """Return all values of ``model_type`` whose layers have places where scales can be folded."""
    return tuple(name for family in FAMILIES if family.folds for name in family.model_types)


def why_not_fold(layer_prefix: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> str:
    """Return why no scales can be folded in a layer; empty if they can."""
    text = text_config(config)
    if not family_of(text).folds:
        return f"the model_type {text.get('model_type')!r} is not one of {', '.join(folding_types())}"
    layer = _layer(layer_prefix, tensors)
    if not layer:
        return f"no tensor has a name that starts with {layer_prefix!r}"
    for name, info in layer.items():
        if not any(pattern.fullmatch(name) for pattern in _KNOWN):
            return f"the layer has a tensor of unknown use, {info.name}"
        if not is_dense_float(info):
            return f"{info.name} is stored as {info.dtype}; expected BF16, F16 or F32"
        hidden = text.get("hidden_size")
        if len(info.shape) == 3 and info.shape[-2 if _MLP_OUTPUTS.fullmatch(name) else -1] != hidden:
            return f"{info.name} {list(info.shape)} does not store experts as [E, out, in] of hidden_size {hidden}"
    return ""


def fold_sites(layer_prefix: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> tuple[FoldSite, ...]:
    """Return the places of a layer where scales can be folded without changing the model's function."""
    if why_not_fold(layer_prefix, tensors, config):
        return ()
    text = text_config(config)
    layer = _layer(layer_prefix, tensors)
    kinds = family_of(text).folds
    attention, mlp = (_norm_site(layer, *pair) if FoldKind.NORM in kinds else None for pair in _NORMS)
    value = _value_site(layer, text)
    return tuple(site for site in (attention, value, mlp, *_up_sites(layer)) if site is not None)


def _layer(prefix: str, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    start = f"{prefix.removesuffix('.')}."
    return {name[len(start) :]: info for name, info in tensors.items() if name.startswith(start)}


def _norm_site(layer: Mapping[str, TensorInfo], norm: str, readers: re.Pattern[str]) -> FoldSite | None:
    weight = layer.get(f"{norm}.weight")
    found = [info for name, info in layer.items() if readers.fullmatch(name)]
    if weight is None or not found or any(info.shape[-1:] != weight.shape for info in found):
        return None
    width = weight.shape[0]
    producers = _with_bias(layer, f"{norm}.weight")
    return FoldSite(FoldKind.NORM, producers, tuple(FoldPart(info.name) for info in found), width, width)


def _value_site(layer: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> FoldSite | None:
    """Return the site of v_proj and o_proj; None if the attention clamps values or the shapes contradict the config."""
    output = layer.get(_ATTENTION_OUTPUT)
    heads = config.get("num_attention_heads")
    if output is None or len(output.shape) != 2 or not heads or config.get("clip_qkv") is not None:
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim, rest = divmod(output.shape[1], heads)
    if rest or heads % kv_heads or config.get("head_dim") not in (None, head_dim):
        return None
    rows, expected = kv_heads * head_dim, {"v_proj": kv_heads, "qkv_proj": heads + 2 * kv_heads}
    for leaf, total in expected.items():
        name = f"self_attn.{leaf}.weight"
        if name in layer and layer[name].shape[0] == total * head_dim:
            part = (total * head_dim - rows, total * head_dim) if total != kv_heads else None
            producers = _with_bias(layer, name, rows=part)
            readers = (FoldPart(output.name),)
            return FoldSite(FoldKind.VALUE, producers, readers, output.shape[1], head_dim, heads // kv_heads)
    return None


def _up_sites(layer: Mapping[str, TensorInfo]) -> Iterator[FoldSite]:
    """Yield the site of up_proj and down_proj for each MLP and each expert of the layer."""
    for name, output in layer.items():
        if not _MLP_OUTPUTS.fullmatch(name):
            continue
        width, count = output.shape[-1], (output.shape[0] if len(output.shape) == 3 else None)
        producer = _up_projection(layer, name, width)
        if producer is None:
            continue
        up, rows = producer
        for expert in (None,) if count is None else range(count):
            producers = _with_bias(layer, up, expert, rows)
            yield FoldSite(FoldKind.UP, producers, (FoldPart(output.name, expert),), width, width)


def _up_projection(
    layer: Mapping[str, TensorInfo], output: str, width: int
) -> tuple[str, tuple[int, int] | None] | None:
    """Return the tensor and the rows of up_proj before a down_proj; None for an MLP without a gate."""
    for down, up, fused in (("w2", "w3", False), ("down_proj", "up_proj", False), ("down_proj", "gate_up_proj", True)):
        name = re.sub(rf"\.{down}(?=\.weight$|$)", f".{up}", output)
        if name == output or name not in layer or len(layer[name].shape) != len(layer[output].shape):
            continue
        if layer[name].shape[-2] == (2 * width if fused else width):
            return name, (width, 2 * width) if fused else None
    return None


def _with_bias(
    layer: Mapping[str, TensorInfo], name: str, expert: int | None = None, rows: tuple[int, int] | None = None
) -> tuple[FoldPart, ...]:
    bias = layer.get(f"{name.removesuffix('.weight')}.bias")
    parts = (FoldPart(layer[name].name, expert, rows),)
    return parts if bias is None else (*parts, FoldPart(bias.name, None, rows))
