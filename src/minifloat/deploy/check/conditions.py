"""The conditions of rules, except those about tensor parallelism (`parallel_conditions`).

Each condition yields the evidence that its rule applies, as lines: a weight that all layers have takes one line. It
yields nothing where the rule does not apply. Each docstring says what the condition finds.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minifloat.deploy.check.loading_rule import Case, Condition
from minifloat.deploy.check.subject import MXFP4_KINDS, Kind, Weight
from minifloat.errors import ConfigError
from minifloat.model.architecture.groups import serving_group
from minifloat.model.layouts import compressed_tensors, fp8, gpt_oss, modelopt
from minifloat.numerics.formats import E2M1, E4M3
from minifloat.numerics.granularity import BLOCK_128
from minifloat.report.text import layer_pattern

_HEAD = "lm_head"
_BLOCK_COLS = BLOCK_128.block((1, 1))[1]


def named(weights: Iterable[Weight], text: str = "") -> Iterator[str]:
    """Yield a line per weight, with `text` after it; the layer number is a pattern, so that layers give equal lines."""
    for weight in weights:
        rows, cols = weight.shape
        yield f"{layer_pattern(weight.module)} ({rows}x{cols}){text}"


def kinds(*selected: Kind, layout: str | None = None, experts: bool | None = None) -> Condition:
    """Return the condition that finds weights of these kinds."""

    def find(case: Case) -> Iterator[str]:
        if layout in (None, case.subject.layout):
            yield from named(case.weights(*selected, experts=experts))

    return find


def kinds_in_types(case: Case, *, kinds: Collection[Kind], model_types: Collection[str]) -> Iterator[str]:
    """Weights of these kinds, in compressed-tensors, in models of these types."""
    is_of_type = {case.subject.model_type, case.subject.outer_type} & set(model_types)
    if is_of_type and case.subject.layout == compressed_tensors.NAME:
        yield from named(case.weights(*kinds))


def has_layout(*layouts: str) -> Condition:
    """Return the condition that finds quantized weights in one of these layouts."""

    def find(case: Case) -> Iterator[str]:
        if case.subject.layout in layouts and case.subject.quantized:
            yield f"layout {case.subject.layout}"

    return find


def mixed_fused(case: Case) -> Iterator[str]:
    """Parts of one fused layer, or experts of one layer, that are quantized differently."""
    groups: dict[str, list[Weight]] = {}
    for weight in case.subject.weights:
        groups.setdefault(serving_group(weight.module, case.subject.family), []).append(weight)
    for name, members in groups.items():
        module_by_kind = {(weight.spec and weight.kind): layer_pattern(weight.module) for weight in members}
        if len(module_by_kind) > 1:
            parts = ", ".join(f"{module} {kind.value if kind else 'BF16'}" for kind, module in module_by_kind.items())
            yield f"{layer_pattern(name)}: {parts}"


def partial_blocks(case: Case, *, divisible: bool) -> Iterator[str]:
    """Weights of the `fp8` layout whose last blocks are partial, where transformers would derive a wrong block size.

    transformers divides the shape of a weight by that of its grid of scales.
    """
    if case.subject.layout != fp8.NAME:
        return
    for weight in case.subject.quantized:
        if weight.spec is None or None in (weight.spec.granularity.rows, weight.spec.granularity.cols):
            continue
        block, grid = weight.spec.granularity.block(weight.shape), weight.spec.granularity.scale_shape(weight.shape)
        sides = list(zip(weight.shape, block, grid, strict=True))
        if all(size % extent == 0 for size, extent, _ in sides):
            continue
        evenly = all(size % count == 0 for size, _, count in sides)
        misread = any(size // count != extent for size, extent, count in sides)
        if evenly is divisible and misread:
            yield from named([weight], f": a grid of {grid[0]}x{grid[1]} scales")


def ragged_inputs(case: Case) -> Iterator[str]:
    """Weights whose columns are no multiple of the group size of their inputs."""
    for weight in case.weights():
        group = None if weight.activation is None else weight.activation.granularity.cols
        if group and weight.shape[1] % group:
            yield from named([weight], f": {weight.shape[1]} inputs in groups of {group}")


def not_whole_blocks_of_128_columns(case: Case) -> Iterator[str]:
    """E4M3 in blocks whose scales do not cover 128 columns."""
    for weight in case.weights(Kind.OTHER):
        if weight.spec is not None and weight.spec.element is E4M3 and weight.spec.granularity.cols != _BLOCK_COLS:
            yield from named([weight], f": {weight.spec.granularity}")


def quantized_head(case: Case, *, layout: str) -> Iterator[str]:
    """A quantized lm_head in one layout."""
    if case.subject.layout == layout:
        yield from named(weight for weight in case.subject.quantized if weight.leaf == _HEAD)


def head_in_blocks(case: Case) -> Iterator[str]:
    """An lm_head in blocks of 128x128, in compressed-tensors."""
    heads = (weight for weight in case.weights(Kind.FP8_BLOCK) if weight.leaf == _HEAD)
    if case.subject.layout == compressed_tensors.NAME:
        yield from named(heads)


def head_not_named(case: Case) -> Iterator[str]:
    """A quantized lm_head in compressed-tensors that config groups target by the class "Linear", not by name."""
    if not case.subject.head_named:
        yield from quantized_head(case, layout=compressed_tensors.NAME)


def plain_head(case: Case) -> Iterator[str]:
    """An unquantized lm_head with weights of its own, in a model whose other weights are quantized."""
    if case.subject.quantized:
        yield from named(w for w in case.subject.weights if w.leaf == _HEAD and w.spec is None)


def kv_without_scales(case: Case) -> Iterator[str]:
    """An FP8 KV cache that the checkpoint declares without scales."""
    if case.subject.kv is not None and not case.subject.kv_scales:
        yield f"KV cache {case.subject.kv.element.name}, no k_scale or v_scale"


def kv_declared(case: Case) -> Iterator[str]:
    """A KV cache that the checkpoint declares as quantized."""
    if case.subject.kv is not None:
        yield f"KV cache {case.subject.kv.element.name}"


def dense_mxfp4(case: Case) -> Iterator[str]:
    """A dense model that declares gpt-oss' quant_method mxfp4, which is for fused experts."""
    if case.subject.misnamed:
        yield "quant_method mxfp4 without *_blocks tensors"


