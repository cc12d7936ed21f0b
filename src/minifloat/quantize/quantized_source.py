"""A source that is quantized already (`--from-quantized`): its plan, and what the report says of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.errors import UsageError
from minifloat.model.architecture.families import family_of
from minifloat.model.layouts.decoded import DecodedCheckpoint, plain_dtype
from minifloat.model.layouts.inspection import format_name
from minifloat.model.plan.tensor_plan import QuantizationPlan, module_name
from minifloat.model.runtime.engine_names import stored_fused_as
from minifloat.quantize.report import COPIED_CODES, TensorReport


def with_dequantized_copies(plan: QuantizationPlan, source: Checkpoint) -> QuantizationPlan:
    """Return the plan with the quantized weights that it copies dequantized to the dtype of config.json."""
    if not isinstance(source, DecodedCheckpoint):
        return plan
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
    source: Checkpoint, pool: ThreadPoolExecutor, digest: Callable[[Checkpoint, TensorInfo], str]
) -> tuple[TensorReport, ...]:
    """Return the report of tensors that have no place in the output: scales of inputs and of the KV cache."""
    if not isinstance(source, DecodedCheckpoint):
        return ()
    futures = [(info, pool.submit(digest, source.stored, info)) for info in source.dropped]
    return tuple(
        TensorReport(
            info.name, "dropped", "belongs to the source's quantization", info.shape, info.nbytes, 0, future.result()
        )
        for info, future in futures
    )


def describe_source(source: Checkpoint, tensors: tuple[TensorReport, ...]) -> dict[str, Any] | None:
    """Return the facts about a quantized source for the report, as JSON values; None for a plain source."""
    if not isinstance(source, DecodedCheckpoint):
        return None
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
