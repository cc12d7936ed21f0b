"""Compares configs that are read without transformers with those of its classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minifloat.model.architecture.decoder import DecoderLayout, NotNative, decoder_layout
from minifloat.model.architecture.decoder_config import DecoderConfig, read_config
from minifloat.model.architecture.full_config import full_config, position_limit
from minifloat.model.architecture.roles import text_of

FOLDER = Path("/models/m")


def layout_of(config: Any) -> DecoderLayout | str:
    """What the decoders compute, or why they do not."""
    try:
        return decoder_layout(config)
    except (NotNative, ValueError) as error:
        return str(error)


def same(values: dict[str, Any]) -> DecoderConfig:
    """Compare a config with transformers', and return it."""
    ours, theirs = read_config(values, FOLDER), full_config(values, FOLDER)
    assert isinstance(ours, DecoderConfig), ours
    assert ours.model_type == theirs.model_type
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert position_limit(ours) == position_limit(theirs)
    text, their_text = text_of(ours).config, text_of(theirs).config
    assert layout_of(text) == layout_of(their_text)
    left = {"name_or_path"}  # of the whole model alone
    left |= {"per_layer_config", "head_dim", "num_key_value_heads"} if hasattr(text, "per_layer_config") else set()
    for name, value in vars(text).items():
        if name not in left:
            assert value == getattr(their_text, name), name
    return ours
