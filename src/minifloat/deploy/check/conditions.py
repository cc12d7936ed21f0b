"""The conditions of the rules: small functions over one `Case`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minifloat.checkpoint import TensorInfo
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, Case, Kind, Weight
from minifloat.errors import ConfigError
from minifloat.model.architecture.family import Role
from minifloat.model.architecture.full_config import merges_single_experts
from minifloat.model.architecture.roles import fused_group, is_embedding, is_mtp, role_of, serving_group
from minifloat.model.layouts import compressed_tensors, fp8, gguf, gpt_oss
from minifloat.model.layouts.gguf.architectures import BY_CLASS
from minifloat.model.layouts.gguf.blocks import blocks_of
from minifloat.numerics.formats import E4M3, ElementFormat
from minifloat.numerics.granularity import BLOCK_128
from minifloat.numerics.scheme import ScaleRule
from minifloat.report.text import layer_pattern

#: Returns the evidence that a rule applies, as lines; no lines where the rule does not apply.
Condition = Callable[[Case], Iterable[str]]

_HEAD = "lm_head"
_BLOCK_ROWS, _BLOCK_COLS = BLOCK_128.block((1, 1))
#: Linears whose columns tensor parallelism divides among GPUs; of all other linears it divides the rows.
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h", "fc2", "c_proj"})
#: Linears that every GPU holds a whole copy of.
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj", "eh_proj"})
_KEY_VALUE = frozenset({"k_proj", "v_proj"})
#: The last parts of fused layers: only their last block may be partial.
_LAST_PARTS = frozenset({"v_proj", "value", "up_proj", "w3", "kv_a_proj_with_mqa", "in_proj_z", "in_proj_a"})
_DELTA_NET_QKV = "in_proj_qkv"
_INDEXER, _KEYS, _SCORES = ".indexer.", "wk", "weights_proj"
_SELECTIVE_INPUT = "x_proj"
_SELECTIVE = ("in_proj", _SELECTIVE_INPUT, "dt_proj", "out_proj")


def named(weights: Iterable[Weight], text: str = "") -> Iterator[str]:
    """Yield a line per weight, with `text` after it; the layer number is a pattern, so that layers give equal lines."""
    for weight in weights:
        rows, cols = weight.shape
        yield f"{layer_pattern(weight.module)} ({rows}x{cols}){text}"


def weights(
    *kinds: Kind,
    layout: str | None = None,
    experts: bool | None = None,
    element: ElementFormat | None = None,
    rule: ScaleRule | None = None,
    leaves: Collection[str] = (),
    model_types: Collection[str] = (),
) -> Condition:
    """Return the condition that finds quantized weights with all of these properties."""

    def find(case: Case) -> Iterator[str]:
        subject = case.subject
        if layout not in (None, subject.layout):
            return
        if model_types and not {subject.model_type, subject.outer_type} & set(model_types):
            return
        for weight in case.weights(*kinds, experts=experts):
            spec = weight.spec
            fits = spec is not None and element in (None, spec.element) and rule in (None, spec.rule)
            if fits and (not leaves or weight.leaf in leaves):
                yield from named([weight])

    return find


def has_layout(layout: str) -> Condition:
    """Return the condition that finds quantized weights in a layout."""

    def find(case: Case) -> Iterator[str]:
        if case.subject.layout == layout and case.subject.quantized:
            yield f"layout {layout}"

    return find


def no_gguf_architecture(case: Case) -> Iterator[str]:
    names = case.subject.config.get("architectures") or ["no architectures in config.json"]
    if case.subject.file is None and names[0] not in BY_CLASS:
        yield str(names[0])


def gguf_file(case: Case) -> Iterator[str]:
    if case.subject.file is not None:
        yield f"architecture {case.subject.file.architecture}"


def gguf_architecture_not_in(case: Case, *, names: Callable[[], Collection[str]]) -> Iterator[str]:
    if case.subject.file is not None and case.subject.file.architecture not in names():
        yield from gguf_file(case)


def known_to_llama_cpp() -> Collection[str]:
    """Return the architectures of models of text; the package gguf lists those of llama.cpp."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

    return {name for row, name in MODEL_ARCH_NAMES.items() if row is not MODEL_ARCH.MMPROJ}


