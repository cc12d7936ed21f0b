"""`make_mlx_plan`: plan to write a quantized checkpoint as mlx-lm's folder, code for code.

The experts of a layer become one stack, because mlx-lm stacks none that are quantized. mlx
multiplies no tensor scale into NVFP4's linears, so that of the source goes into the block scales, which are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConversionError, ShapeError, UsageError
from minifloat.model.architecture.families import NATIVE, family_of
from minifloat.model.architecture.roles import is_dense_float
from minifloat.model.layouts import Description, StoredWeight, gpt_oss, mlx
from minifloat.model.layouts.decoded import quantized_model_config
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.reading import Bytes, read_global_scale, read_scales, value_table
from minifloat.model.plan.quantization import kept_linears
from minifloat.numerics.formats import E4M3
from minifloat.numerics.scheme import Scheme
from minifloat.quantize.convert.plan import (
    Change,
    Conversion,
    ConvertPlan,
    Rounding,
    describe_quantized,
    require_tensor,
    with_copies,
)

#: Relative change of the largest scale of a weight from which on the weight is lost.
_MOST_CHANGE = 0.5


class FoldTable(NamedTuple):
    """For each code of a block scale, the code nearest to its product with a tensor scale, and the relative change."""

    codes: Bytes
    change: np.ndarray[tuple[int], np.dtype[np.float64]]


@cache
def fold_table(factor: float) -> FoldTable:
    """Return the table of a positive tensor scale that multiplies; ties go to even codes, too much to the largest."""
    largest = E4M3.max_code
    grid = value_table(E4M3)[: largest + 1].astype(np.float64)
    products = grid * factor
    above = np.clip(np.searchsorted(grid, products), 1, largest)
    below = above - 1
    left, right = products - grid[below], grid[above] - products
    nearest = np.where((right < left) | ((right == left) & (above % 2 == 0)), above, below)
    with np.errstate(invalid="ignore", divide="ignore"):
        change = np.nan_to_num(np.abs(grid[nearest] / products - 1), nan=0.0, posinf=1.0)
    codes, changes = np.zeros(256, np.uint8), np.zeros(256)
    codes[: largest + 1], changes[: largest + 1] = nearest, change
    return FoldTable(codes, changes)


def fold_of(checkpoint: Checkpoint, weight: StoredWeight) -> FoldTable:
    """Return the table of a weight's tensor scale; 1 where it has none."""
    scale = read_global_scale(checkpoint, weight)
    factor = 1.0 if scale is None else float(scale)
    return fold_table(1 / factor if weight.global_divides else factor)


def with_older_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that also states what mlx-lm reads under the names from before transformers 5.

    Without ``rope_theta`` mlx-lm takes a default in silence, and answers wrongly.
    """
    older = dict(config)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        older |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        kind = rope.get("rope_type", "default")
        older["rope_scaling"] = None if kind == "default" else {**rope, "type": kind}
    native = NATIVE.get(str(config.get("model_type")))
    for name, before in native.renamed if native is not None else ():
        if name in config:
            older[before] = config[name]
    return older


def require_model_type(checkpoint: Checkpoint) -> None:
    """Refuse a model that mlx-lm may not load as the same one."""
    model_type = str(checkpoint.config.get("model_type"))
    if model_type not in mlx.MODEL_TYPES:
        raise ConversionError(
            f"model_type {model_type!r} was not run in mlx-lm, which may read other names; layout 'mlx' is written for "
            f"{', '.join(mlx.MODEL_TYPES)}"
        )


def make_mlx_plan(checkpoint: Checkpoint, *, allow_rounding: bool = False) -> ConvertPlan:
    """Plan to write the same weights in mlx-lm's layout."""
    description = describe_quantized(checkpoint)
    if description.layout == gpt_oss.NAME:
        raise ConversionError("mlx-lm loads gpt-oss in the layout in which it is published: leave it as it is")
    require_model_type(checkpoint)
    if description.kv is not None or description.auxiliary:
        name = min(description.auxiliary, default="kv_cache_scheme")
        raise ConversionError(f"{name}: layout 'mlx' has no place for it; {mlx.WRITER.cure}")
    builder = _MlxConversions(checkpoint, description)
    conversions = with_copies(checkpoint, builder.conversions())
    builder.refuse_rounding(allow_rounding)
    copied = (conversion.sources[0] for conversion in conversions if conversion.change is Change.KEEP)
    kept = kept_linears(copied, builder.schemes, family_of(checkpoint.config))
    quantization = mlx.WRITER.quantization_config(builder.schemes, kept)
    return ConvertPlan(
        source_layout=str(description.layout),
        layout=mlx.WRITER,
        dtype=None,
        conversions=conversions,
        config=quantized_model_config(with_older_names(checkpoint.config), mlx.WRITER, quantization)
        | {"quantization": quantization},
        rounding=Rounding(builder.rounded, builder.largest),
        notes=builder.notes(),
    )