def modelopt_fp8(case: Case) -> Iterator[str]:
    """ModelOpt's 8-bit codes."""
    if case.subject.layout == modelopt.NAME:
        yield from named(weight for weight in case.weights() if weight.spec is not None and weight.spec.element is E4M3)


def modelopt_fp4(case: Case) -> Iterator[str]:
    """ModelOpt's packed 4-bit codes."""
    if case.subject.layout == modelopt.NAME:
        yield from named(weight for weight in case.weights() if weight.spec is not None and weight.spec.element is E2M1)


def fp8_per_tensor(case: Case) -> Iterator[str]:
    """Weights in the `fp8` layout without blocks."""
    if case.subject.layout == fp8.NAME:
        yield from named(case.weights(Kind.FP8_STATIC, Kind.FP8_DYNAMIC))


def weight_only_blocks(case: Case) -> Iterator[str]:
    """E4M3 weights in blocks of 128x128 with inputs in 16 bits."""
    yield from named(w for w in case.weights(Kind.FP8_WEIGHT_ONLY) if w.spec and w.spec.granularity == BLOCK_128)


def needs_amx(case: Case) -> Iterator[str]:
    """Weights that vLLM multiplies with AMX on a CPU: E4M3 in blocks, and experts as gpt-oss stores them."""
    yield from named(case.weights(Kind.FP8_BLOCK))
    yield from fused_experts(case)


def head_size_not_in(case: Case, *, sizes: Collection[int]) -> Iterator[str]:
    """Attention heads whose size is not in `sizes`."""
    size = case.subject.head_size
    if size and size not in sizes:
        yield f"heads of {size}"


def several_gpus(case: Case) -> Iterator[str]:
    """Tensor parallelism."""
    if case.tp > 1:
        yield f"--tp {case.tp}"


def anything(case: Case) -> Iterator[str]:
    """Every case."""
    yield f"{case.target.engine} on {case.target.hardware.name}"


def not_native(case: Case) -> Iterator[str]:
    """Models whose text model neither the native decoder nor the GPU decoder covers."""
    reason = _why_not_native(case)
    if reason:
        yield re.sub(r"^(its|it is|it) ", "", reason)


def only_text(case: Case) -> Iterator[str]:
    """Models with a text model that the decoders run, beside parts that they do not."""
    from minifloat.model.architecture.multimodal import has_towers

    outer = case.subject.outer_type
    if has_towers(outer) and not _why_not_native(case):
        yield f"model_type {outer!r}"


def _why_not_native(case: Case) -> str:
    """Return why the target's decoder does not run the text model, as far as its config tells; empty if it does."""
    from minifloat.model.architecture.decoder import NotNative, decoder_plan, why_not_on_device, why_not_type
    from minifloat.model.architecture.decoder.parts import why_not_rope
    from minifloat.model.architecture.multimodal import text_type

    subject = case.subject
    outer = subject.outer_type or subject.model_type
    stated = subject.model_type if subject.model_type not in (outer, "unknown") else ""
    model_type = text_type(outer, stated)
    reason = why_not_type(model_type) or why_not_rope(subject.config)
    if reason:
        return reason
    try:
        plan = decoder_plan(_full_text_config({**subject.config, "model_type": model_type}))
    except NotNative as error:
        return str(error)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        return ""  # no model can be built of the config, which opening it reports
    return "" if case.target.hardware.generation.vendor == "cpu" else why_not_on_device(plan)


def _full_text_config(values: Mapping[str, Any]) -> Any:
    """Return a text model's config with all defaults; transformers reads what `read_config` leaves to it."""
    from minifloat.model.architecture.complete_config import read_config

    config = read_config(values, Path())
    if not isinstance(config, str):
        return config
    from minifloat.model.architecture.full_config import full_config, quiet_transformers

    with quiet_transformers():
        return full_config(values, Path())


def fused_experts(case: Case) -> Iterator[str]:
    """Experts as gpt-oss stores them."""
    if case.subject.layout == gpt_oss.NAME:
        yield from named(case.weights(*MXFP4_KINDS))
