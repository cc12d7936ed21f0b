"""The text model within a model of several modalities: its config, and where its parameters are in a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple


class TextModel(NamedTuple):
    """The text model of a config."""

    config: Any
    architecture: str = ""
    renamings: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()


class _Around(NamedTuple):
    """A model around a text model."""

    architecture: str
    text: str


#: ``model_type`` of a model around a text model -> its class. Without images, sound and videos, each computes what its
#: text model alone does: tokens see earlier tokens only, and all coordinates of a position are equal.
_AROUND = {
    "gemma3": _Around("Gemma3ForConditionalGeneration", "gemma3_text"),
    "gemma4": _Around("Gemma4ForConditionalGeneration", "gemma4_text"),
    "llava": _Around("LlavaForConditionalGeneration", "llama"),
    "llava_next": _Around("LlavaNextForConditionalGeneration", "llama"),
    "mistral3": _Around("Mistral3ForConditionalGeneration", "mistral"),
    "qwen2_vl": _Around("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen2_5_vl": _Around("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen3_vl": _Around("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": _Around("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text"),
    "qwen3_5": _Around("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": _Around("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
}
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
    """Return the text model of a config."""
    around = _AROUND.get(config.model_type)
    if around is None:
        return TextModel(config)
    return TextModel(config.text_config, around.architecture, _RENAMINGS, _UNUSED)


def text_type(model_type: str, stated: str = "") -> str:
    """Return the ``model_type`` of the text model of a config.json."""
    around = _AROUND.get(model_type)
    return model_type if around is None else stated or around.text


def has_towers(model_type: str) -> bool:
    """Return whether a model has a text model that the decoders run beside what they do not."""
    return model_type in _AROUND
