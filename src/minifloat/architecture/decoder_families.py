"""Which architectures our decoders cover, told from a config alone: `check` asks without a model or torch."""

from __future__ import annotations

#: Values of ``model_type`` whose modelling code computes what a `Decoder` does; those without experts first.
DENSE = ("llama", "mistral", "qwen2", "qwen3")
FAMILY = (*DENSE, "mixtral", "qwen2_moe", "qwen3_moe")
#: Rotary embeddings whose frequencies do not depend on the length of the text.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ACTIVATION = "silu"


def why_not_family(model_type: str, hidden_act: str | None, rope_type: str, *, experts: bool = True) -> str:
    """Why the native decoder, or that of GPUs, does not cover an architecture; empty where it does.

    Args:
        model_type: From the config.
        hidden_act: The activation of its MLPs.
        rope_type: The kind of its rotary embedding.
        experts: Whether mixtures of experts are covered: those of GPUs are not.
    """
    if model_type not in FAMILY:
        return f"its model_type is {model_type!r}, not one of {', '.join(FAMILY)}"
    if hidden_act != _ACTIVATION:
        return f"its activation is {hidden_act!r}, not {_ACTIVATION!r}"
    if rope_type not in _ROPE_TYPES:
        return f"its rotary embedding is {rope_type!r}, not one of {', '.join(_ROPE_TYPES)}"
    if model_type not in DENSE and not experts:
        return f"it is a mixture of experts ({model_type}), which the decoder of GPUs does not have"
    return ""
