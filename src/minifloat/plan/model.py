"""`plan_model`: one model, one kind of hardware, every scheme."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from minifloat.errors import MinifloatError, TensorError, UsageError
from minifloat.layouts import compressed_tensors, get_writer
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import SCHEMES, KVSpec, Scheme, get_scheme
from minifloat.plan.cache import ENGINE_BLOCK, cache_bytes
from minifloat.plan.hardware import CPU, Hardware, get_hardware
from minifloat.plan.memory import STEP_TOKENS, Room, activation_bytes
from minifloat.plan.quantization import KEEP, make_plan
from minifloat.plan.result import CachePlan, ModelPlan, SchemePlan
from minifloat.plan.roofline import Bound, bound, smallest
from minifloat.plan.shape import ModelShape, model_shape
from minifloat.plan.source import ModelSource, open_source
from minifloat.plan.steps import arithmetic, decode_work, prefill_work
from minifloat.plan.weights import Weights, check_parallel, count, weigh

ALL = "all"
#: `kv_cache_dtype` -> the element of the cache.
KV_ELEMENTS = {"bfloat16": BFLOAT16, "fp8": E4M3}
#: The context that is planned for where none is given and the model has as many positions.
_CONTEXT = 4096
#: The batch up to which one scheme is watched overtaking another.
_LARGEST_BATCH = 1 << 20
#: The W8A8 scheme that the others are held against.
_W8A8 = "fp8-dynamic"


@dataclass(frozen=True)
class _Request:
    """What all schemes are planned for."""

    shape: ModelShape
    hardware: Hardware
    element: ElementFormat
    context: int
    batch: int
    gpus: int
    keep_free: float

    def decode(self, weights: Weights, element: ElementFormat, batch: int, context: int) -> Bound:
        work = decode_work(weights, self.shape, element, self.element, context, batch, self.gpus)
        return bound(work, self.hardware)

    def prefill(self, weights: Weights, element: ElementFormat) -> Bound:
        return bound(prefill_work(weights, self.shape, element, self.element, self.context, self.gpus), self.hardware)

    def room(self, weights: Weights, element: ElementFormat) -> Room:
        return Room(self.hardware, self.keep_free, self.shape, weights.device, element, self.gpus)


def plan_model(
    model: str | os.PathLike[str],
    scheme: str = ALL,
    hardware: str | Hardware = CPU,
    *,
    gpus: int = 1,
    context: int | None = None,
    batch: int = 1,
    kv_cache_dtype: str = "bfloat16",
    keep_free: float = 0.1,
    bandwidth: float | None = None,
    peak: float | None = None,
    revision: str | None = None,
) -> ModelPlan:
    """Bytes, fit and bounds of a model, from its config and headers.

    Args:
        model: A checkpoint, or a folder with nothing but its config; or either on the hub, where weights stay. What is
            quantized already, by whatever tool, is planned as it is.
        scheme: A name of `SCHEMES`, or ``"all"``; the model as it is comes with either, and alone with ``"bf16"``.
        hardware: A name of `HARDWARE`, or a device of your own.
        gpus: Devices that share the model by tensor parallelism.
        context: Tokens of every sequence; by default 4096, or the model's positions where they are fewer.
        batch: Sequences that run together.
        kv_cache_dtype: ``"bfloat16"`` or ``"fp8"``.
        keep_free: The share of memory to leave to what is not counted.
        bandwidth: Bytes per second of a named device, in place of its own figure.
        peak: BF16 operations per second of a named device, in place of its own figure.
        revision: Of a model of the hub, as in `minifloat.hub.model_folder`.

    Raises:
        UsageError: The request is wrong: an unknown name, or devices that cannot share this model.
        CheckpointError: The folder is not what it claims to be.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        AlreadyQuantizedError: A scheme was asked for, and the model is quantized already.
        TensorError: The scheme that was asked for cannot quantize a tensor.
    """
    chosen = list(SCHEMES.values()) if scheme == ALL else [] if scheme == KEEP else [get_scheme(scheme)]
    if kv_cache_dtype not in KV_ELEMENTS:
        raise UsageError(f"kv_cache_dtype: expected one of {', '.join(KV_ELEMENTS)}, got {kv_cache_dtype!r}")
    if not 0 <= keep_free < 1:
        raise UsageError(f"keep_free: expected a share of the memory from 0 to 1, got {keep_free}")
    device = get_hardware(hardware, bandwidth=bandwidth, peak=peak) if isinstance(hardware, str) else hardware
    source = open_source(model, revision=revision)
    shape = model_shape(source.config, source.path)
    check_parallel(shape, gpus)
    tokens = _context(shape, context)
    if batch < 1:
        raise UsageError(f"batch: expected at least 1, got {batch}")
    request = _Request(shape, device, KV_ELEMENTS[kv_cache_dtype], tokens, batch, gpus, keep_free)
    stored, refused = _stored(source, chosen, request, strict=scheme != ALL)
    rival = _rival(source, stored, request)
    return ModelPlan(
        path=str(model),
        architecture=_architecture(source),
        estimated=source.estimated,
        counts=count(source.plans, source.copies, shape),
        hardware=device,
        gpus=gpus,
        keep_free=keep_free,
        context=tokens,
        batch=batch,
        positions=shape.positions,
        kv_element=request.element,
        caches=tuple(_cache(request, element) for element in KV_ELEMENTS.values()),
        schemes=tuple(
            _scheme_plan(_Made(str(model), name, which, source.stored is None), weights, rival, request)
            for name, which, weights in stored
        ),
        refused=refused,
        overtaking=None if rival is None else _W8A8,
        notes=_notes(source, chosen, request),
    )


def _context(shape: ModelShape, context: int | None) -> int:
    if context is None:
        return min(_CONTEXT, shape.positions or _CONTEXT)
    if context < 1 or (shape.positions is not None and context > shape.positions):
        raise UsageError(f"context: the model has {shape.positions or 'unknown'} positions, got {context}")
    return context


def _architecture(source: ModelSource) -> str:
    names = source.config.get("architectures") or [source.config.get("model_type", "unknown")]
    return str(names[0])


_Stored = tuple[str, Scheme | None, Weights]


def _stored(
    source: ModelSource, schemes: Sequence[Scheme], request: _Request, *, strict: bool
) -> tuple[list[_Stored], dict[str, str]]:
    """The weights as they are and under each scheme, and why schemes are refused; `strict` raises instead."""
    as_it_is = weigh(source.plans, source.copies, compressed_tensors.WRITER, request.shape, request.gpus)
    if source.stored is not None and not strict:
        scheme = source.stored.scheme
        return [(scheme.name, scheme, replace(as_it_is, total=source.stored.nbytes))], {}
    found: list[_Stored] = [(KEEP, None, as_it_is)]
    refused = {}
    for scheme in schemes:
        try:
            found.append((scheme.name, scheme, _weights(source, scheme, request)))
        except (TensorError, UsageError) as error:
            if strict:
                raise
            refused[scheme.name] = str(error)
    return found, refused


def _weights(source: ModelSource, scheme: Scheme, request: _Request) -> Weights:
    """The weights as `quantize` writes them; static scales, of inputs and of an FP8 cache, are among them."""
    writer = get_writer(compressed_tensors.NAME)
    plan = make_plan(source, scheme, writer)
    kv = KVSpec(E4M3, TENSOR) if request.element is E4M3 else None
    caches = dict.fromkeys(plan.attention_modules, (1.0, 1.0)) if kv else {}
    plan = plan.with_scales(dict.fromkeys(plan.static_modules, 1.0), kv, caches)
    return weigh(plan.tensors, source.copies, writer, request.shape, request.gpus)


def _rival(source: ModelSource, stored: Sequence[_Stored], request: _Request) -> Weights | None:
    """The weights of the W8A8 scheme that others are held against; None where it is no W8A8 on this hardware."""
    scheme = SCHEMES[_W8A8]
    if arithmetic(scheme, request.hardware) is BFLOAT16:
        return None
    for name, _, weights in stored:
        if name == _W8A8:
            return weights
    try:
        return _weights(source, scheme, request)
    except MinifloatError:
        return None


@dataclass(frozen=True)
class _Made:
    """A row: the model's folder, the scheme (None: as it is), and whether `quantize` has yet to make it."""

    model: str
    name: str
    scheme: Scheme | None
    to_make: bool