def gguf_types(case: Case, *, types: Collection[str]) -> Iterator[str]:
    for row in () if case.subject.file is None else case.subject.file.rows:
        if row.format in types:
            yield f"{layer_pattern(row.name)} is {row.format}"


def partial_ggml_blocks(case: Case) -> Iterator[str]:
    for weight in case.weights():
        blocks = None if weight.spec is None else blocks_of(weight.spec)
        if blocks is not None and weight.shape[1] % blocks.elements:
            yield from named([weight])


def anything(case: Case) -> Iterator[str]:
    yield f"{case.target.engine} on {case.target.hardware.name}"


def no_gguf_file(case: Case) -> Iterator[str]:
    return anything(case) if case.subject.layout != gguf.NAME else iter(())


# Formats of weights.


def mixed_fused(case: Case) -> Iterator[str]:
    groups: dict[str, list[Weight]] = {}
    for weight in case.subject.weights:
        groups.setdefault(serving_group(weight.module, case.subject.family), []).append(weight)
    for name, members in groups.items():
        module_by_kind = {(weight.spec and weight.kind): layer_pattern(weight.module) for weight in members}
        if len(module_by_kind) > 1:
            parts = ", ".join(f"{module} {kind.value if kind else 'BF16'}" for kind, module in module_by_kind.items())
            yield f"{layer_pattern(name)}: {parts}"


def misread_blocks(case: Case) -> Iterator[str]:
    """Weights of the `fp8` layout with partial blocks whose shape over that of their scales gives a wrong block."""
    yield from _partial_blocks(case, divisible=True)


def unread_blocks(case: Case) -> Iterator[str]:
    """Weights of the `fp8` layout with partial blocks whose scales do not divide their shape."""
    yield from _partial_blocks(case, divisible=False)


