"""The text model within a model of several modalities: its config, and where its parameters are in a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

from minifloat.model.architecture.families import OUTER


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