def _scheme_plan(made: _Made, weights: Weights, rival: Weights | None, request: _Request) -> SchemePlan:
    element = arithmetic(made.scheme, request.hardware)
    room = request.room(weights, request.element)
    context, batch = request.context, request.batch
    return SchemePlan(
        scheme=made.name,
        weights=weights.total,
        device_weights=weights.device,
        cache=room.cache(context, batch),
        activations=activation_bytes(request.shape, context, batch, request.gpus),
        taken=room.taken(context, batch),
        fits=room.fits(context, batch),
        largest_batch=room.largest_batch(context),
        largest_batch_fp8=request.room(weights, E4M3).largest_batch(context),
        largest_context=room.largest_context(batch),
        arithmetic=element.name,
        decode=request.decode(weights, element, batch, context),
        prefill=request.prefill(weights, element),
        overtaken_from=_overtaken(weights, element, rival, request, context),
        linears_overtaken_from=_overtaken(weights, element, rival, request, context=0),
        commands=_commands(made, room, request),
    )


def _overtaken(
    weights: Weights, element: ElementFormat, rival: Weights | None, request: _Request, context: int
) -> int | None:
    """The batch from which the rival's step is faster; None: it never is, or both multiply in the same format."""
    fast = arithmetic(SCHEMES[_W8A8], request.hardware)
    if rival is None or element is fast:
        return None

    def slower(batch: int) -> bool:
        mine = request.decode(weights, element, batch, context)
        return mine.seconds > request.decode(rival, fast, batch, context).seconds

    return smallest(slower, _LARGEST_BATCH)


