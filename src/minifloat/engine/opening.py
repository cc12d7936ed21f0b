"""Open a checkpoint for serving: choose the runner, read the weights, and choose the KV cache.

The checkpoint is opened and described once. Models of the families in `minifloat.model.architecture.decoder` are read
straight into the decoder of the CPU or of the GPU; for all others transformers' code is loaded and run.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_name
from minifloat.engine.blueprint import Blueprint, blueprint_of, why_not_supported
from minifloat.engine.cache import CacheSize, cache_size, sequence_length
from minifloat.engine.device_decoder import build_device_decoder, fp8_inputs
from minifloat.engine.device_runner import DeviceRunner
from minifloat.engine.native_decoder import build_native_decoder
from minifloat.engine.native_runner import NativeRunner
from minifloat.engine.options import EngineOptions
from minifloat.engine.reports import ModelInfo
from minifloat.engine.sampling import MODEL_DEFAULTS
from minifloat.engine.scheduler import Runner
from minifloat.errors import UsageError
from minifloat.kernels import native
from minifloat.kernels.decoder import BLOCK_TOKENS, Decoder, KVCache
from minifloat.kernels.decoder_layout import AttentionLayout
from minifloat.kernels.linear import int8
from minifloat.kernels.paged import PagedCache
from minifloat.model.architecture.decoder import NotNative, why_not_on_device
from minifloat.model.architecture.decoder_config import read_config
from minifloat.model.architecture.pooling import Pooling, read_pooling
from minifloat.model.architecture.roles import TEXT_ONLY, has_towers
from minifloat.model.layouts import Description, describe
from minifloat.model.layouts.inspection import inspect_opened
from minifloat.model.runtime.config import read_generation
from minifloat.model.runtime.inputs import W8A8, allows_int8
from minifloat.model.runtime.linear import QuantizedWeight
from minifloat.model.runtime.lm_head import lm_head_name, lm_head_of, lm_head_spec
from minifloat.model.runtime.tensors import StoredTensors, device_named, kv_head_scales, kv_scales
from minifloat.model.runtime.weights import WeightSource
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity
from minifloat.report.text import size_text

_LOG = logging.getLogger(__name__)
_Scales = TypeVar("_Scales")


@dataclass(frozen=True)
class OpenedModel:
    runner: Runner
    info: ModelInfo
    config: Any
    generation_config: Any
    pooling: Pooling | None = None


@dataclass(frozen=True)
class _Loaded:
    """A runner, and the facts of its model and cache that `ModelInfo` reports."""

    runner: Runner
    architecture: str
    dtype: torch.dtype
    config: Any
    generation_config: Any
    size: CacheSize
    lm_head: str
    vocab_size: int = 0  #: where the runner has other rows than one per token


def open_model(
    path: str | os.PathLike[str],
    options: EngineOptions,
    checkpoint: Checkpoint | None = None,
    before_weights: Callable[[Any, Any, int], None] = lambda config, generation, vocab: None,
    token_id: Callable[[str], int | None] = lambda token: None,
) -> OpenedModel:
    started = time.perf_counter()
    device = device_named(options.device)
    if options.deterministic:
        native.require()
    folder = Path(path)
    with Checkpoint.open(folder) if checkpoint is None else nullcontext(checkpoint) as checkpoint:
        description = describe(checkpoint)
        rounds = options.activations == "int8" and allows_int8("int8", description, device, impl=options.impl)
        if options.activations == "fp8" and device.type == "cpu" and options.runner != "device":
            raise UsageError(
                f"activations fp8: only GPUs multiply in FP8, and the model goes to {device}; CPUs have int8"
            )
        inspection = inspect_opened(folder, checkpoint, description)
        size = size_text(inspection.nbytes)
        _LOG.info("loading %s: %s in %d file(s), to %s", folder.name, size, inspection.shards, device)
        pooling = read_pooling(checkpoint, token_id) if options.task == "auto" else None
        loaded, reason = _load(checkpoint, description, options, before_weights, pooling, inspection.nbytes)
    formats = sorted({row.format for row in inspection.rows if row.kind == "quantized"})
    runner = loaded.runner
    if formats and runner.name == "native":
        _offer_int8(options, _dtype_name(loaded.dtype))
    info = ModelInfo(
        name=model_name(folder),
        path=str(folder),
        architecture=loaded.architecture,
        runner=runner.name,
        device=str(device),
        reason_not_native=reason,
        scheme=" and ".join(formats) or "none",
        dtype=_dtype_name(loaded.dtype),
        lm_head=loaded.lm_head,
        activations="int8" if rounds else "fp8" if runner.prefill_bytes else _dtype_name(loaded.dtype),
        weight_bytes=inspection.nbytes,
        bf16_bytes=inspection.elements * torch.bfloat16.itemsize,
        step_bytes=runner.weight_bytes,
        kv_element=runner.kv_element,
        kv_bytes=runner.kv_bytes,
        kv_bytes_per_token=loaded.size.bytes_per_block // BLOCK_TOKENS,
        kv_blocks=loaded.size.blocks,
        max_model_len=min(loaded.size.max_model_len, (pooling and pooling.max_tokens) or loaded.size.max_model_len),
        max_num_seqs=loaded.size.slots,
        vocab_size=loaded.vocab_size or runner.vocab,
        load_seconds=time.perf_counter() - started,
        prefill_bytes=runner.prefill_bytes,
        state_bytes=runner.state_bytes,
        state_copies=loaded.size.copies,
        reason_no_prefix_cache=runner.reason_no_prefixes,
        deterministic=options.deterministic,
        isa=_isa(options.deterministic) if runner.name == "native" else "",
        task="generate" if pooling is None else pooling.task,
        vector_size=0 if pooling is None else runner.vocab,
    )
    return OpenedModel(runner, info, loaded.config, loaded.generation_config, pooling)


def _load(
    checkpoint: Checkpoint,
    description: Description,
    options: EngineOptions,
    before_weights: Callable[[Any, Any, int], None],
    pooling: Pooling | None,
    nbytes: int,
) -> tuple[_Loaded, str]:
    """Load a decoder, or transformers' model where no decoder supports it; return why not too."""
    device = device_named(options.device)
    loaded, reason = _load_decoder(checkpoint, description, options, device, before_weights, pooling)
    if loaded is not None:
        return loaded, reason
    if pooling is not None:
        raise UsageError(f"only the native decoder of the CPU embeds and scores; it does not run here: {reason}")
    if options.deterministic:
        raise UsageError(f"deterministic: the native decoder of the CPU does not run this model: {reason}")
    loaded = _load_transformers(checkpoint, description, options, device, reason, nbytes)
    before_weights(loaded.config, loaded.generation_config, loaded.runner.vocab)
    return loaded, reason


