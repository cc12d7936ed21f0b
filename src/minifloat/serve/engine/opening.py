"""A folder becomes a runner: what is loaded, how much memory the KV cache gets, and what runs the model."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from transformers import PreTrainedModel

from minifloat.checkpoint import Checkpoint
from minifloat.errors import UnknownNameError, UsageError
from minifloat.hub import model_name
from minifloat.kernels.decoder import BLOCK_TOKENS, KVCache
from minifloat.kernels.paged import PagedCache
from minifloat.layouts import describe
from minifloat.layouts.inspection import inspect_checkpoint
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity
from minifloat.runtime.build import config_dtype, empty_model
from minifloat.runtime.devices import device_named
from minifloat.runtime.kv_scales import kv_head_scales, kv_scales
from minifloat.runtime.load import load
from minifloat.serve.engine.cache import blocks_for
from minifloat.serve.engine.device import DeviceRunner, device_decoder_of, why_not_device
from minifloat.serve.engine.info import ModelInfo
from minifloat.serve.engine.native import NativeRunner, NotNative, decoder_of, why_not_native
from minifloat.serve.engine.runner import Runner
from minifloat.serve.engine.sampling import MODEL_DEFAULTS
from minifloat.serve.engine.transformers_runner import TransformersRunner

_LOG = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
#: `kv_cache_dtype` -> the element of the cache; "auto" follows the checkpoint, then the dtype of the model.
KV_DTYPES = {"auto": None, "bfloat16": "bfloat16", "fp8": "E4M3", "float32": "float32"}
LM_HEADS = ("auto", "fp8")
#: What the KV cache gets where nobody says: enough for all sequences at full length, up to this, and to this share of
#: the memory that is available.
_KV_BYTES = 1 << 30
_KV_SHARE = 0.25
#: On a GPU, of the memory that the weights leave; the rest is for the steps themselves.
_GPU_SHARE = 0.85
_Pair = TypeVar("_Pair")


@dataclass(frozen=True)
class Options:
    """How a model is opened.

    Attributes:
        dtype: Of the activations, a name in `DTYPES`; None: that of the checkpoint.
        kv_cache_memory: Bytes of the KV cache; None: chosen.
        kv_cache_dtype: A name in `KV_DTYPES`.
        max_model_len: Tokens of the longest sequence; None: what model and cache hold.
        max_num_seqs: Sequences that run at a time.
        lm_head: "auto" keeps it as the checkpoint has it; "fp8" quantizes it per channel.
        runner: "auto", "native", "device" or "transformers".
        impl: Of the kernels, as in `minifloat.runtime.load.load`.
        device: "cpu", "cuda" or "cuda:N".
    """

    dtype: str | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    lm_head: str = "auto"
    runner: str = "auto"
    impl: str = "auto"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for kind, name, table in (
            ("dtype", self.dtype or "bfloat16", tuple(DTYPES)),
            ("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_DTYPES)),
            ("lm_head", self.lm_head, LM_HEADS),
            ("runner", self.runner, ("auto", "native", "device", "transformers")),
        ):
            if name not in table:
                raise UnknownNameError(kind, name, table)
        for field in ("kv_cache_memory", "max_model_len", "max_num_seqs"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UsageError(f"{field}: expected at least 1, got {value}")


@dataclass(frozen=True)
class Opened:
    """A runner, the model's numbers, and transformers' configs of it."""

    runner: Runner
    info: ModelInfo
    config: Any
    generation_config: Any


def open_model(path: str | os.PathLike[str], options: Options) -> Opened:
    """Load a checkpoint for serving.

    Raises:
        CheckpointError: The folder cannot be loaded.
        UsageError: The options do not go together with the model, or the KV cache does not hold one sequence.
        KernelUnavailable: `device` is not here, or `impl` names kernels that cannot run here.
    """
    started = time.perf_counter()
    device = device_named(options.device)
    inspection = inspect_checkpoint(path)
    made: _Made | None = None
    if options.runner == "transformers":
        reason = "the transformers runner was asked for"
    elif options.runner == "device" or device.type == "cuda":
        made, reason = _device(path, options, device)
    else:
        made, reason = _native(path, options)
    if made is None:
        made = _transformers(path, options, device, reason, inspection.nbytes)
    folder = Path(path)
    formats = sorted({row.format for row in inspection.rows if row.kind == "quantized"})
    runner = made.runner
    info = ModelInfo(
        name=model_name(folder),
        path=str(folder),
        architecture=made.architecture,
        runner=runner.name,
        device=str(device),
        reason_not_native=reason,
        scheme=" and ".join(formats) or "none",
        dtype=_name(made.dtype),
        weight_bytes=inspection.nbytes,
        bf16_bytes=inspection.elements * torch.bfloat16.itemsize,
        step_bytes=runner.weight_bytes,
        kv_element=runner.kv_element,
        kv_bytes=runner.kv_bytes,
        kv_bytes_per_token=made.per_block // BLOCK_TOKENS,
        kv_blocks=made.blocks,
        max_model_len=made.length,
        max_num_seqs=options.max_num_seqs,
        vocab_size=runner.vocab,
        load_seconds=time.perf_counter() - started,
    )
    return Opened(runner, info, made.config, made.generation_config)


@dataclass(frozen=True)
class _Made:
    """A runner, and what is known of its model and cache."""

    runner: Runner
    architecture: str
    dtype: torch.dtype
    config: Any
    generation_config: Any
    per_block: int
    blocks: int
    length: int

    @classmethod
    def of(cls, runner: Runner, model: PreTrainedModel, per_block: int, size: tuple[int, int]) -> _Made:
        generation = getattr(model, "generation_config", None)
        return cls(runner, type(model).__name__, model.dtype, model.config, generation, per_block, *size)


def _load(path: str | os.PathLike[str], options: Options, device: torch.device, impl: str) -> PreTrainedModel:
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    return load(path, dtype=dtype, device=device, weight_only=True, impl=impl)


def _native(path: str | os.PathLike[str], options: Options) -> tuple[_Made | None, str]:
    """The native decoder, or why not."""
    with Checkpoint.open(path) as checkpoint:
        reason = why_not_native(empty_model(checkpoint, _dtype(options, checkpoint)))
    if reason:
        return None, reason
    cpu = torch.device("cpu")
    model = _load(path, options, cpu, options.impl)
    element, scales = _kv_cache(path, options, model.dtype, kv_scales, (TENSOR,))
    try:
        decoder = decoder_of(model, scales, lm_head_fp8=options.lm_head == "fp8")
    except NotNative as error:
        return None, str(error)
    per_block = KVCache.bytes_per_block(len(decoder.layers), decoder.kv_heads, decoder.head_dim, element)
    size = _size(options, model.config, per_block, cpu)
    return _Made.of(NativeRunner(decoder, size[0], element, options.impl), model, per_block, size), ""


def _device(path: str | os.PathLike[str], options: Options, device: torch.device) -> tuple[_Made | None, str]:
    """The decoder for devices, or why not."""
    with Checkpoint.open(path) as checkpoint:
        reason = why_not_device(empty_model(checkpoint, _dtype(options, checkpoint)))
    if reason:
        return None, reason
    model = _load(path, options, device, "reference")  # as stored: weights are put side by side before they are packed
    config: Any = model.config
    kv_heads = int(config.num_key_value_heads)
    read = functools.partial(kv_head_scales, kv_heads=kv_heads)
    element, scales = _kv_cache(path, options, model.dtype, read, (TENSOR, CHANNEL))
    positions = _length(options, config)
    try:
        decoder = device_decoder_of(model, positions, impl=options.impl, lm_head_fp8=options.lm_head == "fp8")
    except NotNative as error:
        return None, str(error)
    layers = range(len(decoder.layers))
    table = torch.tensor([scales[f"model.layers.{layer}.self_attn"] for layer in layers]) if scales else None
    per_block = PagedCache.bytes_per_block(len(layers), kv_heads, decoder.head_dim, element)
    blocks, length = size = _size(options, config, per_block, device)
    seqs = options.max_num_seqs
    runner = DeviceRunner(decoder, blocks, element, table, max_num_seqs=seqs, max_model_len=length)
    return _Made.of(runner, model, per_block, size), ""


def _transformers(
    path: str | os.PathLike[str], options: Options, device: torch.device, reason: str, nbytes: int
) -> _Made:
    """The way that always works: transformers' own code.

    Raises:
        UsageError: An option that it does not have.
    """
    if options.runner not in ("auto", "transformers"):
        raise UsageError(f"the {options.runner} decoder does not cover this model: {reason}")
    model = _load(path, options, device, options.impl)
    if options.lm_head != "auto" or options.kv_cache_dtype not in ("auto", _name(model.dtype)):
        raise UsageError(f"lm_head and kv_cache_dtype are the native decoder's, which does not run here: {reason}")
    if options.runner == "auto":
        _LOG.warning("transformers' code runs this model, one sequence at a time (slower), because %s", reason)
    per_block = TransformersRunner.bytes_per_block(model)
    size = _size(options, model.config, per_block, device)
    return _Made.of(TransformersRunner(model, size[0], nbytes), model, per_block, size)


def _dtype(options: Options, checkpoint: Checkpoint) -> torch.dtype:
    return DTYPES[options.dtype] if options.dtype is not None else config_dtype(checkpoint) or torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_cache(
    path: str | os.PathLike[str],
    options: Options,
    dtype: torch.dtype,
    read: Callable[[Checkpoint], Mapping[str, _Pair] | None],
    granularities: Collection[Granularity],
) -> tuple[str, Mapping[str, _Pair]]:
    """The element of the KV cache, and its scales where it is E4M3.

    Args:
        path: The checkpoint.
        options: What is wanted.
        dtype: Of the model.
        read: The scales of a checkpoint.
        granularities: Those that the runner takes.

    Raises:
        UsageError: E4M3 is wanted, and the checkpoint has no scales for some layer.
    """
    element = KV_DTYPES[options.kv_cache_dtype]
    with Checkpoint.open(path) as checkpoint:
        kv = describe(checkpoint).kv
        announced = kv is not None and kv.element is E4M3 and kv.granularity in granularities
        if element != E4M3.name and not (element is None and announced):
            return element or ("float32" if dtype == torch.float32 else "bfloat16"), {}
        scales = read(checkpoint) or {}
        layers = int(checkpoint.config.get("num_hidden_layers", 0))
    if scales and len(scales) == layers:
        return E4M3.name, scales
    if announced and element is None:
        _LOG.warning("the checkpoint announces an FP8 KV cache and has no scales for it: the cache is BF16")
        return "bfloat16", {}
    raise UsageError(
        "an FP8 KV cache needs the checkpoint's k_scale and v_scale, and it has none: without them accuracy is lost in "
        "silence; make them with: minifloat quantize --kv-cache fp8 --calibration DATA"
    )


def _length(options: Options, config: Any) -> int:
    """Tokens of the longest sequence, as far as the model goes.

    Raises:
        UsageError: The model has fewer positions than `max_model_len`.
    """
    positions = int(getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize)
    length = options.max_model_len or positions
    if length > positions:
        raise UsageError(f"max_model_len: the model has {positions} positions, got {length}")
    return length


def _size(options: Options, config: Any, per_block: int, device: torch.device) -> tuple[int, int]:
    """Blocks of the KV cache, and tokens of the longest sequence.

    Raises:
        UsageError: The model has fewer positions than `max_model_len`, or the cache does not hold one sequence.
    """
    length = _length(options, config)
    one = blocks_for(length) * per_block
    budget = options.kv_cache_memory
    if budget is None and device.type == "cuda":
        torch.cuda.empty_cache()  # what loading took
        budget = min(options.max_num_seqs * one, int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE))
    elif budget is None:
        available = int(psutil.virtual_memory().available * _KV_SHARE)
        budget = min(options.max_num_seqs * one, max(_KV_BYTES, one if options.max_model_len else 0), available)
    blocks = budget // per_block
    if blocks < (blocks_for(length) if options.max_model_len else 2):
        raise UsageError(
            f"kv_cache_memory: {budget} bytes hold {blocks * BLOCK_TOKENS} tokens, fewer than one sequence; "
            f"{one} bytes hold one of {length}"
        )
    return blocks, min(length, blocks * BLOCK_TOKENS)


def sampling_defaults(config: Any) -> dict[str, Any]:
    """What a generation_config.json says of sampling. Without ``do_sample`` the model wants no draws."""
    if config is None:
        return {"temperature": 0.0}
    defaults: dict[str, Any] = {} if config.do_sample else {"temperature": 0.0}
    for name in MODEL_DEFAULTS:
        value = getattr(config, name, None)
        if value is not None:
            defaults.setdefault(name, value)
    return defaults
