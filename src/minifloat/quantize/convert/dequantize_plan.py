"""`make_dequantize_plan`: plan to write the decoded weights of a quantized checkpoint.

A weight becomes ``<module>.weight``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from minifloat.checkpoint import Checkpoint, OutputTensor
from minifloat.errors import ConversionError, lookup
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, SingleExpert
from minifloat.model.layouts import Description, StoredWeight
from minifloat.model.layouts.decoded import DTYPES, config_dtype, language_configs, without_quantization
from minifloat.model.layouts.inspection import format_name
from minifloat.model.runtime.engine_names import stored_fused_as
from minifloat.quantize.convert.plan import (
    Change,
    Conversion,
    ConvertPlan,
    describe_quantized,
    require_tensor,
    with_copies,
)

#: Experts of a fused tensor by index, and their linears by position among those that the tensor holds.
_Experts = dict[int, dict[int, StoredWeight]]


@dataclass(frozen=True)
class DecodedTensor:
    """A tensor of the unquantized model."""

    name: str
    shape: tuple[int, ...]
    matrices: tuple[tuple[StoredWeight, ...], ...]
    transposed: bool = False  # whether each matrix is stored ``[K, N]``


def decoded_tensors(checkpoint: Checkpoint, description: Description) -> Iterator[DecodedTensor]:
    """Yield the tensors of the unquantized model."""
    family = family_of(checkpoint.config)
    fused: dict[str, list[StoredWeight]] = {}
    single: dict[tuple[str, str], _Experts] = {}
    places: dict[tuple[str, str], SingleExpert] = {}
    for weight in description.weights.values():
        if weight.expert is not None:
            fused.setdefault(weight.codes, []).append(weight)
            continue
        place = family.single_expert(weight.module)
        if place is None or family.stored_fused is False:
            yield DecodedTensor(f"{weight.module}.weight", weight.shape, ((weight,),))
            continue
        key = (place.parent, place.fused.name)
        places[key] = place
        single.setdefault(key, {}).setdefault(place.expert, {})[place.position] = weight
    for weights in fused.values():
        rows, cols = weights[0].shape
        name = weights[0].module.rpartition(".")[0]
        yield DecodedTensor(name, (len(weights), cols, rows), tuple((weight,) for weight in weights), transposed=True)
    transposed = stored_fused_as(checkpoint, family, places.values())
    square = _with_square(places, single)
    for key, experts in single.items():
        if transposed is None:
            for weight in (weight for parts in experts.values() for weight in parts.values()):
                yield DecodedTensor(f"{weight.module}.weight", weight.shape, ((weight,),))
        else:
            upright = places[key].fused.both_exist and key[0] in square
            yield _fused(places[key], experts, family, transposed and not upright)


def _with_square(
    places: Mapping[tuple[str, str], SingleExpert], single: Mapping[tuple[str, str], _Experts]
) -> frozenset[str]:
    """Return the parents of tensors of fused experts one of whose matrices is square."""
    parents = set()
    for key, experts in single.items():
        first = next(iter(next(iter(experts.values())).values()))
        if first.shape[0] * len(places[key].fused.linears) == first.shape[1]:
            parents.add(key[0])
    return frozenset(parents)


def _fused(
    place: SingleExpert, experts: Mapping[int, Mapping[int, StoredWeight]], family: Family, transposed: bool
) -> DecodedTensor:
    name = f"{place.parent}{place.fused.name}"
    positions = range(len(place.fused.linears))
    first = experts[min(experts)][min(experts[min(experts)])]
    rows, cols = first.shape
    for expert in range(max(experts) + 1):
        for position in positions:
            module = place.parent + place.fused.linears[position].format(expert)
            weight = experts.get(expert, {}).get(position)
            if weight is None:
                raise ConversionError(
                    f"{module} is not quantized, and other experts of {place.parent.rstrip('.')} are: {family.name} "
                    f"stores them in one tensor, {name}, which cannot be made of both; quantize all experts alike"
                )
            if weight.shape != first.shape:
                raise ConversionError(
                    f"{module} is {list(weight.shape)}, and {first.module} {list(first.shape)}: {name} cannot hold both"
                )
    matrices = tuple(tuple(experts[expert][position] for position in positions) for expert in range(len(experts)))
    height = rows * len(positions)
    shape = (len(experts), cols, height) if transposed else (len(experts), height, cols)
    return DecodedTensor(name, shape, matrices, transposed)


def make_dequantize_plan(checkpoint: Checkpoint, dtype: str | None = None) -> ConvertPlan:
    """Plan to write decoded weights."""
    description = describe_quantized(checkpoint)
    config = without_quantization(checkpoint.config)
    dtype_name = dtype or config_dtype(config)
    stored_dtype = lookup("dtype", dtype_name, DTYPES)
    if dtype is not None:
        _set_dtype(config, dtype)
    conversions = []
    for group in decoded_tensors(checkpoint, description):
        weights = [weight for matrix in group.matrices for weight in matrix]
        names = (name for weight in weights for name in weight.tensors if name != weight.input_scale)
        infos = tuple(require_tensor(checkpoint, name) for name in dict.fromkeys(names))
        output = OutputTensor(group.name, stored_dtype, group.shape)
        detail = f"from {format_name(weights[0].spec, weights[0].activation)}"
        conversions.append(Conversion(infos, output, Change.DECODE, detail, group.matrices, group.transposed))
        for scale in dict.fromkeys(weight.input_scale for weight in weights if weight.input_scale):
            info = checkpoint.tensors[scale]
            conversions.append(Conversion((info,), None, Change.DROP, "inputs are no longer quantized"))
    for name in description.auxiliary:
        conversions.append(Conversion((checkpoint.tensors[name],), None, Change.DROP, "belongs to the quantization"))
    return ConvertPlan(str(description.layout), None, dtype_name, with_copies(checkpoint, conversions), config)


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for part in language_configs(config):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