def _isa(deterministic: bool) -> str:
    library = native.load()
    return "none" if library is None else library.invariant_isa if deterministic else library.isa


def _load_decoder(
    checkpoint: Checkpoint,
    description: Description,
    options: EngineOptions,
    device: torch.device,
    before_weights: Callable[[Any, Any, int], None],
    pooling: Pooling | None,
) -> tuple[_Loaded | None, str]:
    """Load the decoder of the CPU or of the GPU, or return why it does not support the model."""
    if options.runner == "transformers":
        return None, "the transformers runner was asked for"
    config = _config(checkpoint)
    tensors = StoredTensors(checkpoint, description)
    dtype = _dtype(options) or tensors.dtype()
    on_device = options.runner == "device" or device.type == "cuda"
    if on_device and pooling is not None:
        return None, "the decoder of GPUs generates only"
    load = _load_device if on_device else _load_native
    try:
        blueprint, weights = _structure(config, tensors, dtype, device, options.max_model_len, pooling)
        generation, vocab = _generation(checkpoint), blueprint.layout.lm_head.shape[0]
        before_weights(config, generation, vocab)
        runner, size, lm_head = load(blueprint, weights, tensors, options, device)
    except NotNative as error:
        return None, str(error)
    if has_towers(config.model_type):
        _LOG.warning("%s: %s", config.model_type, TEXT_ONLY)
    return _Loaded(runner, blueprint.architecture, dtype, config, generation, size, lm_head, vocab), ""


def read_decoder(checkpoint: Checkpoint, options: EngineOptions, dtype: torch.dtype) -> Decoder:
    tensors = StoredTensors(checkpoint, describe(checkpoint))
    try:
        config, cpu = _config(checkpoint), torch.device("cpu")
        blueprint, weights = _structure(config, tensors, dtype, cpu, options.max_model_len)
        return build_native_decoder(blueprint, weights, {}, impl=options.impl)
    except NotNative as error:
        raise UsageError(f"draft: the native decoder does not run {checkpoint.path}: {error}") from error


def _structure(
    config: Any,
    tensors: StoredTensors,
    dtype: torch.dtype,
    device: torch.device,
    length: int | None,
    pooling: Pooling | None = None,
) -> tuple[Blueprint, WeightSource]:
    """Return the structure of a model and its weights; `config` gets the dtype. `length`: as `_for_length`."""
    reason = why_not_supported(config, dtype)
    if reason:
        raise NotNative(reason)
    config.dtype = dtype
    blueprint = _for_length(blueprint_of(config, dtype), length)
    if pooling is not None:
        if pooling.tokens is None:
            blueprint = replace(blueprint, layout=replace(blueprint.layout, logits_factor=1.0, logits_cap=None))
        blueprint = replace(blueprint, pooling=pooling)
    return blueprint, WeightSource(tensors, blueprint.parameters(), dtype, device)


