"""A source that is quantized already (`--from-quantized`): its plan, copied codes, and what the report says of it.

Casting codes again that the scheme can hold with their scales would change nothing at best.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.files import name_digest, new_hasher
from minifloat.checkpoint.shard import ShardWriter
from minifloat.errors import NonFiniteError, UsageError
from minifloat.model.architecture.families import family_of
from minifloat.model.layouts import StoredWeight
from minifloat.model.layouts.decoded import DecodedCheckpoint, plain_dtype
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.reading import Bytes, read_codes, read_global_scale, read_scales, value_table
from minifloat.model.plan.tensor_plan import Part, QuantizationPlan, module_name
from minifloat.model.runtime.engine_names import stored_fused_as
from minifloat.numerics.cast_stats import CastStats
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.scheme import WeightSpec
from minifloat.quantize.report import COPIED_CODES, TensorReport

#: Codes that are read at a time.
_CHUNK_BYTES = 1 << 20


def copied_codes(checkpoint: DecodedCheckpoint, plan: QuantizationPlan) -> frozenset[str]:
    """Return the modules whose codes and scales are copied."""
    copied: set[str] = set()
    scales: dict[str, dict[str, float | None]] = {}
    for tensor in plan.tensors:
        weights = checkpoint.weights.get(tensor.source.name)
        for part in tensor.parts:
            stored = None if weights is None else weights[part.matrix]
            same = stored is not None and _holds(stored, part.scheme.weight) and _is_aligned(part)
            if part.scheme.weight.needs_tensor_amax:
                scale = _tensor_scale(checkpoint, stored, part.scheme.weight) if stored is not None and same else None
                scales.setdefault(part.group, {})[part.module] = scale
            elif same:
                copied.add(part.module)
    for members in scales.values():
        if None not in members.values() and len(set(members.values())) == 1:
            copied.update(members)
    return frozenset(copied)


def _holds(stored: StoredWeight, spec: WeightSpec) -> bool:
    """Return whether the scheme can hold codes and scales of the source exactly."""
    held = stored.spec
    if held.element is not spec.element or stored.zero_point is not None:
        return False
    sizes = zip(held.granularity.block(stored.shape), spec.granularity.block(stored.shape), stored.shape, strict=True)
    if not all(outer % inner == 0 or outer >= extent for outer, inner, extent in sizes):
        return False
    rescaled = stored.global_scale is not None and not spec.scaled_globally
    if held.has_global_scale and (held.granularity != spec.granularity or rescaled):
        return False
    return held.scale is spec.scale or (spec.scale is FLOAT32 and not held.has_global_scale)


def _is_aligned(part: Part) -> bool:
    """Return whether a part begins at a block of the scheme in the stored matrix."""
    block_rows, _ = part.scheme.weight.granularity.block(part.shape)
    return part.first_row % block_rows == 0


def _tensor_scale(checkpoint: DecodedCheckpoint, stored: StoredWeight, spec: WeightSpec) -> float:
    """Return the scale of the whole tensor: that of NVFP4 above the block scales as a divisor, else the only one."""
    if stored.spec.has_global_scale:
        return float(_divisor(checkpoint, stored))
    return float(_scales(checkpoint, stored, spec, 0, stored.shape[0])[0, 0])


def copy_codes(
    checkpoint: DecodedCheckpoint, info: TensorInfo, part: Part, shard: ShardWriter
) -> tuple[CastStats, str]:
    """Write the codes of a part as the source has them, and its scales for the blocks of the scheme."""
    end = part.first_row + part.shape[0] // part.matrices
    codes_end = scales_end = 0
    for stored in checkpoint.weights[info.name][part.matrix : part.matrix + part.matrices]:
        step = max(_CHUNK_BYTES // stored.shape[1], 1)
        for start in range(part.first_row, end, step):
            codes = read_codes(checkpoint.stored, stored, start, min(start + step, end))
            _refuse_nan(stored, codes)
            shard.write(part.tensors.codes.name, codes, codes_end)
            codes_end += codes.nbytes
        scales = _scales(checkpoint, stored, part.scheme.weight, part.first_row, end)
        shard.write(part.tensors.scale.name, scales, scales_end)
        scales_end += scales.nbytes
        if part.tensors.global_scale is not None:
            shard.write(part.tensors.global_scale.name, _divisor(checkpoint, stored).reshape(1))
    return CastStats(part.shape[0] * part.shape[1]), stored_digest(checkpoint, info, part)


def stored_digest(checkpoint: DecodedCheckpoint, info: TensorInfo, part: Part) -> str:
    """Return the digest of what is stored of a part's matrices: codes, scales and zero points."""
    hasher = new_hasher()
    for chunk in checkpoint.stored_chunks(info, part.matrix, part.matrices, _CHUNK_BYTES):
        hasher.update(chunk)
    return name_digest(hasher)


