"""What the decoder of GPUs lacks: the first part of a layout that it does not compute, by name."""

from __future__ import annotations

from collections.abc import Iterator

from minifloat.kernels.decoder_layout import (
    Activation,
    AttentionLayout,
    DecoderLayout,
    DeltaLayout,
    LayerLayout,
    MlpLayout,
    NormLayout,
)


def why_not_on_device(layout: DecoderLayout) -> str:
    """Return why the decoder of GPUs does not run a model; empty if it does."""
    missing = next(_missing(layout), "")
    return f"the decoder of GPUs does not have {missing}" if missing else ""


def _missing(layout: DecoderLayout) -> Iterator[str]:
    if layout.inputs is not None:
        yield "inputs of layers besides the residual stream"
    if layout.embedding_factor != 1.0 or layout.logits_factor != 1.0 or layout.logits_cap is not None:
        yield "factors and caps of embeddings and logits"
    if any(isinstance(layer.attention, DeltaLayout) for layer in layout.layers):
        yield "layers with a gated delta rule"
        return
    attentions = [layer.attention for layer in layout.layers if isinstance(layer.attention, AttentionLayout)]
    for layer, attention in zip(layout.layers, attentions, strict=True):
        yield from _missing_in_layer(layer, layout.norm)
        yield from _missing_in_attention(attention, attentions[0], layout.norm.eps)


def _missing_in_layer(layer: LayerLayout, last: NormLayout) -> Iterator[str]:
    if layer.parallel:
        yield "attention and MLP side by side"
    if layer.residual_factor != 1.0 or layer.scalar is not None:
        yield "factors of the results of layers, or of the residual stream"
    if layer.attention_norm is not None or layer.result_norm is not None:
        yield "norms behind attention and MLP"
    for norm in (layer.input_norm, layer.mlp_norm, last):
        if norm is None or not _is_plain(norm, last.eps):
            yield "norms other than RMS norms before attention and MLP"
    if not isinstance(layer.mlp, MlpLayout):
        yield "mixtures of experts"
    elif layer.mlp.activation != Activation():
        yield f"the activation {layer.mlp.activation.name!r}"


def _missing_in_attention(attention: AttentionLayout, first: AttentionLayout, eps: float) -> Iterator[str]:
    if attention.latent is not None:
        yield "latent attention"
    if attention.values != "own" or attention.v_norm is not None:
        yield "keys that are values, or shared by layers, or norms of values"
    if attention.rotary is None or attention.rotary != first.rotary:
        yield "layers with different rotary embeddings, or without one"
    elif attention.rotary.interleaved:
        yield "rotary embeddings of neighbouring dimensions"
    if (attention.kv_heads, attention.head_dim, attention.scale) != (first.kv_heads, first.head_dim, first.scale):
        yield "layers with heads of different sizes"
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    if attention.whole_norms or any(not _is_plain(norm, eps) or len(norm.shape) != 1 for norm in norms):
        yield "norms over all heads, or with a weight for each"
    if attention.gated:
        yield "gates of the results of attention"
    extras = {"sinks": attention.sinks, "caps of scores": attention.score_cap, "clipped heads": attention.clip}
    yield from (name for name, value in extras.items() if value is not None)


def _is_plain(norm: NormLayout, eps: float) -> bool:
    """Return whether a norm is an RMS norm with a weight and an epsilon."""
    changed = norm.centered or norm.offset or norm.factor != 1.0
    return norm.weight is not None and norm.bias is None and not changed and norm.eps == eps
