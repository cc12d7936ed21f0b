"""`Blueprint`: the layout of a decoder with its config and dtype, and the parameters that it needs from a checkpoint.

Both decoders, that of the CPU (`native/`) and that of GPUs (`device/decoder.py`), are built from a
`Blueprint` and a `WeightSource`. No model of transformers is built for that. Structure and names are those of
transformers' classes, which tests/serve/engine/test_blueprint.py compares.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from minifloat.checkpoint import CONFIG_FILE
from minifloat.engine.rotary import rotary_frequencies
from minifloat.errors import ConfigError
from minifloat.kernels.decoder_layout import AttentionLayout, DecoderLayout, ExpertsLayout, NotNative
from minifloat.kernels.dtypes import DTYPES
from minifloat.model.architecture.decoder import NATIVE, decoder_layout, why_not_type
from minifloat.model.architecture.roles import text_of
from minifloat.model.runtime.tensors import ignorable_names
from minifloat.model.runtime.weights import FusedParameter, ModelParameters

_LOG = logging.getLogger(__name__)
_Item = TypeVar("_Item")
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Blueprint:
    """A model that the decoders run, without weights."""

    architecture: str
    config: Any
    dtype: torch.dtype
    layout: DecoderLayout

    def parameters(self) -> ModelParameters:
        """Return what the model needs from a checkpoint, in the order in which the decoders read it."""
        layout = self.layout
        fused: dict[str, FusedParameter] = {}
        for layer in layout.layers:
            fused |= _fused_parameters(layer.mlp) if isinstance(layer.mlp, ExpertsLayout) else {}
        config = self.config
        return ModelParameters(
            architecture=self.architecture,
            shapes=layout.shapes(),
            fused=fused,
            renamings=layout.renamings,
            ignorable=ignorable_names(config, layout.unused),
            tied=(layout.lm_head.weight, layout.embedding) if config.tie_word_embeddings else None,
        )

    def renamed(self, name: str) -> str:
        """Return the name in the layout of something that a checkpoint names otherwise."""
        for pattern, replacement in self.layout.renamings:
            name = re.sub(pattern, replacement, name)
        return name


def why_not_supported(config: Any, dtype: torch.dtype) -> str:
    """Return why a decoder does not support a model; an empty text if it does, as far as the types tell."""
    if dtype not in DTYPES:
        return f"it is {dtype}"
    return why_not_type(text_of(config).config.model_type)


def blueprint_of(config: Any, dtype: torch.dtype) -> Blueprint:
    """Return the structure of a model."""
    text = text_of(config)
    values: Any = text.config
    try:
        padding = getattr(values, "pad_token_id", None)
        if padding is not None and not -values.vocab_size <= padding < values.vocab_size:
            raise ValueError(f"pad_token_id: expected a token of {values.vocab_size}, found {padding}")
        layout = decoder_layout(values)
        for layer in layout.layers:
            if isinstance(layer.attention, AttentionLayout) and layer.attention.rotary is not None:
                rotary_frequencies(layer.attention.rotary)  # a missing parameter is an error before a weight is read
        layout = replace(layout, renamings=(*text.renamings, *layout.renamings), unused=(*text.unused, *layout.unused))
        return Blueprint(text.architecture or NATIVE[values.model_type].architecture, config, dtype, layout)
    except NotNative:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        path = f"{config.name_or_path}/{CONFIG_FILE}"
        raise ConfigError(path, f"no {values.model_type} model can be built of it: {error!r}") from error


def _fused_parameters(layout: ExpertsLayout) -> dict[str, FusedParameter]:
    gate_up = tuple(tuple(linear.weight for linear in expert.gate_up) for expert in layout.experts)
    down = tuple((expert.down.weight,) for expert in layout.experts)
    shapes = layout.fused_shapes().items()
    return {
        name: FusedParameter(shape, experts, layout.transposed, layout.either)
        for (name, shape), experts in zip(shapes, (gate_up, down), strict=True)
    }


def logged_layers(layers: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the layers that are to be loaded, and log how many are done."""
    said = time.monotonic()
    for number, layer in enumerate(layers):
        now = time.monotonic()
        if now - said >= _SECONDS_BETWEEN_LINES:
            said = now
            _LOG.info("loading: %d of %d layers", number, len(layers))
        yield layer