def _cache(request: _Request, element: ElementFormat) -> CachePlan:
    layers, context, batch = request.shape.cache, request.context, request.batch
    return CachePlan(
        element.name,
        cache_bytes(layers, 1, element),
        cache_bytes(layers, context, element),
        batch * cache_bytes(layers, context, element),
        batch * cache_bytes(layers, context, element, request.gpus),
    )


def _commands(made: _Made, room: Room, request: _Request) -> tuple[str, ...]:
    """What makes the checkpoint and serves it."""
    fp8_cache = request.element is E4M3
    commands = []
    served, scheme = shlex.quote(made.model), made.scheme
    if scheme is not None and made.to_make:
        served = "OUT"
        static = scheme.activation is not None and not scheme.activation.dynamic
        options = (" --calibration TEXT" if static or fp8_cache else "") + (" --kv-cache fp8" if fp8_cache else "")
        commands.append(f"minifloat quantize {shlex.quote(made.model)} {served} --scheme {scheme.name}{options}")
    if request.hardware.name == CPU:
        whole_blocks = -(-request.context // ENGINE_BLOCK) * ENGINE_BLOCK
        cache = room.cache(whole_blocks, request.batch)
        options = f" --max-model-len {request.context} --max-num-seqs {request.batch} --kv-cache-memory {cache}"
        commands.append(f"minifloat serve {served}{options}{' --kv-cache-dtype fp8' if fp8_cache else ''}")
        return tuple(commands)
    options = f" --tensor-parallel-size {request.gpus}" if request.gpus > 1 else ""
    options += f" --max-model-len {request.context} --max-num-seqs {request.batch}"
    options += f"{' --kv-cache-dtype fp8' if fp8_cache else ''} -- --gpu-memory-utilization {1 - request.keep_free:.2g}"
    commands.append(f"minifloat serve {served} --engine vllm{options}")
    return tuple(commands)


def _notes(source: ModelSource, schemes: Sequence[Scheme], request: _Request) -> tuple[str, ...]:
    """What the figures leave out, for this request."""
    hardware, notes = request.hardware, []
    if source.estimated:
        notes.append("No weights here: names and shapes of the tensors follow from config.json by convention.")
    if source.stored is not None:
        notes.append("Quantized already: planned as it is.")
    if not hardware.peaks:
        notes.append("The peak of this machine is unknown (--peak): only its bandwidth bounds the figures.")
    elif any(s.activation is not None for s in schemes) and E4M3 not in hardware.peaks:
        notes.append(f"{hardware.name} does not multiply FP8: every scheme runs on weight-only kernels, in BF16.")
    four_bit = any(s.weight.element is E2M1 for s in schemes)
    if four_bit and E2M1 in hardware.peaks:
        notes.append(
            f"{hardware.name} multiplies FP4 too. These schemes leave inputs in BF16, and are planned so; "
            "vLLM rounds the inputs of mxfp4 to FP4 there, unless --linear-backend marlin forbids it."
        )
    if request.shape.experts:
        notes.append(
            f"Of {request.shape.experts} experts a token visits {request.shape.chosen}; which of them a step reads is "
            "the expectation of an even router."
        )
    if request.batch * request.context > STEP_TOKENS:
        notes.append(f"Activations are estimated for steps of {max(STEP_TOKENS, request.batch):,} tokens.")
    if any(not layer.width for layer in request.shape.cache):
        notes.append("The state of layers without keys and values (linear attention, Mamba) is not counted.")
    if request.gpus > 1:
        notes.append("Communication between devices is not counted.")
    return tuple(notes)
