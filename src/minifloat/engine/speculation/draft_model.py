"""Makes draft models: the model itself in MXFP4, or another checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from minifloat.errors import UsageError
from minifloat.kernels.decoder import Attention, Decoder, DeltaNet, Experts, Layer, Mlp, Rotary
from minifloat.kernels.moe import PackedExperts
from minifloat.kernels.pack import FusedWeights, PackedWeight, pack, why_not
from minifloat.model.runtime.lm_head import FP8, round_weight
from minifloat.numerics.scheme import WeightSpec, get_scheme

_BODY = get_scheme("mxfp4").weight
#: Four bits in the last linear change the largest logit far more often than in the others.
_HEAD = FP8
_Weights = TypeVar("_Weights", FusedWeights, PackedExperts)


class SelfDraft:
    """A copy of a decoder whose linears are MXFP4, and whose last linear is FP8, rounded to nearest.

    Weights that take no more bytes already, norms, biases, the embedding and routers are shared with the model.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.memory = 0
        layers = tuple(self._layer(layer) for layer in decoder.layers)
        if not self.memory:
            raise UsageError(
                "speculate: the weights have four bits already, so the model has no cheaper copy of itself; "
                "use speculate='prompt', or a smaller model as the draft"
            )
        self.decoder = replace(decoder, layers=layers, lm_head=self._weight(decoder.lm_head, _HEAD))

    def _layer(self, layer: Layer) -> Layer:
        attention = self._attention(_plain(layer))
        mlp = self._experts(layer.mlp) if isinstance(layer.mlp, Experts) else self._mlp(layer.mlp)
        return replace(layer, attention=attention, mlp=mlp)

    def _attention(self, attention: Attention) -> Attention:
        qkv, out, latent = self._group(FusedWeights, attention.qkv), self._weight(attention.out), attention.latent
        if latent is not None:
            latent = replace(
                latent,
                keys=self._group(PackedExperts, latent.keys),
                values=self._group(PackedExperts, latent.values),
                q_up=None if latent.q_up is None else self._weight(latent.q_up),
            )
        return replace(attention, qkv=qkv, out=out, latent=latent)

    def _mlp(self, mlp: Mlp) -> Mlp:
        return replace(mlp, gate_up=self._group(FusedWeights, mlp.gate_up), down=self._weight(mlp.down))

    def _experts(self, experts: Experts) -> Experts:
        return replace(
            experts,
            gate_up=tuple(self._group(PackedExperts, stack) for stack in experts.gate_up),
            down=self._group(PackedExperts, experts.down),
            shared=None if experts.shared is None else self._mlp(experts.shared),
        )

    def _group(self, kind: type[_Weights], weights: Sequence[PackedWeight]) -> _Weights:
        """Convert weights of one call, all of them or none: a call takes weights of one format."""
        converted = [self._converted(weight, _BODY) for weight in weights]
        if any(weight is None for weight in converted):
            return kind(list(weights))
        self.memory += sum(weight.nbytes for weight in converted if weight is not None)
        return kind([weight for weight in converted if weight is not None])

    def _weight(self, weight: PackedWeight, spec: WeightSpec = _BODY) -> PackedWeight:
        converted = self._converted(weight, spec)
        if converted is None:
            return weight
        self.memory += converted.nbytes
        return converted

    def _converted(self, weight: PackedWeight, spec: WeightSpec) -> PackedWeight | None:
        """Return a weight in another format; None if it is as small already, or has no such form."""
        bits = 16.0 if weight.spec is None else weight.spec.bits_per_weight(weight.shape)
        if spec.bits_per_weight(weight.shape) >= bits or why_not(spec, weight.shape, "cpu"):
            return None
        return pack(round_weight(weight.dequantize(torch.bfloat16), spec, "the draft's copy of a weight"))


def why_not_draft(model: Decoder, draft: Decoder) -> str:
    """Return why a decoder cannot draft for a model; empty if it can."""
    if draft.lm_head.shape[0] != model.lm_head.shape[0]:
        return f"it has {draft.lm_head.shape[0]} logits per token, the model {model.lm_head.shape[0]}"
    if draft.state_floats:
        return "it keeps one state of each sequence (gated delta rule), which cannot go back to before refused drafts"
    return ""


def shares_cache(model: Decoder, draft: Decoder) -> bool:
    """Return whether a draft can work in the KV cache of a model: the same layers of attention."""
    if len(model.layers) != len(draft.layers) or model.hidden != draft.hidden:
        return False
    return all(
        _same_attention(_plain(first), _plain(second)) and first.cache_of == second.cache_of
        for first, second in zip(model.layers, draft.layers, strict=True)
    )


def _plain(layer: Layer) -> Attention:
    """Return the attention of a layer; models with others neither draft nor verify drafts."""
    assert not isinstance(layer.attention, DeltaNet)
    return layer.attention


def _same_attention(first: Attention, second: Attention) -> bool:
    """Return whether keys and values of one have the shapes, the positions and the scale of the other's."""
    fields = ("heads", "cache_shape", "scale", "window", "values")
    return all(getattr(first, field) == getattr(second, field) for field in fields) and _same_rotary(
        first.rotary, second.rotary
    )


def _same_rotary(first: Rotary | None, second: Rotary | None) -> bool:
    if first is None or second is None:
        return first is second
    return (
        first.scaling == second.scaling
        and first.interleaved == second.interleaved
        and torch.equal(first.inv_freq, second.inv_freq)
    )


def with_cache_scales(draft: Decoder, model: Decoder) -> Decoder:
    """Return a draft that reads and writes an E4M3 cache with the scales of a model."""
    layers = []
    for layer, other in zip(draft.layers, model.layers, strict=True):
        scales = _plain(other)
        attention = replace(_plain(layer), k_scale=scales.k_scale, v_scale=scales.v_scale)
        layers.append(replace(layer, attention=attention))
    return replace(draft, layers=tuple(layers))
