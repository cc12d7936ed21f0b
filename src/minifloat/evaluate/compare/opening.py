"""Opens the models of a comparison: all in engines, or all as transformers models (`models` says when)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch
from transformers import PreTrainedModel

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder
from minifloat.engine import EngineOptions
from minifloat.errors import UsageError
from minifloat.evaluate.compare.kv_cache import CacheFactory, kv_cache_factory
from minifloat.evaluate.compare.models import EngineModel, Model, ModelLike
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.transformers_model import TransformersModel, match_experts_implementation
from minifloat.kernels import native
from minifloat.model.layouts import describe
from minifloat.model.runtime.load import LoadOptions
from minifloat.model.runtime.tensors import StoredTensors

_LOG = logging.getLogger(__name__)

#: Windows up to this many tokens fit into the engine's default KV cache.
_SHORT_WINDOW = 2048
#: Sequences that an engine runs at a time.
_SEQUENCES = 32


def open_models(
    baseline: ModelLike, candidates: Sequence[ModelLike], options: CompareOptions, notes: list[str]
) -> list[Model]:
    """Return the baseline, then each candidate as declared and, if the options request them, its other variants."""
    with ExitStack() as stack:
        opened = [
            None
            if isinstance(model, PreTrainedModel)
            else stack.enter_context(Checkpoint.open(model_folder(model, revision=None if at else options.revision)))
            for at, model in enumerate((baseline, *candidates))
        ]
        checkpoints = [checkpoint for checkpoint in opened if checkpoint is not None]
        reason = "a model is loaded already" if len(checkpoints) < len(opened) else _why_no_engine(checkpoints, options)
        if not reason:
            try:
                return _in_engines([str(model) for model in (baseline, *candidates)], checkpoints, options)
            except UsageError as error:  # if it is about the options, transformers' way ends with it too
                reason = str(error)
        _LOG.info("transformers' code runs the models: %s", reason)
        return [*open_in_transformers(baseline, candidates, options, notes, opened)]


def _why_no_engine(checkpoints: Sequence[Checkpoint], options: CompareOptions) -> str:
    if native.load() is None and options.device == "cpu":
        return "the kernels of this processor are missing"
    for checkpoint in checkpoints:
        if describe(checkpoint).quantizes_inputs and not options.weight_only:
            return f"{checkpoint.path} declares quantized inputs"
    return ""


def _in_engines(names: Sequence[str], checkpoints: Sequence[Checkpoint], options: CompareOptions) -> list[Model]:
    is_long = options.window is not None and options.window > _SHORT_WINDOW
    common = EngineOptions(
        device=options.device,
        dtype=options.dtype,
        max_model_len=options.window if is_long else None,
        max_num_seqs=_SEQUENCES,
        activations="bf16",
        lm_head="bf16",
        runner="native" if options.device == "cpu" else "device",
        impl=options.impl,
    )
    plain = [replace(common, kv_cache_dtype=_plain_cache(checkpoint, options)) for checkpoint in checkpoints]
    models: list[Model] = [EngineModel(names[0], checkpoints[0], plain[0])]
    for name, checkpoint, unrounded in list(zip(names, checkpoints, plain, strict=True))[1:]:
        unrounded = replace(unrounded, lm_head=options.lm_head, activations=options.activations)
        cache = unrounded.kv_cache_dtype if options.kv_cache == "none" else options.kv_cache
        models.append(EngineModel(name, checkpoint, replace(unrounded, kv_cache_dtype=cache)))
        if options.variants and models[-1].record.kv_cache is not None:
            models.append(EngineModel(f"{name} (KV cache not rounded)", checkpoint, unrounded))
    return models


def _plain_cache(checkpoint: Checkpoint, options: CompareOptions) -> Literal["float32", "bfloat16"]:
    """Return the dtype of a KV cache that does not round keys and values of a model."""
    if options.dtype is not None:
        return "float32" if options.dtype == "float32" else "bfloat16"
    dtype = StoredTensors(checkpoint, describe(checkpoint)).dtype()
    return "float32" if dtype == torch.float32 else "bfloat16"


def open_in_transformers(
    baseline: ModelLike,
    candidates: Sequence[ModelLike],
    options: CompareOptions,
    notes: list[str],
    opened: Sequence[Checkpoint | None] | None = None,
) -> list[TransformersModel]:
    """Load the models as transformers models, from checkpoints that are open if there are any, as `open_models`."""
    checkpoints = [None] * (1 + len(candidates)) if opened is None else opened
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    load = LoadOptions(dtype=dtype, device=options.device, impl=options.impl, weight_only=options.weight_only)
    own = replace(load, lm_head=options.lm_head, activations=options.activations)
    models = [TransformersModel.of(baseline, load, options.revision, checkpoint=checkpoints[0])]
    for candidate, checkpoint in zip(candidates, checkpoints[1:], strict=True):
        scales = options.kv_cache != "none"
        model = TransformersModel.of(candidate, own, read_kv_scales=scales, checkpoint=checkpoint)
        if isinstance(candidate, PreTrainedModel):
            models.append(model)
            continue
        new_cache = _new_cache(model, options, notes)
        models.append(model if new_cache is None else model.variant(model.name, new_cache=new_cache))
        if options.variants and new_cache is not None:
            models.append(model.variant(f"{model.name} (KV cache not rounded)"))
        if options.variants and model.quantizes_inputs():
            models.append(model.variant(f"{model.name} (weights only)", weight_only=True))
    match_experts_implementation(models)
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
