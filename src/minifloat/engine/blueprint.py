"""`Blueprint`: the plan of a decoder with its config and dtype, and the parameters that it needs from a checkpoint.

Both decoders, that of the CPU (`native/`) and that of GPUs (`device/decoder.py`), are built from a
`Blueprint` and a `WeightSource`. No model of transformers is built for that. Structure and names are those of
transformers' classes, which tests/serve/engine/test_blueprint.py compares.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from minifloat.checkpoint import CONFIG_FILE
from minifloat.engine.rotary import rotary_frequencies
from minifloat.errors import ConfigError
from minifloat.kernels.dtypes import DTYPES
from minifloat.model.architecture.decoder import NATIVE, decoder_plan, why_not_type
from minifloat.model.architecture.decoder.plan import (
    AttentionPlan,
    DecoderPlan,
    ExpertsPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
    NotNative,
)
from minifloat.model.architecture.multimodal import text_of
from minifloat.model.runtime.tensors import ignorable_names
from minifloat.model.runtime.weights import FusedParameter, ModelParameters


@dataclass(frozen=True)
class Blueprint:
    """A model that the decoders run, without weights."""

    architecture: str
    config: Any
    dtype: torch.dtype
    plan: DecoderPlan

    def parameters(self) -> ModelParameters:
        """Return what the model needs from a checkpoint, in the order in which the decoders read it."""
        plan = self.plan
        shapes: dict[str, tuple[int, ...]] = {plan.embedding: plan.lm_head.shape} | plan.lm_head.shapes()
        fused: dict[str, FusedParameter] = {}
        if plan.inputs is not None:
            projection = plan.inputs.projection
            shapes |= {plan.inputs.table: (plan.lm_head.shape[0], projection.shape[0])} | projection.shapes()
            shapes |= _norm_shapes(plan.inputs.norm)
        for layer in plan.layers:
            attention, mlp = layer.attention, layer.mlp
            shapes |= _norm_shapes(layer.input_norm, layer.attention_norm)
            shapes |= attention.shapes()
            shapes |= _norm_shapes(layer.mlp_norm, layer.result_norm)
            if isinstance(mlp, MlpPlan):
                shapes |= _shapes(*mlp.gate_up, mlp.down)
            else:
                shapes |= _experts_shapes(mlp)
                fused |= _fused_parameters(mlp)
            if layer.input is not None:
                shapes |= _shapes(layer.input.gate, layer.input.out) | _norm_shapes(layer.input.norm)
            shapes |= {} if layer.scalar is None else {layer.scalar: (1,)}
        config = self.config
        return ModelParameters(
            architecture=self.architecture,
            shapes=shapes | _norm_shapes(plan.norm),
            fused=fused,
            renamings=plan.renamings,
            ignorable=ignorable_names(config, plan.unused),
            tied=(plan.lm_head.weight, plan.embedding) if config.tie_word_embeddings else None,
        )

    def renamed(self, name: str) -> str:
        """Return the name in the plan of something that a checkpoint names otherwise."""
        for pattern, replacement in self.plan.renamings:
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
        plan = decoder_plan(values)
        for layer in plan.layers:
            if isinstance(layer.attention, AttentionPlan) and layer.attention.rotary is not None:
                rotary_frequencies(layer.attention.rotary)  # a missing parameter is an error before a weight is read
        plan = replace(plan, renamings=(*text.renamings, *plan.renamings), unused=(*text.unused, *plan.unused))
        return Blueprint(text.architecture or NATIVE[values.model_type].architecture, config, dtype, plan)
    except NotNative:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RuntimeError) as error:
        path = f"{config.name_or_path}/{CONFIG_FILE}"
        raise ConfigError(path, f"no {values.model_type} model can be built of it: {error!r}") from error


def _experts_shapes(plan: ExpertsPlan) -> dict[str, tuple[int, ...]]:
    intermediate, hidden = plan.shape
    router = plan.router
    shapes: dict[str, tuple[int, ...]] = {router.weight: (plan.count, hidden)}
    vectors = (router.bias, router.correction, router.scales)
    shapes |= {name: (plan.count,) for name in vectors if name is not None}
    if plan.experts:
        shapes |= _shapes(*(linear for expert in plan.experts for linear in expert.gate_up))
        shapes |= _shapes(*(expert.down for expert in plan.experts))
    else:
        shapes |= {name: parameter.shape for name, parameter in _fused_parameters(plan).items()}
    if plan.gate_up_bias is not None:
        shapes[plan.gate_up_bias] = (plan.count, 2 * intermediate)
    if plan.down_bias is not None:
        shapes[plan.down_bias] = (plan.count, hidden)
    if plan.shared is not None:
        shapes |= _shapes(*plan.shared.gate_up, plan.shared.down)
    if plan.shared_gate is not None:
        shapes[plan.shared_gate] = (1, hidden)
    if plan.norms is not None:
        norms = plan.norms
        shapes |= _norm_shapes(norms.router, norms.input, norms.experts, norms.mlp)
    return shapes


def _fused_parameters(plan: ExpertsPlan) -> dict[str, FusedParameter]:
    intermediate, hidden = plan.shape
    gate_up = tuple(tuple(linear.weight for linear in expert.gate_up) for expert in plan.experts)
    down = tuple((expert.down.weight,) for expert in plan.experts)
    return {
        plan.gate_up: FusedParameter((plan.count, 2 * intermediate, hidden), gate_up, plan.transposed, plan.either),
        plan.down: FusedParameter((plan.count, hidden, intermediate), down, plan.transposed, plan.either),
    }


def _shapes(*linears: LinearPlan) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in linears:
        shapes |= linear.shapes()
    return shapes


def _norm_shapes(*norms: NormPlan | None) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for norm in norms:
        shapes |= {} if norm is None else norm.shapes()
    return shapes
