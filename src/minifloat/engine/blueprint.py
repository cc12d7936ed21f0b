"""`Blueprint`: the layout of a decoder with its config and dtype, and the parameters that it needs from a checkpoint.

The decoders of the CPU and of GPUs are built from a `Blueprint` and a `WeightSource`, without a model of transformers.
Structure, names and the bits of rotary frequencies are those of transformers, which tests/engine/test_blueprint.py
compares.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from minifloat.checkpoint import CONFIG_FILE
from minifloat.errors import ConfigError
from minifloat.kernels.decoder_layout import AttentionLayout, DecoderLayout, ExpertsLayout, NotNative, RotaryLayout
from minifloat.kernels.dtypes import DTYPES
from minifloat.model.architecture.decoder import NATIVE, decoder_layout, why_not_type
from minifloat.model.architecture.pooling import Pooling
from minifloat.model.architecture.roles import text_of
from minifloat.model.architecture.rotary import llama3_frequencies
from minifloat.model.runtime.tensors import ignorable_names
from minifloat.model.runtime.weights import FusedParameter, ModelParameters

#: The head of models for sequence classification.
SCORE = "score.weight"
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
    pooling: Pooling | None = None

    @property
    def head(self) -> str | None:
        """The parameter that the last hidden states are multiplied with; None: they are the result themselves."""
        if self.pooling is None or self.pooling.tokens is not None:
            return self.layout.lm_head.weight
        return SCORE if self.pooling.task == "score" else None

    def parameters(self) -> ModelParameters:
        """Return what the model needs from a checkpoint, in the order in which the decoders read it."""
        layout = self.layout
        fused: dict[str, FusedParameter] = {}
        for layer in layout.layers:
            fused |= _fused_parameters(layer.mlp) if isinstance(layer.mlp, ExpertsLayout) else {}
        config, shapes, unused = self.config, layout.shapes(), layout.unused
        is_tied = config.tie_word_embeddings
        if self.head != layout.lm_head.weight:
            is_tied, unused = False, (*unused, f"^{re.escape(layout.lm_head.name)}\\.")
            shapes = {name: shape for name, shape in shapes.items() if name != layout.lm_head.weight}
            if self.head is not None:
                shapes[self.head] = (1, layout.hidden)
        return ModelParameters(
            architecture=self.architecture,
            shapes=shapes,
            fused=fused,
            renamings=layout.renamings,
            ignorable=ignorable_names(config, unused),
            tied=(layout.lm_head.weight, layout.embedding) if is_tied else None,
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


def rotary_frequencies(layout: RotaryLayout) -> tuple[Tensor, float]:
    """Return the radians per position, float32 ``[turned dimensions / 2]``, and the factor of cosines and sines."""
    rope = dict(layout.parameters)
    rope_type = rope["rope_type"]
    dim = int(layout.head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope_type == "default":
        return _frequencies(rope["rope_theta"], dim if layout.partial else layout.head_dim), 1.0
    if rope_type == "yarn":
        return _yarn(rope, dim, layout.positions)
    if rope_type == "proportional":
        return _proportional(rope, layout.head_dim), 1.0
    if rope_type == "longrope":
        return _longrope(rope, dim, layout)
    scale = {"linear": _linear, "llama3": _llama3}[rope_type]
    frequencies: Tensor = scale(_frequencies(rope["rope_theta"], dim), rope)
    return frequencies, 1.0


def _frequencies(theta: float, dim: int) -> Tensor:
    return 1.0 / _powers(theta, dim)


def _powers(theta: float, dim: int) -> Tensor:
    powers: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return powers


def _linear(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    factor: float = rope["factor"]
    return frequencies / factor


def _proportional(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Turn a part of the dimensions, with the frequencies of whole heads; the others have frequency zero."""
    turned = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    steps = torch.arange(0, 2 * turned, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** steps)
    factor: float = rope.get("factor", 1.0)
    return torch.cat([frequencies, torch.zeros(head_dim // 2 - turned)]) / factor


def _llama3(frequencies: Tensor, rope: dict[str, Any]) -> Tensor:
    return torch.from_numpy(llama3_frequencies(frequencies.numpy(), rope))


def _longrope(rope: dict[str, Any], dim: int, layout: RotaryLayout) -> tuple[Tensor, float]:
    """Stretch each wavelength by a factor of its own; short texts have other factors than long ones."""
    # LongRoPE (arXiv 2402.13753)
    context = rope["original_max_position_embeddings"]
    factor = layout.positions / context if rope.get("factor") is None else rope["factor"]
    attention = rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(context))
    stretch = torch.tensor(rope["long_factor" if layout.long else "short_factor"], dtype=torch.float32)
    return 1.0 / (stretch * _powers(rope["rope_theta"], dim)), float(attention)


def _yarn(rope: dict[str, Any], dim: int, positions: int) -> tuple[Tensor, float]:
    """Stretch the wavelengths that turn seldom within the context of training, and keep those that turn often."""
    # YaRN (arXiv 2309.00071), sections 3.2 to 3.4
    theta, context = rope["rope_theta"], rope["original_max_position_embeddings"]
    factor = rope["factor"] if rope["factor"] is not None else positions / context
    attention = rope.get("attention_factor")
    if attention is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = _mscale(factor, 1)
        if mscale and mscale_all:
            attention = _mscale(factor, mscale) / _mscale(factor, mscale_all)

    def dimension(turns: float) -> float:
        """Return the dimension whose wave turns this often within the context."""
        return (dim * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp needs a width
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    powers = _powers(theta, dim)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
