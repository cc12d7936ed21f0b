"""Opens the models of a comparison by transformers' code; imported only where it runs, because that takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from minifloat.checkpoint import Checkpoint
from minifloat.errors import UsageError
from minifloat.evaluate.compare.models import ModelLike, is_named
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.transformers_model import (
    CacheFactory,
    TransformersModel,
    kv_cache_factory,
    match_experts_implementation,
)
from minifloat.model.runtime.load import LoadOptions


def open_in_transformers(
    baseline: ModelLike,
    candidates: Sequence[ModelLike],
    options: CompareOptions,
    notes: list[str],
    opened: Sequence[Checkpoint | None] | None = None,
) -> list[TransformersModel]:
    """Load the models as transformers models, from checkpoints that are open if there are any, as `open_models`."""
    checkpoints = [None] * (1 + len(candidates)) if opened is None else opened
    models = [baseline_in_transformers(baseline, checkpoints[0], options)]
    for candidate, checkpoint in zip(candidates, checkpoints[1:], strict=True):
        models += candidate_in_transformers(candidate, checkpoint, options, notes)
    match_experts_implementation(models)
    return models


def baseline_in_transformers(
    model: ModelLike, checkpoint: Checkpoint | None, options: CompareOptions
) -> TransformersModel:
    return TransformersModel.of(model, _load_options(options), options.revision, checkpoint=checkpoint)


def _load_options(options: CompareOptions) -> LoadOptions:
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    return LoadOptions(dtype=dtype, device=options.device, impl=options.impl, weight_only=options.weight_only)


def candidate_in_transformers(
    candidate: ModelLike, checkpoint: Checkpoint | None, options: CompareOptions, notes: list[str]
) -> list[TransformersModel]:
    """Return a candidate as declared and, if the options request them, its other variants."""
    own = replace(_load_options(options), lm_head=options.lm_head, activations=options.activations)
    model = TransformersModel.of(candidate, own, read_kv_scales=options.kv_cache != "none", checkpoint=checkpoint)
    if not is_named(candidate):
        return [model]
    new_cache = _new_cache(model, options, notes)
    models = [model if new_cache is None else model.variant(model.name, new_cache=new_cache)]
    if options.variants and new_cache is not None:
        models.append(model.variant(f"{model.name} (KV cache not rounded)"))
    if options.variants and model.quantizes_inputs():
        models.append(model.variant(f"{model.name} (weights only)", weight_only=True))
    return models


def _new_cache(model: TransformersModel, options: CompareOptions, notes: list[str]) -> CacheFactory | None:
    """Return the factory of a candidate's simulated KV cache; None if its cache is not to be simulated."""
    if model.kv_scales is None and options.kv_cache != "fp8":
        return None
    try:
        return kv_cache_factory(model.model, model.kv_scales or {})
    except UsageError as error:
        if options.kv_cache == "fp8":
            raise
        notes.append(f"{model.name}: keys and values are not rounded: {error}")
        return None
