"""The text model within a model of several modalities: its config, and where its parameters are in a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple


class TextModel(NamedTuple):
    """The text model of a config.

    Attributes:
        config: Its config: the config itself, or the part of one with towers for images or sound.
        architecture: Class of the whole model in transformers; empty: that of the text model alone.
        renamings: Regular expressions and replacements from names on disk to those of the text model alone.
        unused: Regular expressions of names of tensors that the text model does not use.
    """

    config: Any
    architecture: str = ""
    renamings: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()


#: ``model_type`` of a model around a text model whose tokens see earlier tokens only -> its class.
_AROUND = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
_RENAMINGS = (
    (r"^(?:model\.)?language_model\.lm_head\.", "lm_head."),
    (r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
)
_UNUSED = (r"^(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|image_newline)(\.|$)",)


def text_of(config: Any) -> TextModel:
    """Return the text model of a config.

    Args:
        config: A `DecoderConfig`, or transformers' config.
    """
    architecture = _AROUND.get(config.model_type)
    if architecture is None:
        return TextModel(config)
    return TextModel(config.text_config, architecture, _RENAMINGS, _UNUSED)
