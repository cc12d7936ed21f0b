"""`make_layout_plan`: plan to write a quantized checkpoint in another layout, code for code.

The only bytes that are read are the float32 global scales of NVFP4: one layout stores the reciprocal of the other's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.errors import ConversionError, NonFiniteError, ShapeError, UsageError, lookup
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.roles import expert_group
from minifloat.model.layouts import TARGETS, Description, StoredWeight, WriteLayout, gpt_oss, mlx, modelopt
from minifloat.model.layouts.contradictions import refuse_kv
from minifloat.model.layouts.decoded import quantized_model_config
from minifloat.model.layouts.inspection import format_name
from minifloat.model.layouts.reading import widen
from minifloat.model.layouts.stored import SCALE_FORMATS, kv_scale_of
from minifloat.model.plan.quantization import kept_linears
from minifloat.model.runtime.engine_names import engine_names
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.scheme import Scheme, WeightSpec
from minifloat.quantize.convert.mlx_plan import make_mlx_plan
from minifloat.quantize.convert.plan import (
    Change,
    Conversion,
    ConvertPlan,
    Rounding,
    describe_quantized,
    require_tensor,
    with_copies,
)


class Reciprocal(NamedTuple):
    """The float32 nearest to a reciprocal, and its error."""

    value: np.float32
    change: float


def reciprocal(checkpoint: Checkpoint, info: TensorInfo) -> Reciprocal:
    """Return the reciprocal of a stored scalar."""
    value = widen(checkpoint.read(info.name), info.dtype)[0]
    if not np.isfinite(value):
        raise NonFiniteError(info.name, f"the scale is {value}")
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1.0) / value
    if not np.isfinite(inverse) or abs(inverse) < np.finfo(np.float32).tiny:
        raise ConversionError(f"{info.name}: the scale {value} has no reciprocal in float32")
    return Reciprocal(
        inverse, abs(float(value) * float(inverse) - 1.0)
    )  # the product of two float32 is exact in float64


_ONE = 1


def make_layout_plan(checkpoint: Checkpoint, name: str, *, allow_rounding: bool = False) -> ConvertPlan:
    """Plan to write the same weights in another layout."""
    if name == gpt_oss.NAME:
        raise ConversionError(
            "minifloat does not convert to gpt-oss' layout: it holds only the fused experts of gpt-oss, which are "
            "published in it, and vLLM runs any other model in this layout unquantized; use compressed-tensors, or "
            "minifloat quantize for gpt-oss in BF16"
        )
    layout = lookup("layout", name, TARGETS)
    if layout.name == mlx.NAME:
        return make_mlx_plan(checkpoint, allow_rounding=allow_rounding)
    description = describe_quantized(checkpoint)
    if description.layout == gpt_oss.NAME:
        raise ConversionError(
            "gpt-oss' fused experts stay as they are: no engine reads them from another layout (vLLM 0.32 has no place "
            "for their biases in compressed-tensors' MXFP4 experts); use --dequantize"
        )
    refuse_kv(description)
    builder = _LayoutConversions(checkpoint, description, layout, allow_rounding)
    conversions = with_copies(checkpoint, builder.conversions())
    copied = (conversion.sources[0] for conversion in conversions if conversion.change is Change.KEEP)
    unquantized = kept_linears(copied, builder.schemes, family_of(checkpoint.config))
    linears = [module for module in builder.schemes if expert_group(module) is None]
    names = engine_names(checkpoint, (*unquantized, *linears))
    listed = unquantized if layout.name == modelopt.NAME else (*unquantized, *names.unlisted)
    try:
        quantization = layout.quantization_config(builder.schemes, listed, description.kv, names.others)
        files = layout.extra_files(builder.schemes, unquantized, description.kv)
    except UsageError as error:
        raise ConversionError(str(error)) from None
    return ConvertPlan(
        source_layout=str(description.layout),
        layout=layout,
        dtype=None,
        conversions=conversions,
        config=quantized_model_config(checkpoint.config, layout, quantization),
        files=files,
        rounding=builder.rounding,
        notes=(*builder.notes(), *names.notes),
    )


@dataclass
class _LayoutConversions:
    """Makes the conversions of all quantized weights, their scales and the scales of the KV cache."""

    checkpoint: Checkpoint
    description: Description
    layout: WriteLayout
    allow_rounding: bool
    schemes: dict[str, Scheme] = field(default_factory=dict)
    rounded: list[float] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def conversions(self) -> list[Conversion]:
        """Return the conversions of all tensors but those that are not quantized."""
        conversions = []
        for weight in self.description.weights.values():
            conversions += self._weight(weight)
        converted = {info.name for conversion in conversions for info in conversion.sources}
        conversions += [self._auxiliary(name) for name in sorted(self.description.auxiliary - converted)]
        return conversions

    @property
    def rounding(self) -> Rounding:
        """Number and largest change of the rounded reciprocals."""
        return Rounding(len(self.rounded), max(self.rounded, default=0.0))

    def notes(self) -> tuple[str, ...]:
        """Return sentences for the user about rounded and dropped scales."""
        notes = []
        if self.rounded:
            notes.append(
                f"{len(self.rounded)} scales are the rounded reciprocals of those of the source; the largest relative "
                f"change is {max(self.rounded):.2e}."
            )
        if self.unused:
            notes.append(
                f"{len(self.unused)} scales of inputs were dropped: the source does not quantize these inputs with a "
                "static scale."
            )
        return tuple(notes)

    def _weight(self, weight: StoredWeight) -> list[Conversion]:
        spec = _target_spec(weight.spec)
        scheme = Scheme(format_name(spec, weight.activation), "", spec, weight.activation)
        try:
            self.layout.check(scheme)
            tensors = self.layout.weight_tensors(weight.module, spec, weight.shape)
        except (UsageError, ShapeError) as error:
            raise _refused(weight.module, error) from None
        self.schemes[weight.module] = scheme
        scale = require_tensor(self.checkpoint, weight.scale)
        widened = tensors.scale.dtype == "F32" and scale.dtype != "F32"
        conversions = [
            Conversion((require_tensor(self.checkpoint, weight.codes),), tensors.codes, Change.MOVE, scheme.name),
            Conversion((scale,), tensors.scale, Change.WIDEN if widened else Change.MOVE, "scale"),
        ]
        if tensors.global_scale is not None:
            if weight.global_scale is None:
                raise ConversionError(f"{weight.module}: an NVFP4 weight without a global scale above its block scales")
            inverted = weight.global_divides != self.layout.global_divides
            conversions.append(self._scalar(weight.global_scale, tensors.global_scale, inverted=inverted))
        return conversions + self._input_scale(weight)

    def _input_scale(self, weight: StoredWeight) -> list[Conversion]:
        """Convert the static scale of a linear's input."""
        nested = weight.spec.has_global_scale
        name = weight.input_scale
        divisor = f"{weight.module}.input_global_scale"
        if nested and divisor in self.description.auxiliary:
            name = divisor
        static = weight.activation is not None and weight.activation.needs_calibration
        if not static:
            if name is None:
                return []
            self.unused.append(name)
            return [Conversion((self.checkpoint.tensors[name],), None, Change.DROP, "no static inputs are declared")]
        if name is None:
            raise ConversionError(
                f"{weight.module}: its inputs are declared to be quantized with a static scale, which is missing"
            )
        try:
            output = self.layout.input_scale(weight.module, weight.spec)
        except UsageError as error:
            raise _refused(weight.module, error) from None
        return [self._scalar(name, output, inverted=nested and weight.global_divides != self.layout.global_divides)]

    def _auxiliary(self, name: str) -> Conversion:
        """Convert a scale of the KV cache to its name in the target."""
        owner = kv_scale_of(name)
        if owner is None:
            raise ConversionError(f"{name}: layout {self.layout.name!r} has no place for it")
        try:
            keys, values = self.layout.kv_scales(owner[0])
        except UsageError as error:
            raise _refused(name, error) from None
        return self._scalar(name, keys if owner[1] == "k" else values, inverted=False)

    def _scalar(self, name: str, output: OutputTensor, *, inverted: bool) -> Conversion:
        """Convert a scale of one float32; layouts give it different shapes."""
        info = require_tensor(self.checkpoint, name)
        if SCALE_FORMATS.get(info.dtype) is not FLOAT32 or any(extent != _ONE for extent in info.shape):
            raise ConversionError(f"{name}: expected one float, found {info.dtype} {list(info.shape)}")
        if not inverted:
            return Conversion((info,), output, Change.MOVE if info.dtype == "F32" else Change.WIDEN, "scale")
        change = reciprocal(self.checkpoint, info).change
        if change:
            if not self.allow_rounding:
                raise ConversionError(
                    f"{name}: layout {self.layout.name!r} stores the reciprocal of this scale, which is no float32; "
                    f"--allow-rounding rounds it (a relative change of {change:.1e})"
                )
            self.rounded.append(change)
        return Conversion((info,), output, Change.INVERT, "scale")


def _target_spec(spec: WeightSpec) -> WeightSpec:
    """Return the spec in the target: E8M0 scales of 128x128 blocks become the same numbers in float32."""
    in_groups = spec.granularity.rows == _ONE
    return replace(spec, scale=FLOAT32) if spec.scale is E8M0 and spec.element is E4M3 and not in_groups else spec


def _refused(name: str, error: Exception) -> ConversionError:
    """Return an error with the message of another, and the name of the tensor or module if it lacks that."""
    message = str(error)
    return ConversionError(message if name in message else f"{name}: {message}")
