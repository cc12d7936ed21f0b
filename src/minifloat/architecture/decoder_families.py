"""The model families that the native decoders support, decided from the config without loading a model or torch."""

from __future__ import annotations

from minifloat.architecture.families import native_decoder, native_types
from minifloat.architecture.family import NativeDecoder

#: Types of rotary embeddings whose frequencies do not depend on the length of the text.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ACTIVATION = "silu"


def why_not_family(model_type: str, hidden_act: str | None, rope_type: str, *, experts: bool = True) -> str:
    """Return why a decoder does not support an architecture; empty if it does.

    Args:
        model_type: ``model_type`` of the config.
        hidden_act: Activation function of the MLPs.
        rope_type: Type of the rotary embedding.
        experts: Whether the decoder supports mixtures of experts; the CPU decoder does, the GPU decoder does not.
    """
    native = native_decoder(model_type)
    if native is None:
        return f"its model_type is {model_type!r}, not one of {', '.join(native_types())}"
    if hidden_act != _ACTIVATION:
        return f"its activation is {hidden_act!r}, not {_ACTIVATION!r}"
    if rope_type not in _ROPE_TYPES:
        return f"its rotary embedding is {rope_type!r}, not one of {', '.join(_ROPE_TYPES)}"
    if native is NativeDecoder.MIXTURE and not experts:
        return f"it is a mixture of experts ({model_type}), which the decoder of GPUs does not have"
    return ""
