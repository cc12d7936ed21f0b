"""The conditions of rules about tensor parallelism: heads, matrices, blocks and groups that GPUs cannot share.

Like `conditions`, each yields the evidence that its rule applies, as lines, and its docstring says what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator

from minifloat.deploy.check.conditions import named
from minifloat.deploy.check.loading_rule import Case
from minifloat.deploy.check.subject import MXFP4_KINDS, MXFP8_KINDS, Kind, Weight
from minifloat.model.architecture.groups import fused_group
from minifloat.numerics.granularity import BLOCK_128

#: Linears whose columns tensor parallelism divides among GPUs; of all other linears it divides the rows.
_ROW_PARALLEL = frozenset({"o_proj", "down_proj", "w2", "out_proj", "dense_4h_to_h", "fc2", "c_proj"})
#: Linears that every GPU holds a whole copy of.
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "wk", "weights_proj", "eh_proj"})
_KEY_VALUE = frozenset({"k_proj", "v_proj"})
#: The last parts of fused layers: only their last block may be partial.
_LAST_PARTS = frozenset({"v_proj", "value", "up_proj", "w3", "kv_a_proj_with_mqa", "in_proj_z", "in_proj_a"})
_HEAD = "lm_head"
_DELTA_NET_QKV = "in_proj_qkv"
_BLOCK_ROWS, _BLOCK_COLS = BLOCK_128.block((1, 1))


def is_row_parallel(weight: Weight) -> bool:
    """Return whether tensor parallelism divides the columns of a weight, not its rows."""
    return weight.leaf in _ROW_PARALLEL


def rows_per_gpu(case: Case, weight: Weight) -> int:
    """Return the rows of a weight on one GPU; key and value projections are not divided below one head."""
    if is_row_parallel(weight) or weight.leaf in _REPLICATED:
        return weight.shape[0]
    parts = min(case.tp, case.subject.kv_heads or case.tp) if weight.leaf in _KEY_VALUE else case.tp
    return weight.shape[0] // parts


def cols_per_gpu(case: Case, weight: Weight) -> int:
    """Return the columns of a weight on one GPU."""
    return weight.shape[1] // case.tp if is_row_parallel(weight) else weight.shape[1]


def uneven_heads(case: Case) -> Iterator[str]:
    """A number of attention heads that is no multiple of the number of GPUs."""
    if case.subject.heads % case.tp:
        yield f"{case.subject.heads} attention heads over {case.tp} GPUs"


def uneven_kv_heads(case: Case) -> Iterator[str]:
    """A number of key-value heads that neither divides the number of GPUs nor is a multiple of it."""
    heads = case.subject.kv_heads
    if heads and heads % case.tp and case.tp % heads:
        yield f"{heads} heads of keys and values over {case.tp} GPUs"


def copied_kv_heads(case: Case) -> Iterator[str]:
    """Fewer key-value heads than GPUs, so that several GPUs hold copies of one head."""
    heads = case.subject.kv_heads
    if heads and heads < case.tp and case.tp % heads == 0:
        yield f"{heads} heads of keys and values: each is on {case.tp // heads} of {case.tp} GPUs"


def uneven_matrices(case: Case) -> Iterator[str]:
    """Matrices whose divided side is no multiple of the number of GPUs."""
    for weight in case.subject.weights:
        side = weight.shape[1] if is_row_parallel(weight) else weight.shape[0]
        if weight.leaf not in (*_KEY_VALUE, *_REPLICATED, _HEAD) and side % case.tp:
            yield from named([weight], f": {side} over {case.tp} GPUs")


def uneven_anything(case: Case) -> Iterator[str]:
    """Heads or matrices that the GPUs cannot share evenly."""
    yield from uneven_heads(case)
    yield from uneven_kv_heads(case)
    yield from uneven_matrices(case)


def broken_blocks(case: Case) -> Iterator[str]:
    """Blocks of 128x128 that end inside another part of a fused layer, or on another GPU."""
    for weight in case.weights(experts=False):
        if weight.spec is None or weight.spec.granularity != BLOCK_128:
            continue
        cols = cols_per_gpu(case, weight)
        group = fused_group(weight.module, case.subject.family)
        fused = group != weight.module and weight.leaf not in _LAST_PARTS
        split = case.tp > 1 and not is_row_parallel(weight) and weight.leaf not in _REPLICATED
        for rows in _rows_of_parts(case, weight):
            if (fused or split) and rows % _BLOCK_ROWS:
                yield from named([weight], f": {rows} rows on a GPU, {rows} % {_BLOCK_ROWS} = {rows % _BLOCK_ROWS}")
        if case.tp > 1 and is_row_parallel(weight) and cols % _BLOCK_COLS:
            yield from named([weight], f": {cols} columns on a GPU, {cols} % {_BLOCK_COLS} = {cols % _BLOCK_COLS}")


def _rows_of_parts(case: Case, weight: Weight) -> tuple[int, ...]:
    """Return the rows on one GPU of each part of a weight; queries, keys and values of a gated delta net are parts."""
    rows = rows_per_gpu(case, weight)
    heads, width = (case.subject.config.get(name) for name in ("linear_num_key_heads", "linear_key_head_dim"))
    if weight.leaf != _DELTA_NET_QKV or not heads or not width:
        return (rows,)
    keys = heads * width // case.tp
    return (keys, keys, rows - 2 * keys)


def broken_expert_blocks(case: Case) -> Iterator[str]:
    """Experts whose inner size on a GPU is no multiple of the block size."""
    for weight in case.weights(experts=True):
        if weight.spec is None or weight.spec.granularity != BLOCK_128:
            continue
        inner = cols_per_gpu(case, weight) if is_row_parallel(weight) else rows_per_gpu(case, weight)
        if inner % _BLOCK_ROWS and (case.tp > 1 or not is_row_parallel(weight)):
            yield from named([weight], f": inner size {inner} on a GPU")


def broken_groups(case: Case) -> Iterator[str]:
    """Groups of 32 or 16 columns that two GPUs would share."""
    for weight in case.weights(*MXFP4_KINDS, *MXFP8_KINDS, Kind.NVFP4, Kind.NVFP4_W4A4):
        if weight.spec is None or case.tp == 1 or not is_row_parallel(weight):
            continue
        group = weight.spec.granularity.cols or 1
        cols = cols_per_gpu(case, weight)
        if cols % group:
            yield from named([weight], f": {cols} columns on a GPU, in groups of {group}")