def _partial_blocks(case: Case, *, divisible: bool) -> Iterator[str]:
    if case.subject.layout != fp8.NAME:
        return
    for weight in case.subject.quantized:
        if weight.spec is None or None in (weight.spec.granularity.rows, weight.spec.granularity.cols):
            continue
        block, grid = weight.spec.granularity.block(weight.shape), weight.spec.granularity.scale_shape(weight.shape)
        sides = list(zip(weight.shape, block, grid, strict=True))
        evenly = all(size % count == 0 for size, _, count in sides)
        misread = any(size // count != extent for size, extent, count in sides)
        if any(size % extent for size, extent, _ in sides) and evenly is divisible and misread:
            yield from named([weight], f": a grid of {grid[0]}x{grid[1]} scales")


def ragged_inputs(case: Case) -> Iterator[str]:
    """Weights in compressed-tensors whose columns are no multiple of the group size of their inputs."""
    for weight in case.weights() if case.subject.layout == compressed_tensors.NAME else ():
        group = None if weight.activation is None else weight.activation.granularity.cols
        if group and weight.shape[1] % group:
            yield from named([weight], f": {weight.shape[1]} inputs in groups of {group}")


def not_whole_blocks_of_128_columns(case: Case) -> Iterator[str]:
    for weight in case.weights(Kind.OTHER):
        if weight.spec is not None and weight.spec.element is E4M3 and weight.spec.granularity.cols != _BLOCK_COLS:
            yield from named([weight], f": {weight.spec.granularity}")


def weight_only_blocks(case: Case) -> Iterator[str]:
    yield from named(w for w in case.weights(Kind.FP8_WEIGHT_ONLY) if w.spec and w.spec.granularity == BLOCK_128)


def dense_mxfp4(case: Case) -> Iterator[str]:
    if case.subject.misnamed:
        yield "quant_method mxfp4 without *_blocks tensors"


fused_experts = weights(*MXFP4_KINDS, layout=gpt_oss.NAME)


def needs_amx(case: Case) -> Iterator[str]:
    """Weights that vLLM multiplies with AMX on a CPU: E4M3 in blocks, and experts as gpt-oss stores them."""
    yield from named(case.weights(Kind.FP8_BLOCK))
    yield from fused_experts(case)


# lm_head, attention and the KV cache.


def head_not_named(case: Case) -> Iterator[str]:
    """A quantized lm_head in compressed-tensors that config groups target by the class "Linear", not by name."""
    if not case.subject.head_named:
        yield from weights(layout=compressed_tensors.NAME, leaves=(_HEAD,))(case)


def quantized_embedding(case: Case) -> Iterator[str]:
    yield from named(weight for weight in case.subject.quantized if is_embedding(weight.module))


def tied_embedding(case: Case) -> Iterator[str]:
    """A quantized embedding that is the output layer too."""
    if all(weight.leaf != _HEAD for weight in case.subject.weights):
        yield from quantized_embedding(case)


def plain_head(case: Case) -> Iterator[str]:
    if case.subject.quantized:
        yield from named(w for w in case.subject.weights if w.leaf == _HEAD and w.spec is None)


def vocabulary_without_place(case: Case) -> Iterator[str]:
    """Embeddings and output layers that SGLang builds without quantization."""
    yield from head_not_named(case)
    yield from weights(layout=fp8.NAME, leaves=(_HEAD,))(case)
    yield from quantized_embedding(case)


def kv_declared(case: Case) -> Iterator[str]:
    if case.subject.kv is not None:
        yield f"KV cache {case.subject.kv.element.name}"


def kv_without_scales(case: Case) -> Iterator[str]:
    if not case.subject.kv_scales:
        yield from (f"{line}, no k_scale or v_scale" for line in kv_declared(case))


def head_size_not_in(case: Case, *, sizes: Collection[int]) -> Iterator[str]:
    size = case.subject.head_size
    if size and size not in sizes:
        yield f"heads of {size}"


def latent_attention(case: Case, *, except_size: int = 0) -> Iterator[str]:
    """Latent attention (MLA) as vLLM computes it, unless a token has `except_size` numbers in the cache."""
    rank, rotated = (case.subject.config.get(name) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if rank and rotated and case.subject.model_type != "minicpm3" and rank + rotated != except_size:
        yield f"{rank} + {rotated} numbers of a token in the cache"


def quantized_latent_attention(case: Case) -> Iterator[str]:
    if case.subject.quantized:
        yield from latent_attention(case)


# Experts.


def _experts_fused_by_transformers(case: Case) -> Iterator[Weight]:
    """Yield the experts whose weights transformers stacks while it loads them; it keeps those of Llama 4 as linears."""
    experts = case.weights(experts=True) if case.subject.layout == compressed_tensors.NAME else ()
    if experts and not case.subject.family.transformers_splits and _transformers_reads_single(case):
        yield from experts


def experts_in_blocks(case: Case) -> Iterator[str]:
    for weight in _experts_fused_by_transformers(case):
        assert weight.spec is not None
        grid = weight.spec.granularity.scale_shape(weight.shape)
        if weight.spec.element is E4M3 and any(n not in (1, size) for n, size in zip(grid, weight.shape, strict=True)):
            yield from named([weight])


def experts_with_global_scale(case: Case) -> Iterator[str]:
    yield from named(w for w in _experts_fused_by_transformers(case) if w.spec and w.spec.has_global_scale)


def experts_of_several_elements(case: Case) -> Iterator[str]:
    experts = list(_experts_fused_by_transformers(case))
    if len({weight.spec.element for weight in experts if weight.spec is not None}) > 1:
        yield from named(experts)


def _single_experts(case: Case) -> Iterator[str]:
    yield from named(w for w in case.weights(experts=True) if case.subject.family.single_expert(w.module))


def experts_that_vllm_reads_fused(case: Case) -> Iterator[str]:
    if not case.subject.family.servers_read_single:
        yield from _single_experts(case)


def experts_that_transformers_reads_fused(case: Case) -> Iterator[str]:
    experts = list(_single_experts(case))
    if experts and not _transformers_reads_single(case):  # which imports torch
        yield from experts


def _transformers_reads_single(case: Case) -> bool:
    family = case.subject.family
    if family.stored_fused is None:
        return merges_single_experts((case.subject.model_type, case.subject.outer_type))
    splits = family.transformers_splits and case.subject.layout == compressed_tensors.NAME
    return not family.stored_fused or splits


def unlisted_experts(case: Case) -> Iterator[str]:
    """Fused experts in 16 bits that a config group targets by class, and that the list of exceptions does not have."""
    yield from named(case.subject.unlisted_experts)


def experts_taken_for_mxfp4(case: Case) -> Iterator[str]:
    if case.subject.family.states_expert_dtype and case.subject.config.get("expert_dtype") != "fp8":
        yield from weights(layout=fp8.NAME, experts=True, element=E4M3)(case)


# Linears that an engine builds without quantization, so that codes and scales have no place.


def indexer(case: Case) -> Iterator[str]:
    """The indexer of sparse attention: its scores in any format, its keys in other codes than E4M3."""
    for weight in case.subject.quantized:
        if _INDEXER not in weight.module or weight.spec is None:
            continue
        if weight.leaf == _SCORES or (weight.leaf == _KEYS and weight.spec.element is not E4M3):
            yield from named([weight])


def indexer_outside_blocks(case: Case) -> Iterator[str]:
    """Keys and scores of the indexer that SGLang does not decode: on NVIDIA it decodes blocks of 128x128."""
    on_nvidia = case.target.hardware.generation.vendor == "nvidia"
    for weight in case.subject.quantized:
        without_place = weight.kind is not Kind.FP8_BLOCK if on_nvidia else weight.leaf == _SCORES
        if _INDEXER in weight.module and weight.leaf in (_KEYS, _SCORES) and without_place:
            yield from named([weight])


def draft_projection(case: Case, *, leaves: Collection[str], except_types: Collection[str]) -> Iterator[str]:
    """The projection of embedding and hidden state in layers of multi-token prediction."""
    if case.subject.model_type not in except_types:
        drafts = (w for w in case.subject.quantized if is_mtp(w.module, case.subject.config))
        yield from named(weight for weight in drafts if weight.leaf in leaves)


def selective_state_space(case: Case) -> Iterator[str]:
    """Projections of Mamba layers of the first kind, which have an `x_proj`."""
    mixers = {w.module.rpartition(".")[0] for w in case.subject.weights if w.leaf == _SELECTIVE_INPUT}
    projections = (weight for weight in case.subject.quantized if weight.leaf in _SELECTIVE)
    yield from named(weight for weight in projections if weight.module.rpartition(".")[0] in mixers)


def routers(case: Case, *, except_types: Collection[str]) -> Iterator[str]:
    for weight in case.subject.quantized:
        info = TensorInfo(f"{weight.module}.weight", "BF16", weight.shape, "", 0, 0)
        if role_of(info, case.subject.family) is not Role.ROUTER:
            continue
        if weight.leaf != "gate" or case.subject.model_type not in except_types:
            yield from named([weight])


# Tensor parallelism: heads, matrices, blocks and groups that GPUs cannot share.


def _is_row_parallel(weight: Weight) -> bool:
    return weight.leaf in _ROW_PARALLEL


def _rows_per_gpu(case: Case, weight: Weight) -> int:
    """Return the rows of a weight on one GPU; key and value projections are not divided below one head."""
    if _is_row_parallel(weight) or weight.leaf in _REPLICATED:
        return weight.shape[0]
    parts = min(case.tp, case.subject.kv_heads or case.tp) if weight.leaf in _KEY_VALUE else case.tp
    return weight.shape[0] // parts


def _cols_per_gpu(case: Case, weight: Weight) -> int:
    return weight.shape[1] // case.tp if _is_row_parallel(weight) else weight.shape[1]


def several_gpus(case: Case) -> Iterator[str]:
    if case.tp > 1:
        yield f"--tp {case.tp}"


def uneven_heads(case: Case) -> Iterator[str]:
    if case.subject.heads % case.tp:
        yield f"{case.subject.heads} attention heads over {case.tp} GPUs"


def uneven_kv_heads(case: Case) -> Iterator[str]:
    heads = case.subject.kv_heads
    if heads and heads % case.tp and case.tp % heads:
        yield f"{heads} heads of keys and values over {case.tp} GPUs"


def copied_kv_heads(case: Case) -> Iterator[str]:
    heads = case.subject.kv_heads
    if heads and heads < case.tp and case.tp % heads == 0:
        yield f"{heads} heads of keys and values: each is on {case.tp // heads} of {case.tp} GPUs"


def uneven_matrices(case: Case) -> Iterator[str]:
    for weight in case.subject.weights:
        side = weight.shape[1] if _is_row_parallel(weight) else weight.shape[0]
        if weight.leaf not in (*_KEY_VALUE, *_REPLICATED, _HEAD) and side % case.tp:
            yield from named([weight], f": {side} over {case.tp} GPUs")


def broken_blocks(case: Case) -> Iterator[str]:
    for weight in case.weights(experts=False):
        if weight.spec is None or weight.spec.granularity != BLOCK_128:
            continue
        cols = _cols_per_gpu(case, weight)
        group = fused_group(weight.module, case.subject.family)
        fused = group != weight.module and weight.leaf not in _LAST_PARTS
        split = case.tp > 1 and not _is_row_parallel(weight) and weight.leaf not in _REPLICATED
        for rows in _rows_of_parts(case, weight):
            if (fused or split) and rows % _BLOCK_ROWS:
                yield from named([weight], f": {rows} rows on a GPU, {rows} % {_BLOCK_ROWS} = {rows % _BLOCK_ROWS}")
        if case.tp > 1 and _is_row_parallel(weight) and cols % _BLOCK_COLS:
            yield from named([weight], f": {cols} columns on a GPU, {cols} % {_BLOCK_COLS} = {cols % _BLOCK_COLS}")


def _rows_of_parts(case: Case, weight: Weight) -> tuple[int, ...]:
    """Return the rows on one GPU of each part of a weight; queries, keys and values of a gated delta net are parts."""
    rows = _rows_per_gpu(case, weight)
    heads, width = (case.subject.config.get(name) for name in ("linear_num_key_heads", "linear_key_head_dim"))
    if weight.leaf != _DELTA_NET_QKV or not heads or not width:
        return (rows,)
    keys = heads * width // case.tp
    return (keys, keys, rows - 2 * keys)


def broken_expert_blocks(case: Case) -> Iterator[str]:
    for weight in case.weights(experts=True):
        if weight.spec is None or weight.spec.granularity != BLOCK_128:
            continue
        inner = _cols_per_gpu(case, weight) if _is_row_parallel(weight) else _rows_per_gpu(case, weight)
        if inner % _BLOCK_ROWS and (case.tp > 1 or not _is_row_parallel(weight)):
            yield from named([weight], f": inner size {inner} on a GPU")


def broken_groups(case: Case) -> Iterator[str]:
    for weight in case.weights(*MXFP4_KINDS, *MXFP8_KINDS, Kind.NVFP4, Kind.NVFP4_W4A4):
        if weight.spec is None or case.tp == 1 or not _is_row_parallel(weight):
            continue
        group = weight.spec.granularity.cols or 1
        cols = _cols_per_gpu(case, weight)
        if cols % group:
            yield from named([weight], f": {cols} columns on a GPU, in groups of {group}")


# minifloat's own decoders.


def not_native(case: Case) -> Iterator[str]:
    reason = _why_not_native(case)
    if reason:
        yield re.sub(r"^(its|it is|it) ", "", reason)


def only_text(case: Case) -> Iterator[str]:
    from minifloat.model.architecture.roles import has_towers

    outer = case.subject.outer_type
    if has_towers(outer) and not _why_not_native(case):
        yield f"model_type {outer!r}"


def _why_not_native(case: Case) -> str:
    """Return why the target's decoder does not run the text model, as far as its config tells; empty if it does."""
    from minifloat.model.architecture.decoder import NotNative, decoder_layout, why_not_on_device, why_not_type
    from minifloat.model.architecture.decoder.parts import why_not_rope
    from minifloat.model.architecture.roles import text_type

    subject = case.subject
    outer = subject.outer_type or subject.model_type
    stated = subject.model_type if subject.model_type not in (outer, "unknown") else ""
    model_type = text_type(outer, stated)
    reason = why_not_type(model_type) or why_not_rope(subject.config)
    if reason:
        return reason
    try:
        plan = decoder_layout(_full_text_config({**subject.config, "model_type": model_type}))
    except NotNative as error:
        return str(error)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        return ""  # no model can be built of the config, which opening it reports
    return "" if case.target.hardware.generation.vendor == "cpu" else why_not_on_device(plan)


def _full_text_config(values: Mapping[str, Any]) -> Any:
    """Return a text model's config with all defaults; transformers reads what `read_config` leaves to it."""
    from minifloat.model.architecture.decoder_config import read_config

    config = read_config(values, Path())
    if not isinstance(config, str):
        return config
    from minifloat.model.architecture.full_config import full_config, quiet_transformers

    with quiet_transformers():
        return full_config(values, Path())