def _scales(
    checkpoint: DecodedCheckpoint, stored: StoredWeight, spec: WeightSpec, start: int, stop: int
) -> npt.NDArray[Any]:
    """Return the scales of some rows for the blocks of a scheme: codes, or the same numbers in float32."""
    scales = read_scales(checkpoint.stored, stored, start, stop)
    if spec.scale is FLOAT32 and stored.spec.scale is not FLOAT32:
        scales = value_table(stored.spec.scale)[scales]
    (held_rows, held_cols), (rows, cols) = (
        stored.spec.granularity.block(stored.shape),
        spec.granularity.block(stored.shape),
    )
    row_of_block = np.arange(start, stop, rows) // held_rows - start // held_rows
    col_of_block = np.arange(0, stored.shape[1], cols) // held_cols
    return np.ascontiguousarray(scales[row_of_block][:, col_of_block])


def _divisor(checkpoint: DecodedCheckpoint, stored: StoredWeight) -> np.float32:
    """Return the global scale of a weight of NVFP4 as a divisor."""
    scale = read_global_scale(checkpoint.stored, stored)
    if scale is None:
        raise AssertionError(f"{stored.module}: a weight of NVFP4 without a global scale")
    with np.errstate(divide="ignore", over="ignore"):
        divisor = scale if stored.global_divides else np.float32(1.0) / scale
    if not np.isfinite(divisor):
        raise NonFiniteError(str(stored.global_scale), f"the global scale {scale} has no finite reciprocal")
    return divisor


def _refuse_nan(stored: StoredWeight, codes: Bytes) -> None:
    nan_code = stored.spec.element.nan_code
    if nan_code is not None:
        count = np.count_nonzero((codes & nan_code) == nan_code)
        if count:
            raise NonFiniteError(stored.codes, f"{count} codes are NaN; the checkpoint is damaged")


def with_dequantized_copies(plan: QuantizationPlan, source: DecodedCheckpoint) -> QuantizationPlan:
    """Return the plan with the quantized weights that it copies dequantized to the dtype of config.json."""
    copied = [tensor for tensor in plan.tensors if not tensor.parts and tensor.source.name in source.weights]
    _refuse_single_experts(source, [module_name(tensor.source) for tensor in copied])
    dtype = plain_dtype(source.config)
    tensors = tuple(
        replace(tensor, dtype=dtype) if not tensor.parts and tensor.source.name in source.weights else tensor
        for tensor in plan.tensors
    )
    return replace(plan, tensors=tensors)


def _refuse_single_experts(source: DecodedCheckpoint, modules: Sequence[str]) -> None:
    """Refuse to dequantize single experts where transformers loads unquantized experts fused only."""
    family = family_of(source.config)
    places = {module: place for module in modules if (place := family.single_expert(module)) is not None}
    if places and stored_fused_as(source, family, places.values()) is not None:
        raise UsageError(
            f"{next(iter(places))}: the experts of {family.name} are loaded fused where they are unquantized, and the "
            "source has single ones: quantize them, or start from the plain model of minifloat convert --dequantize"
        )


def dropped_tensors(
    source: DecodedCheckpoint, pool: ThreadPoolExecutor, digest: Callable[[Checkpoint, TensorInfo], str]
) -> tuple[TensorReport, ...]:
    """Return the report of tensors that have no place in the output: scales of inputs and of the KV cache."""
    futures = [(info, pool.submit(digest, source.stored, info)) for info in source.dropped]
    return tuple(
        TensorReport(
            info.name, "dropped", "belongs to the source's quantization", info.shape, info.nbytes, 0, future.result()
        )
        for info, future in futures
    )


def describe_source(source: DecodedCheckpoint, tensors: tuple[TensorReport, ...]) -> dict[str, Any]:
    """Return the facts about a quantized source for the report, as JSON values."""
    weights = source.description.weights.values()
    return {
        "layout": str(source.description.layout),
        "formats": dict(Counter(format_name(weight.spec, weight.activation) for weight in weights).most_common()),
        "copied_codes": sum(tensor.detail.endswith(COPIED_CODES) for tensor in tensors),
        "dequantized": sum(tensor.action == "copied" and "dequantized" in tensor.detail for tensor in tensors),
        "dropped": sum(tensor.action == "dropped" for tensor in tensors),
    }


def source_notes(facts: dict[str, Any] | None) -> tuple[str, ...]:
    """Return sentences about a quantized source for the terminal, minifloat.json and the model card."""
    if facts is None:
        return ()
    formats = ", ".join(f"{name} {count}" for name, count in facts["formats"].items())
    notes = [
        f"The source is quantized itself (layout {facts['layout']}: {formats}). Errors are against its dequantized "
        "values; what it lost to its own original is not in them."
    ]
    if facts["copied_codes"]:
        notes.append(
            f"The codes of {facts['copied_codes']} weights are those of the source: the scheme holds them and their "
            "scales exactly."
        )
    if facts["dequantized"]:
        notes.append(f"{facts['dequantized']} weights that stay unquantized were dequantized.")
    if facts["dropped"]:
        notes.append(
            f"{facts['dropped']} tensors of the source's quantization were dropped (scales of inputs and of the KV "
            "cache, recorded shapes); static scales come from --calibration."
        )
    return tuple(notes)