def _for_length(blueprint: Blueprint, length: int | None) -> Blueprint:
    """Choose the factors of "longrope" for all sequences, as vLLM does: keys in a cache cannot change theirs."""
    # Without a length, positions are limited to those at which transformers uses the factors of short texts.
    limit = blueprint.layout.longest_short_text
    if limit is None or (length is not None and length <= limit):
        return blueprint
    if length is None:
        _LOG.warning(
            "sequences are limited to %d tokens: longer ones have other rotary factors (longrope); with a "
            "--max-model-len beyond that, all sequences have these",
            limit,
        )
        blueprint.config.get_text_config(decoder=True).max_position_embeddings = limit
        return blueprint
    _LOG.warning(
        "all sequences have the rotary factors of texts beyond %d tokens (longrope), as in vLLM; transformers gives "
        "other factors to texts up to that length, so that short answers differ from its",
        limit,
    )
    return replace(blueprint, layout=blueprint.layout.with_long_factors())


def _config(checkpoint: Checkpoint) -> Any:
    """Return the config of the model; transformers reads what `read_config` leaves to it."""
    config = read_config(checkpoint.config, checkpoint.path)
    if not isinstance(config, str):
        return config
    from minifloat.model.runtime.config import plain_config

    _LOG.info("transformers reads config.json, which takes seconds, because %s", config)
    return plain_config(checkpoint)


def _generation(checkpoint: Checkpoint) -> Any:
    """Return the generation config, None without a file; transformers reads what `read_generation` leaves to it."""
    generation = read_generation(checkpoint)
    if not isinstance(generation, str):
        return generation
    from minifloat.model.runtime.config import read_generation_config

    _LOG.info("transformers reads generation_config.json, which takes seconds, because %s", generation)
    return read_generation_config(checkpoint)


def _load_native(
    blueprint: Blueprint, weights: WeightSource, tensors: StoredTensors, options: EngineOptions, device: torch.device
) -> tuple[Runner, CacheSize, str]:
    element, scales = _kv_cache(tensors, options, blueprint, kv_scales, (TENSOR,))
    head = None
    if blueprint.pooling is None:
        head = lm_head_spec(options.lm_head, tensors.checkpoint, tensors.description)
    decoder = build_native_decoder(
        blueprint,
        weights,
        scales,
        impl=options.impl,
        lm_head=head,
        int8_inputs=options.activations == "int8",
        batch_invariant=options.deterministic,
    )
    per_block = KVCache.bytes_per_block(decoder.cache_shapes, element)
    state_bytes = decoder.state_floats * torch.float32.itemsize
    size = cache_size(options, blueprint.config, per_block, device, state_bytes)
    name = lm_head_name(decoder.lm_head.spec, decoder.lm_head.dtype, loaded=head is not None)
    runner = NativeRunner(decoder, size.blocks, element, options.impl, slots=size.slots, snapshots=size.copies)
    return runner, size, name


def _load_device(
    blueprint: Blueprint, weights: WeightSource, tensors: StoredTensors, options: EngineOptions, device: torch.device
) -> tuple[Runner, CacheSize, str]:
    """Load the decoder of GPUs, which also runs on a CPU."""
    if options.activations == "int8":
        raise UsageError("activations int8: the device decoder has no such kernels; the native decoder has")
    reason = why_not_on_device(blueprint.layout)
    if reason:
        raise NotNative(reason)
    layers = blueprint.layout.layers
    attention = layers[0].attention
    assert isinstance(attention, AttentionLayout)
    read_scales = functools.partial(kv_head_scales, kv_heads=attention.kv_heads)
    element, scales = _kv_cache(tensors, options, blueprint, read_scales, (TENSOR, CHANNEL))
    positions = sequence_length(options, blueprint.config)
    head = lm_head_spec(options.lm_head, tensors.checkpoint, tensors.description)
    inputs = fp8_inputs(tensors, options.activations)
    decoder = build_device_decoder(blueprint, weights, positions, impl=options.impl, lm_head=head, inputs=inputs)
    table = torch.tensor([scales[f"{layer.name}.self_attn"] for layer in layers]) if scales else None
    per_block = PagedCache.bytes_per_block(len(decoder.layers), decoder.kv_heads, decoder.head_dim, element)
    size = cache_size(options, blueprint.config, per_block, device)
    runner = DeviceRunner(
        decoder,
        size.blocks,
        element,
        table,
        max_num_seqs=options.max_num_seqs,
        max_model_len=size.max_model_len,
    )
    weight = decoder.lm_head.weights[0]
    spec = weight.held.spec if isinstance(weight, QuantizedWeight) else None
    return runner, size, lm_head_name(spec, decoder.dtype, loaded=head is not None)


