"""`plan_model`: the estimate of one model on one kind of machine, under every scheme."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from minifloat.deploy.estimate.hardware import CPU, Hardware, get_hardware
from minifloat.deploy.estimate.model_plan import CacheEstimate, ModelPlan, SchemeEstimate, known_losses
from minifloat.deploy.estimate.model_source import ModelSource, open_source
from minifloat.deploy.estimate.roofline import Bound, arithmetic, bound, decode_cost, prefill_cost
from minifloat.deploy.estimate.shape import ENGINE_BLOCK, ModelShape, cache_bytes, model_shape, state_bytes
from minifloat.deploy.estimate.weights import (
    STEP_TOKENS,
    DeviceMemory,
    Weights,
    activation_bytes,
    check_parallel,
    count,
    devices_needed,
    weigh,
)
from minifloat.deploy.options import PlanOptions
from minifloat.errors import TensorError, UsageError
from minifloat.model.layouts import choose_writer, compressed_tensors
from minifloat.model.plan.overrides import KEEP
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.formats import BFLOAT16, E2M1, E4M3, ElementFormat
from minifloat.numerics.granularity import TENSOR
from minifloat.numerics.scheme import SCHEMES, KVSpec, Scheme, get_scheme

ALL = "all"
#: Value of `kv_cache_dtype` -> element format of the KV cache.
KV_ELEMENTS = {"bfloat16": BFLOAT16, "fp8": E4M3}
#: Default context, in tokens, of models with as many positions.
_CONTEXT = 4096
_GIGA, _TERA = 10**9, 10**12


def _device(hardware: str | Hardware, options: PlanOptions) -> Hardware:
    """Return the device of a name, with the speeds of the options."""
    if isinstance(hardware, Hardware):
        return hardware
    bandwidth = None if options.bandwidth is None else options.bandwidth * _GIGA
    return get_hardware(hardware, bandwidth=bandwidth, peak=None if options.peak is None else options.peak * _TERA)


@dataclass(frozen=True)
class _Request:
    """The model, the machine and the load that all schemes are estimated for."""

    shape: ModelShape
    hardware: Hardware
    element: ElementFormat
    context: int
    batch: int
    gpus: int
    keep_free: float

    def decode(self, weights: Weights, element: ElementFormat, batch: int, context: int) -> Bound:
        cost = decode_cost(weights, self.shape, element, self.element, context, batch, self.gpus)
        return bound(cost, self.hardware)

    def prefill(self, weights: Weights, element: ElementFormat) -> Bound:
        return bound(prefill_cost(weights, self.shape, element, self.element, self.context, self.gpus), self.hardware)

    def memory(self, weights: Weights, element: ElementFormat, gpus: int | None = None) -> DeviceMemory:
        """Return the memory of one of `gpus` devices, by default of those of the request."""
        return DeviceMemory(self.hardware, self.keep_free, self.shape, weights.device, element, gpus or self.gpus)


def plan_model(
    model: str | os.PathLike[str],
    scheme: str = ALL,
    hardware: str | Hardware = CPU,
    options: PlanOptions | None = None,
    *,
    revision: str | None = None,
) -> ModelPlan:
    """Estimate the bytes, the fit and the least step times of a model, from its config and headers.

    Args:
        model: A checkpoint, or a folder with only its config; either may be on the hub, where weights stay. A model
            that is already quantized, by whatever tool, is planned as it is.
        scheme: A name of `SCHEMES`, or ``"all"``; both include the model as it is. ``"bf16"``: only the model as it is.
        hardware: A name of `PLANNED_HARDWARE`, or a device of your own.
        options: The load and the limits.
        revision: Branch, tag or commit of a model of the hub, as in `minifloat.checkpoint.hub.model_folder`.

    Raises:
        UsageError: An argument is wrong: an unknown name, or devices that cannot share this model.
        CheckpointError: The folder is damaged, or is no checkpoint.
        HubError: The hub has no such model, refuses it, or cannot be reached.
        AlreadyQuantizedError: `scheme` names a scheme, and the model is already quantized.
        TensorError: `scheme` names a scheme that cannot quantize a tensor.
    """
    schemes = list(SCHEMES.values()) if scheme == ALL else [] if scheme == KEEP else [get_scheme(scheme)]
    options = options or PlanOptions()
    device = _device(hardware, options)
    source = open_source(model, revision=revision)
    shape = model_shape(source.config, source.path)
    check_parallel(shape, options.gpus)
    context = _context(shape, options.context)
    element = KV_ELEMENTS[options.kv_cache_dtype]
    request = _Request(shape, device, element, context, options.batch, options.gpus, options.keep_free)
    candidates, refused = _candidates(source, schemes, request, strict=scheme != ALL)
    return ModelPlan(
        path=str(model),
        architecture=_architecture(source),
        estimated=source.estimated,
        counts=count(source.plans, source.copies, shape),
        hardware=device,
        gpus=options.gpus,
        keep_free=options.keep_free,
        context=context,
        batch=options.batch,
        positions=shape.positions,
        kv_element=element,
        caches=tuple(_cache(request, element) for element in KV_ELEMENTS.values()),
        state=state_bytes(shape.cache),
        schemes=tuple(_scheme_estimate(str(model), candidate, request) for candidate in candidates),
        refused=refused,
        notes=_notes(source, schemes, request),
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


@dataclass(frozen=True)
class _Candidate:
    """The model under one scheme."""

    name: str
    scheme: Scheme | None  # the scheme; None: the model as it is
    # Gives the bytes and multiplications of the weights, by the number of devices that share them.
    weigh: Callable[[int], Weights]
    weights: Weights
    needs_quantize: bool


def _candidates(
    source: ModelSource, schemes: Sequence[Scheme], request: _Request, *, strict: bool
) -> tuple[list[_Candidate], dict[str, str]]:
    """Return the model as it is and under each scheme, and why schemes are refused; `strict` raises instead."""
    unchanged = partial(weigh, source.plans, source.copies, compressed_tensors.WRITER, request.shape)
    as_it_is = unchanged(request.gpus)
    if source.stored is not None and not strict:
        scheme = source.stored.scheme
        weights = replace(as_it_is, total=source.stored.nbytes)
        return [_Candidate(scheme.name, scheme, unchanged, weights, needs_quantize=False)], {}
    candidates = [_Candidate(KEEP, None, unchanged, as_it_is, needs_quantize=False)]
    refused = {}
    for scheme in schemes:
        try:
            quantized = _weigher(source, scheme, request)
            weights = quantized(request.gpus)
        except (TensorError, UsageError) as error:
            if strict:
                raise
            refused[scheme.name] = str(error)
        else:
            candidates.append(_Candidate(scheme.name, scheme, quantized, weights, needs_quantize=source.stored is None))
    return candidates, refused


def _weigher(source: ModelSource, scheme: Scheme, request: _Request) -> Callable[[int], Weights]:
    """Return what weighs the weights as `quantize` writes them, for a number of devices."""
    writer = choose_writer(None, source.config, scheme)
    plan = make_plan(source, scheme, writer)
    kv = KVSpec(E4M3, TENSOR) if request.element is E4M3 else None
    caches = dict.fromkeys(plan.attention_modules, (1.0, 1.0)) if kv else {}
    plan = plan.with_scales(dict.fromkeys(plan.static_modules, 1.0), kv, caches)
    return partial(weigh, plan.tensors, source.copies, writer, request.shape)


def _scheme_estimate(model: str, candidate: _Candidate, request: _Request) -> SchemeEstimate:
    weights, element = candidate.weights, arithmetic(candidate.scheme, request.hardware)
    memory = request.memory(weights, request.element)
    context, batch = request.context, request.batch
    fits = memory.fits(context, batch)
    return SchemeEstimate(
        scheme=candidate.name,
        weights=weights.total,
        device_weights=weights.device,
        cache=memory.cache(context, batch),
        activations=activation_bytes(request.shape, context, batch, request.gpus),
        taken=memory.taken(context, batch),
        fits=fits,
        needed_gpus=None if fits or request.hardware.name == CPU else _needed_gpus(candidate, request),
        largest_batch=memory.largest_batch(context),
        largest_batch_fp8=request.memory(weights, E4M3).largest_batch(context),
        largest_context=memory.largest_context(batch),
        arithmetic=element.name,
        decode=request.decode(weights, element, batch, context),
        prefill=request.prefill(weights, element),
        commands=_commands(model, candidate, memory, request),
        losses=known_losses(candidate.name) if candidate.needs_quantize else (),
    )


def _needed_gpus(candidate: _Candidate, request: _Request) -> int | None:
    """Return the smallest number of devices that hold a model that the given number does not hold."""

    def fits(gpus: int) -> bool:
        memory = request.memory(candidate.weigh(gpus), request.element, gpus)
        return memory.fits(request.context, request.batch)

    return devices_needed(request.shape, request.gpus, fits)


def _cache(request: _Request, element: ElementFormat) -> CacheEstimate:
    layers, context, batch = request.shape.cache, request.context, request.batch
    return CacheEstimate(
        element.name,
        cache_bytes(layers, 1, element),
        cache_bytes(layers, context, element),
        batch * cache_bytes(layers, context, element),
        batch * cache_bytes(layers, context, element, request.gpus),
    )


def _commands(model: str, candidate: _Candidate, memory: DeviceMemory, request: _Request) -> tuple[str, ...]:
    fp8_cache = request.element is E4M3
    commands = []
    served, scheme = shlex.quote(model), candidate.scheme
    if scheme is not None and candidate.needs_quantize:
        served = "OUT"
        static = scheme.activation is not None and scheme.activation.needs_calibration
        # codes of 4 bits that are rounded to nearest lose several times as much
        text = (
            " --calibration TEXT" if static or fp8_cache else " --data self" if scheme.weight.element.bits == 4 else ""
        )
        options = text + (" --kv-cache fp8" if fp8_cache else "")
        commands.append(f"minifloat quantize {shlex.quote(model)} {served} --scheme {scheme.name}{options}")
    if request.hardware.name == CPU:
        whole_blocks = -(-request.context // ENGINE_BLOCK) * ENGINE_BLOCK
        cache = memory.cache(whole_blocks, request.batch)
        options = f" --max-model-len {request.context} --max-num-seqs {request.batch} --kv-cache-memory {cache}B"
        commands.append(f"minifloat serve {served}{options}{' --kv-cache-dtype fp8' if fp8_cache else ''}")
        return tuple(commands)
    options = f" --tensor-parallel-size {request.gpus}" if request.gpus > 1 else ""
    options += f" --max-model-len {request.context} --max-num-seqs {request.batch}"
    options += f"{' --kv-cache-dtype fp8' if fp8_cache else ''} -- --gpu-memory-utilization {1 - request.keep_free:.2g}"
    commands.append(f"minifloat serve {served} --engine vllm{options}")
    return tuple(commands)


def _notes(source: ModelSource, schemes: Sequence[Scheme], request: _Request) -> tuple[str, ...]:
    """Return sentences about the assumptions and omissions of the figures of this request."""
    hardware, notes = request.hardware, [*source.notes, *request.shape.notes]
    if source.stored is not None:
        notes.append("The model is already quantized, and estimated as it is.")
    if not hardware.peaks:
        notes.append(f"The peak of {hardware.name} is unknown: only its bandwidth bounds the figures.")
    elif any(s.activation is not None for s in schemes) and E4M3 not in hardware.peaks:
        notes.append(f"{hardware.name} does not multiply FP8: every scheme runs on weight-only kernels, in BF16.")
    four_bit = any(s.weight.element is E2M1 for s in schemes)
    if four_bit and E2M1 in hardware.peaks:
        notes.append(
            f"{hardware.name} multiplies FP4 too. Weight-only schemes leave inputs in BF16, and are estimated so; "
            "vLLM rounds the inputs of mxfp4 to FP4 there, unless --linear-backend marlin forbids it."
        )
    if request.shape.experts:
        notes.append(
            f"Of {request.shape.experts} experts a token visits {request.shape.experts_per_token}; the number "
            "of experts that a step reads is the expectation of an even router."
        )
    if request.batch * request.context > STEP_TOKENS:
        notes.append(f"Activations are estimated for steps of {max(STEP_TOKENS, request.batch):,} tokens.")
    if request.gpus > 1:
        notes.append("Communication between devices is not counted.")
    return tuple(notes)
