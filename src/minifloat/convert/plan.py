"""The plan of a conversion: what becomes of every tensor, or why it cannot be without loss.

Made from headers and config; the only bytes that are read are the float32 scales above the block scales of NVFP4, of
which one layout stores the reciprocal of the other. Everything that stands in the way is an error here, before anything
is written.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.convert.refusal import refuse_kv, refuse_what_is_not_carried
from minifloat.convert.report import Rounding
from minifloat.convert.values import reciprocal
from minifloat.errors import ConversionError, ShapeError, UsageError, lookup
from minifloat.layouts import TARGETS, Description, StoredWeight, WriteLayout, describe, gpt_oss
from minifloat.layouts.inspection import format_name
from minifloat.layouts.stored import SCALE_FORMATS, kv_scale_of
from minifloat.numerics.formats import E4M3, E8M0, FLOAT32
from minifloat.numerics.scheme import Scheme, WeightSpec
from minifloat.plan.quantization import kept_linears

#: Name of gpt-oss' layout where a target is named.
GPT_OSS = "gpt-oss"

#: `--dtype` -> the safetensors dtype.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

_ONE = 1


class Change(enum.Enum):
    """What is done to the bytes of a tensor; the value is how reports say it."""

    KEEP = "not quantized"  #: same name, same bytes
    MOVE = "bytes as they are"  #: under the name and the shape of the target
    WIDEN = "widened to float32"
    INVERT = "reciprocal"
    DECODE = "dequantized"
    DROP = "dropped"


@dataclass(frozen=True)
class Step:
    """Source tensors, and the one tensor that they become.

    Attributes:
        sources: What is read; the first decides the shard of the output.
        output: What is written; None: nothing.
        change: How.
        detail: For the report.
        weights: For DECODE: the weights; several where experts are fused, whose matrices are then stored transposed.
    """

    sources: tuple[TensorInfo, ...]
    output: OutputTensor | None
    change: Change
    detail: str
    weights: tuple[StoredWeight, ...] = ()


@dataclass(frozen=True)
class ConvertPlan:
    """The whole checkpoint's plan.

    Attributes:
        source_layout: As `describe` names it.
        layout: What is written; None: dequantized weights.
        dtype: Name of the dtype of dequantized weights, a key of `DTYPES`; None where a layout is written.
        steps: In the order of the source's tensors.
        config: The new config.json.
        files: JSON files beside it, by name.
        rounding: Scales that are not carried over exactly.
        notes: What a user should know, in sentences.
    """

    source_layout: str
    layout: WriteLayout | None
    dtype: str | None
    steps: tuple[Step, ...]
    config: dict[str, Any]
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounding: Rounding = field(default_factory=Rounding)
    notes: tuple[str, ...] = ()

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors, headers not counted."""
        return sum(step.output.nbytes for step in self.steps if step.output is not None)

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors."""
        return sum(info.nbytes for step in self.steps for info in step.sources)

    def by_shard(self) -> Iterator[tuple[str, list[Step]]]:
        """The steps of each source shard, in order; the output has the same shards."""
        shards: dict[str, list[Step]] = {}
        for step in self.steps:
            shards.setdefault(step.sources[0].shard, []).append(step)
        yield from shards.items()


def make_layout_plan(checkpoint: Checkpoint, name: str, *, allow_rounding: bool = False) -> ConvertPlan:
    """Plan the same weights in another layout.

    Args:
        checkpoint: A quantized checkpoint.
        name: A key of `TARGETS`; gpt-oss' layout is known and refused.
        allow_rounding: Round a scale whose reciprocal is no float32, instead of refusing.

    Raises:
        UsageError: The checkpoint is not quantized.
        UnknownNameError: No such layout.
        ConversionError: Something cannot be carried over exactly; the message says what, why, and the cure.
    """
    if name == GPT_OSS:
        raise ConversionError(
            "nothing is converted to gpt-oss' layout: it holds the fused experts of gpt-oss alone, which are published "
            "in it, and vLLM runs any other model that is stored so unquantized; use compressed-tensors"
        )
    layout = lookup("layout", name, TARGETS)
    description = _described(checkpoint)
    if description.layout == gpt_oss.NAME:
        raise ConversionError(
            "gpt-oss' fused experts stay as they are: no engine reads them from another layout (vLLM 0.32 has no place "
            "for their biases in compressed-tensors' MXFP4 experts); use --dequantize"
        )
    refuse_kv(description)
    builder = _LayoutSteps(checkpoint, description, layout, allow_rounding)
    steps = _all_steps(checkpoint, builder.steps())
    plain = (step.sources[0] for step in steps if step.change is Change.KEEP)
    kept = kept_linears(plain, builder.schemes)
    try:
        quantization = layout.quantization_config(builder.schemes, kept, description.kv)
        files = layout.extra_files(builder.schemes, kept, description.kv)
    except UsageError as error:
        raise ConversionError(str(error)) from None
    config = _without_quantization(checkpoint.config) | {"quantization_config": quantization}
    notes = builder.notes()
    return ConvertPlan(str(description.layout), layout, None, steps, config, files, builder.rounding, notes)


def make_dequantize_plan(checkpoint: Checkpoint, dtype: str | None = None) -> ConvertPlan:
    """Plan plain weights.

    Args:
        checkpoint: A quantized checkpoint.
        dtype: A key of `DTYPES`; by default that of config.json, or bfloat16.

    Raises:
        UsageError: The checkpoint is not quantized.
        UnknownNameError: No such dtype.
        ConversionError: There is more to the quantization than codes and scales.
    """
    description = _described(checkpoint)
    config = _without_quantization(checkpoint.config)
    chosen = dtype or _config_dtype(config)
    stored = lookup("dtype", chosen, DTYPES)
    if dtype is not None:
        _set_dtype(config, dtype)
    steps = []
    by_codes: dict[str, list[StoredWeight]] = {}
    for weight in description.weights.values():
        by_codes.setdefault(weight.codes, []).append(weight)
    for weights in by_codes.values():
        first = weights[0]
        rows, cols = first.shape
        output = OutputTensor(f"{first.module}.weight", stored, first.shape)
        if first.expert is not None:
            output = OutputTensor(first.module.rpartition(".")[0], stored, (len(weights), cols, rows))
        names = (name for name in (first.codes, first.scale, first.global_scale) if name is not None)
        infos = tuple(_present(checkpoint, name) for name in names)
        detail = format_name(first.spec, first.activation)
        steps.append(Step(infos, output, Change.DECODE, f"from {detail}", tuple(weights)))
        if first.input_scale is not None:
            info = checkpoint.tensors[first.input_scale]
            steps.append(Step((info,), None, Change.DROP, "inputs are not quantized any more"))
    for name in description.auxiliary:
        steps.append(Step((checkpoint.tensors[name],), None, Change.DROP, "belongs to the quantization"))
    return ConvertPlan(str(description.layout), None, chosen, _all_steps(checkpoint, steps), config)


def _described(checkpoint: Checkpoint) -> Description:
    description = describe(checkpoint)
    if description.layout is None:
        raise UsageError(
            f"{checkpoint.path} is not quantized; `minifloat quantize` does that, in any layout it can hold"
        )
    refuse_what_is_not_carried(checkpoint, description)
    return description


def _all_steps(checkpoint: Checkpoint, steps: Iterable[Step]) -> tuple[Step, ...]:
    """`steps`, and a copy of every tensor that is in none of them; in the order of the source."""
    by_first = {step.sources[0].name: step for step in steps}
    used = {info.name for step in by_first.values() for info in step.sources}
    ordered = []
    for name, info in checkpoint.tensors.items():
        if name in by_first:
            ordered.append(by_first[name])
        elif name not in used:
            ordered.append(Step((info,), OutputTensor(name, info.dtype, info.shape), Change.KEEP, Change.KEEP.value))
    return tuple(ordered)


def _present(checkpoint: Checkpoint, name: str) -> TensorInfo:
    try:
        return checkpoint.tensors[name]
    except KeyError:
        raise ConversionError(f"{name} is missing: the weight cannot be decoded without it") from None


# ------------------------------------------------------------------------------------------------- into a layout


@dataclass
class _LayoutSteps:
    """Makes the steps of all quantized weights and of what belongs to them.

    Attributes:
        schemes: How the target declares each module; filled by `steps`.
        rounded: Relative change of each reciprocal that was rounded.
        unused: Scales of inputs that the source does not quantize with them.
    """

    checkpoint: Checkpoint
    description: Description
    layout: WriteLayout
    allow_rounding: bool
    schemes: dict[str, Scheme] = field(default_factory=dict)
    rounded: list[float] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)

    def steps(self) -> list[Step]:
        """All but the tensors that are not quantized."""
        found = []
        for weight in self.description.weights.values():
            found += self._weight(weight)
        used = {info.name for step in found for info in step.sources}
        found += [self._auxiliary(name) for name in sorted(self.description.auxiliary - used)]
        return found

    @property
    def rounding(self) -> Rounding:
        """What was rounded."""
        return Rounding(len(self.rounded), max(self.rounded, default=0.0))

    def notes(self) -> tuple[str, ...]:
        """What a user should know."""
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

    def _weight(self, weight: StoredWeight) -> list[Step]:
        spec = _target_spec(weight.spec)
        scheme = Scheme(format_name(spec, weight.activation), "", spec, weight.activation)
        try:
            self.layout.check(scheme)
            tensors = self.layout.weight_tensors(weight.module, spec, weight.shape)
        except (UsageError, ShapeError) as error:
            raise _refused(weight.module, error) from None
        self.schemes[weight.module] = scheme
        scale = _present(self.checkpoint, weight.scale)
        widened = tensors.scale.dtype == "F32" and scale.dtype != "F32"
        steps = [
            Step((_present(self.checkpoint, weight.codes),), tensors.codes, Change.MOVE, scheme.name),
            Step((scale,), tensors.scale, Change.WIDEN if widened else Change.MOVE, "scale"),
        ]
        if tensors.global_scale is not None:
            if weight.global_scale is None:
                raise ConversionError(f"{weight.module}: an NVFP4 weight without a scale above its block scales")
            inverted = weight.global_divides != self.layout.global_divides
            steps.append(self._scalar(weight.global_scale, tensors.global_scale, inverted=inverted))
        return steps + self._input_scale(weight)

    def _input_scale(self, weight: StoredWeight) -> list[Step]:
        """The static scale of a linear's input; of NVFP4, compressed-tensors stores the reciprocal of ModelOpt's."""
        nested = weight.spec.has_global_scale
        name = weight.input_scale
        divisor = f"{weight.module}.input_global_scale"
        if nested and divisor in self.description.auxiliary:
            name = divisor
        static = weight.activation is not None and (nested or not weight.activation.dynamic)
        if not static:
            if name is None:
                return []
            self.unused.append(name)
            return [Step((self.checkpoint.tensors[name],), None, Change.DROP, "no static inputs are declared")]
        if name is None:
            raise ConversionError(
                f"{weight.module}: its inputs are declared to be quantized with a static scale, and there is none"
            )
        try:
            output = self.layout.input_scale(weight.module, weight.spec)
        except UsageError as error:
            raise _refused(weight.module, error) from None
        return [self._scalar(name, output, inverted=nested and weight.global_divides != self.layout.global_divides)]

    def _auxiliary(self, name: str) -> Step:
        """A scale of the KV cache under its name in the target."""
        place = kv_scale_of(name)
        if place is None:
            raise ConversionError(f"{name}: layout {self.layout.name!r} has no place for it")
        try:
            keys, values = self.layout.kv_scales(place[0])
        except UsageError as error:
            raise _refused(name, error) from None
        return self._scalar(name, keys if place[1] == "k" else values, inverted=False)

    def _scalar(self, name: str, output: OutputTensor, *, inverted: bool) -> Step:
        """One float32, whatever the shape that a layout gives it."""
        info = _present(self.checkpoint, name)
        if SCALE_FORMATS.get(info.dtype) is not FLOAT32 or any(extent != _ONE for extent in info.shape):
            raise ConversionError(f"{name}: expected one float, found {info.dtype} {list(info.shape)}")
        if not inverted:
            return Step((info,), output, Change.MOVE if info.dtype == "F32" else Change.WIDEN, "scale")
        change = reciprocal(self.checkpoint, info).change
        if change:
            if not self.allow_rounding:
                raise ConversionError(
                    f"{name}: layout {self.layout.name!r} stores the reciprocal of this scale, which is no float32; "
                    f"--allow-rounding rounds it (a relative change of {change:.1e})"
                )
            self.rounded.append(change)
        return Step((info,), output, Change.INVERT, "scale")


def _target_spec(spec: WeightSpec) -> WeightSpec:
    """The spec in the target: powers of two over 128x128 blocks become the same numbers in float32."""
    in_groups = spec.granularity.rows == _ONE
    return replace(spec, scale=FLOAT32) if spec.scale is E8M0 and spec.element is E4M3 and not in_groups else spec


def _refused(name: str, error: Exception) -> ConversionError:
    message = str(error)
    return ConversionError(message if name in message else f"{name}: {message}")


# ------------------------------------------------------------------------------------------------- config.json


def _without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the plain model."""
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    nested = plain.get("text_config")
    if isinstance(nested, dict):
        plain["text_config"] = _without_quantization(nested)
    return plain


def _each_part(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]


def _config_dtype(config: dict[str, Any]) -> str:
    named = (part.get("dtype") or part.get("torch_dtype") for part in _each_part(config))
    return next((str(name).removeprefix("torch.") for name in named if name), "bfloat16")


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    for part in _each_part(config):
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