def _load_transformers(
    checkpoint: Checkpoint,
    description: Description,
    options: EngineOptions,
    device: torch.device,
    reason: str,
    nbytes: int,
) -> _Loaded:
    """Load transformers' model, which supports every architecture and none of the decoders' options."""
    if options.runner not in ("auto", "transformers"):
        raise UsageError(f"the {options.runner} decoder does not cover this model: {reason}")
    # transformers' modelling code takes seconds to import, and the decoders do without it; it needs the device "meta",
    # which `serve` leaves out of torch at first
    importlib.import_module("torch._meta_registrations")
    from minifloat.engine.transformers_runner import TransformersRunner
    from minifloat.model.runtime.load import LoadOptions, load_opened

    model = load_opened(
        checkpoint,
        description,
        LoadOptions(
            dtype=_dtype(options),
            device=device,
            weight_only=True,
            impl=options.impl,
            lm_head=options.lm_head,
            activations="int8" if options.activations == "int8" else "bf16",
            prefill=W8A8 if options.activations == "fp8" else None,
        ),
    )
    if options.kv_cache_dtype not in ("auto", _dtype_name(model.dtype)):
        raise UsageError(f"kv_cache_dtype is the native decoder's, which does not run here: {reason}")
    if options.runner == "auto":
        _LOG.warning("transformers' code runs this model, one sequence at a time (slower), because %s", reason)
    size = cache_size(options, model.config, TransformersRunner.bytes_per_block(model), device)
    runner = TransformersRunner(model, size.blocks, nbytes)
    generation = getattr(model, "generation_config", None)
    return _Loaded(runner, type(model).__name__, model.dtype, model.config, generation, size, lm_head_of(model))


def _dtype(options: EngineOptions) -> torch.dtype | None:
    dtype: torch.dtype | None = None if options.dtype is None else getattr(torch, options.dtype)
    return dtype


def _offer_int8(options: EngineOptions, dtype: str) -> None:
    """Log what rounded inputs would gain, where the user has not decided and this processor has the kernels."""
    if options.activations == "auto" and not options.deterministic and not int8.why_not():
        _LOG.info(
            "inputs of the linears stay in %s; --activations int8 rounds them, and multiplies prompts and batches "
            "%s times as fast with kernels of %s",
            dtype,
            int8.GAIN,
            native.isa(),
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_cache(
    tensors: StoredTensors,
    options: EngineOptions,
    blueprint: Blueprint,
    read_scales: Callable[..., Mapping[str, _Scales] | None],
    granularities: Collection[Granularity],
) -> tuple[str, Mapping[str, _Scales]]:
    """Return the element of the KV cache, and its scales by names of the plan's modules where the element is E4M3."""
    element = {"auto": None, "fp8": E4M3.name}.get(options.kv_cache_dtype, options.kv_cache_dtype)
    declared = tensors.description.kv
    is_declared = declared is not None and declared.element is E4M3 and declared.granularity in granularities
    if element != E4M3.name and not (element is None and is_declared):
        return element or ("float32" if blueprint.dtype == torch.float32 else "bfloat16"), {}
    stored = read_scales(tensors.checkpoint, tensors.description) or {}
    scales = {blueprint.renamed(name): pair for name, pair in stored.items()}
    if scales.keys() >= {f"{layer.name}.self_attn" for layer in blueprint.layout.layers if layer.has_cache}:
        return E4M3.name, scales
    if is_declared and element is None:
        _LOG.warning("the checkpoint announces an FP8 KV cache and has no scales for it: the cache is BF16")
        return "bfloat16", {}
    attentions = [layer.attention for layer in blueprint.layout.layers if isinstance(layer.attention, AttentionLayout)]
    if not scales and all(attention.latent is not None for attention in attentions):
        _LOG.warning("the checkpoint has no scales for an FP8 KV cache: the latents are stored with the scale 1")
        return E4M3.name, {}
    raise UsageError(
        "an FP8 KV cache needs the checkpoint's k_scale and v_scale, and it has none: without them accuracy is lost in "
        "silence; make them with: minifloat quantize --kv-cache fp8 --calibration DATA"
    )


def sampling_defaults(config: Any) -> dict[str, Any]:
    """Return the sampling parameters of a generation_config.json; without ``do_sample`` the model is greedy."""
    if config is None:
        return {"temperature": 0.0}
    defaults: dict[str, Any] = {} if config.do_sample else {"temperature": 0.0}
    for name in MODEL_DEFAULTS:
        value = getattr(config, name, None)
        if value is not None:
            defaults.setdefault(name, value)
    return defaults