@dataclass
class _MlxConversions:
    """Makes the conversions of all quantized weights and of all experts."""

    checkpoint: Checkpoint
    description: Description
    schemes: dict[str, Scheme] = field(default_factory=dict)
    rounded: int = 0
    largest: float = 0.0
    _scales: int = 0
    _first: str = ""

    def conversions(self) -> list[Conversion]:
        """Return the conversions of all tensors but those that stay as they are."""
        found: list[Conversion] = []
        stacks: dict[str, dict[int, StoredWeight]] = {}
        for weight in self.description.weights.values():
            place = mlx.stack_of(weight.module)
            if place is None:
                found += self._weights(weight.module, [weight])
            else:
                stacks.setdefault(place[0], {})[place[1]] = weight
        for stack, experts in stacks.items():
            found += self._weights(stack, _complete(stack, experts), len(experts))
        if stacks:
            self._refuse_plain_experts()
        return found

    def refuse_rounding(self, allowed: bool) -> None:
        if self.rounded and not allowed:
            raise ConversionError(
                f"{self._first}: mlx has no tensor scale in nvfp4, and {self.rounded} of {self._scales} block scales "
                f"times that of their tensor are no {E4M3.name}; --allow-rounding rounds them (a relative change of at "
                f"most {self.largest:.1e}), and --scheme mxfp4 for the original has none of them"
            )

    def notes(self) -> tuple[str, ...]:
        if not self.rounded:
            return ()
        return (
            f"{self.rounded} of {self._scales} block scales are rounded, because mlx has no tensor scale in nvfp4; the "
            f"largest relative change is {self.largest:.2e}.",
        )

    def _refuse_plain_experts(self) -> None:
        for name, info in self.checkpoint.tensors.items():
            if mlx.stack_of(name.removesuffix(".weight")) is not None and is_dense_float(info):
                raise ConversionError(
                    f"{name} is {info.dtype}, and other experts are quantized: mlx-lm stacks all experts of a model or "
                    "none; quantize all of them alike"
                )

    def _weights(
        self, module: str, weights: Sequence[StoredWeight], experts: int | None = None
    ) -> Iterator[Conversion]:
        """Yield the conversions of one weight, or of the experts of a stack."""
        first = weights[0]
        scheme = Scheme(format_name(first.spec, first.activation), "", first.spec, first.activation)
        if any((w.spec, w.shape, w.activation) != (first.spec, first.shape, first.activation) for w in weights):
            raise ConversionError(f"{module}: its experts differ in format or shape, and mlx-lm stacks them")
        try:
            mlx.WRITER.check(scheme)
            tensors = mlx.WRITER.weight_tensors(module, first.spec, first.shape, experts)
        except (UsageError, ShapeError) as error:
            raise ConversionError(f"{module}: {error}") from None
        self.schemes[module] = scheme
        codes = tuple(require_tensor(self.checkpoint, weight.codes) for weight in weights)
        scales = tuple(require_tensor(self.checkpoint, weight.scale) for weight in weights)
        yield Conversion(codes, tensors.codes, Change.MOVE, scheme.name)
        if first.spec.has_global_scale:
            for weight in weights:
                self._count_rounded(weight)
            names = dict.fromkeys(weight.global_scale for weight in weights if weight.global_scale is not None)
            scales += tuple(self.checkpoint.tensors[name] for name in names)
            yield Conversion(scales, tensors.scale, Change.FOLD, "scale", (tuple(weights),))
        else:
            yield Conversion(scales, tensors.scale, Change.MOVE, "scale")
        for name in dict.fromkeys(weight.input_scale for weight in weights if weight.input_scale is not None):
            yield Conversion((self.checkpoint.tensors[name],), None, Change.DROP, "no static inputs are declared")

    def _count_rounded(self, weight: StoredWeight) -> None:
        table = fold_of(self.checkpoint, weight)
        scales = read_scales(self.checkpoint, weight, 0, weight.shape[0])
        self._scales += scales.size
        counts = np.bincount(scales.reshape(-1), minlength=len(table.change))
        if table.change[scales.max(initial=0)] > _MOST_CHANGE:
            raise ConversionError(
                f"{weight.scale}: mlx has no tensor scale in nvfp4, and without it the largest scale of this weight is "
                f"outside of {E4M3.name}; quantize the original with --scheme mxfp4"
            )
        lost = int(counts[table.change > 0].sum())
        if lost:
            self._first = self._first or weight.scale
            self.rounded += lost
            self.largest = max(self.largest, float(table.change[counts > 0].max()))


def _complete(stack: str, experts: dict[int, StoredWeight]) -> list[StoredWeight]:
    """Return the weights of a stack in the order of the experts, none of which may be missing."""
    missing = next((index for index in range(len(experts)) if index not in experts), None)
    if missing is not None:
        raise ConversionError(f"{stack}: mlx-lm stacks all experts of a layer, and expert {missing} is missing")
    return [experts[index] for index in range(len(experts))]
