"""The plan: what becomes of every tensor of a checkpoint, decided from headers and config before a byte is read.

Everything that a user can get wrong (a pattern that matches nothing, a size that does not fit, layers that a server
fuses under different schemes) is an error here, in milliseconds. The plan also fixes every name, shape and offset of
the output, so that workers may write in any order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from minifloat.architecture.groups import expert_group, fused_group
from minifloat.architecture.roles import CONV1D_MODEL_TYPES, Role, is_dense_float, is_matrix, role_of, text_config
from minifloat.checkpoint import OutputTensor, TensorInfo
from minifloat.errors import (
    AlreadyQuantizedError,
    PatternError,
    ShapeError,
    UnsupportedTensorError,
    UsageError,
)
from minifloat.layouts import WeightTensors, WriteLayout
from minifloat.numerics.scheme import KVSpec, Scheme, get_scheme

#: A key projection by its name; the KV scales of an attention module are written with it.
_KEY_PROJECTION = ".k_proj"

#: The word that stands for "leave it as it is" where a scheme is expected.
KEEP = "bf16"


class Source(Protocol):
    """What a plan is made from: a `Checkpoint`, or anything else that knows a model's config and headers."""

    @property
    def path(self) -> Path:
        """The folder, for messages."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json."""

    @property
    def quantization_config(self) -> Mapping[str, Any] | None:
        """How the weights are quantized already; None for a plain model."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By name."""


@dataclass(frozen=True)
class Override:
    """A pattern and what the modules that it matches become.

    Attributes:
        pattern: Regular expression, searched in module names (``model.layers.0.mlp.down_proj``).
        scheme: The scheme, or None to keep the module in the model's precision.
    """

    pattern: str
    scheme: Scheme | None

    @classmethod
    def parse(cls, text: str) -> Override:
        """Read ``REGEX=SCHEME`` or ``REGEX=bf16``, as the command line writes it.

        Raises:
            PatternError: No ``=``, or the regular expression does not compile.
            UnknownNameError: The scheme is in no table.
        """
        pattern, separator, name = text.rpartition("=")
        if not separator or not pattern:
            raise PatternError(f"an override is REGEX=SCHEME or REGEX={KEEP}, got {text!r}")
        try:
            re.compile(pattern)
        except re.error as error:
            raise PatternError(f"{pattern!r} is not a regular expression: {error}") from error
        return cls(pattern, None if name == KEEP else get_scheme(name))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"{self.pattern}={KEEP if self.scheme is None else self.scheme.name}"


@dataclass(frozen=True)
class Part:
    """One weight ``[N, K]`` that a source tensor becomes.

    Attributes:
        module: Name of the linear in the output.
        scheme: What it is quantized to.
        shape: ``(N, K)``.
        tensors: Names, dtypes and shapes in the output.
        group: Modules with the same group share one scale where the scheme has one per tensor.
        matrix: Index of the matrix in the source, for fused experts; 0 otherwise.
        first_row: First row of this weight in that matrix (after transposing).
        transposed: Whether the source stores the matrix as ``[K, rows]``.
    """

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    tensors: WeightTensors
    group: str
    matrix: int = 0
    first_row: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Constant:
    """A float32 scale from calibration that is written beside a weight.

    Attributes:
        tensor: Name and shape in the output, one element.
        value: The scale.
    """

    tensor: OutputTensor
    value: float


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one source tensor: its parts, or a copy where there are none.

    Attributes:
        source: The tensor.
        role: What it is for.
        parts: The quantized weights it becomes; empty for a copy.
        reason: Why it is copied.
        constants: Scales of inputs and of the KV cache that are written with it.
    """

    source: TensorInfo
    role: Role
    parts: tuple[Part, ...] = ()
    reason: str = ""
    constants: tuple[Constant, ...] = ()

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        """The tensors that are written."""
        constants = tuple(constant.tensor for constant in self.constants)
        if not self.parts:
            return (OutputTensor(self.source.name, self.source.dtype, self.source.shape), *constants)
        return (*(tensor for part in self.parts for tensor in part.tensors.all), *constants)


@dataclass(frozen=True)
class Plan:
    """The whole checkpoint's plan.

    Attributes:
        scheme: The scheme that applies where no override does.
        layout: How the output is written.
        overrides: As given; the last that matches a module wins.
        tensors: One entry per source tensor, in the source's order.
        kept: Linears that stay in the model's precision, for the server's list of exceptions.
        kv: How the KV cache is quantized, if it is.
    """

    scheme: Scheme
    layout: WriteLayout
    overrides: tuple[Override, ...]
    tensors: tuple[TensorPlan, ...]
    kept: tuple[str, ...] = ()
    kv: KVSpec | None = None

    @property
    def modules(self) -> dict[str, Scheme]:
        """Every quantized module and its scheme."""
        return {part.module: part.scheme for tensor in self.tensors for part in tensor.parts}

    @property
    def static_modules(self) -> tuple[str, ...]:
        """The modules whose scheme wants a static scale of their input."""
        return tuple(
            module
            for module, scheme in self.modules.items()
            if scheme.activation is not None and not scheme.activation.dynamic
        )

    @property
    def attention_modules(self) -> tuple[str, ...]:
        """The modules that project keys, without the name of the projection."""
        names = (_module(tensor.source) for tensor in self.tensors if tensor.role is Role.LINEAR)
        return tuple(name.removesuffix(_KEY_PROJECTION) for name in names if name.endswith(_KEY_PROJECTION))

    def with_scales(
        self, inputs: Mapping[str, float], kv: KVSpec | None, kv_scales: Mapping[str, tuple[float, float]]
    ) -> Plan:
        """The same plan with scales from calibration written beside the weights.

        Args:
            inputs: Scale of the input of each of `static_modules`.
            kv: How the KV cache is quantized, or None.
            kv_scales: Scales of keys and values of each of `attention_modules`; empty without `kv`.

        Raises:
            UsageError: The layout cannot hold them.
        """

        def constants(tensor: TensorPlan) -> tuple[Constant, ...]:
            found = [
                Constant(self.layout.input_scale(part.module, part.scheme.weight), inputs[part.module])
                for part in tensor.parts
                if part.module in inputs
            ]
            attention = _module(tensor.source).removesuffix(_KEY_PROJECTION)
            if attention != _module(tensor.source) and attention in kv_scales:
                pairs = zip(self.layout.kv_scales(attention), kv_scales[attention], strict=True)
                found += [Constant(output, value) for output, value in pairs]
            return tuple(found)

        tensors = tuple(replace(tensor, constants=constants(tensor)) for tensor in self.tensors)
        return replace(self, tensors=tensors, kv=kv)

    @property
    def source_bytes(self) -> int:
        """Bytes of all source tensors."""
        return sum(tensor.source.nbytes for tensor in self.tensors)

    @property
    def output_bytes(self) -> int:
        """Bytes of all output tensors, headers not counted."""
        return sum(output.nbytes for tensor in self.tensors for output in tensor.outputs)

    def by_shard(self) -> Iterator[tuple[str, list[TensorPlan]]]:
        """The plans of each source shard, in order; the output has the same shards."""
        shards: dict[str, list[TensorPlan]] = {}
        for tensor in self.tensors:
            shards.setdefault(tensor.source.shard, []).append(tensor)
        yield from shards.items()


def make_plan(checkpoint: Source, scheme: Scheme, layout: WriteLayout, overrides: Sequence[Override] = ()) -> Plan:
    """Decide what becomes of every tensor.

    Args:
        checkpoint: A checkpoint that is not quantized.
        scheme: For every linear of the decoder layers and every expert.
        layout: Where names and shapes of the output come from.
        overrides: Exceptions; the last that matches a module wins.

    Raises:
        AlreadyQuantizedError: The source carries a quantization_config.
        PatternError: An override matches no weight.
        ShapeError: A size does not fit the scheme; the message names the cure.
        UnsupportedTensorError: A tensor that the scheme was asked for cannot be quantized.
        UsageError: Fused layers under different schemes, or a scheme that the layout cannot hold.
    """
    if checkpoint.quantization_config is not None:
        method = checkpoint.quantization_config.get("quant_method", "unknown")
        raise AlreadyQuantizedError(
            f"{checkpoint.path} is quantized already (quant_method {method!r}); start from the original checkpoint"
        )
    matched: set[int] = set()
    tensors = []
    for info in checkpoint.tensors.values():
        role = role_of(info)
        chosen, reason = _choose(info, role, scheme, overrides, matched)
        parts = () if chosen is None else _parts(checkpoint, info, role, chosen, layout)
        tensors.append(TensorPlan(info, role, parts, reason))
    for index, override in enumerate(overrides):
        if index not in matched:
            raise PatternError(_no_match(override, tensors, checkpoint))
    plan = Plan(scheme, layout, tuple(overrides), tuple(tensors), _kept(tensors))
    _check_groups(plan)
    if not plan.modules:
        raise UsageError(
            f"{checkpoint.path}: nothing to quantize: no weight of a numbered decoder layer was found; "
            "name the weights with --override 'REGEX=SCHEME'"
        )
    return plan


def _module(info: TensorInfo) -> str:
    return info.name.removesuffix(".weight")


def _choose(
    info: TensorInfo, role: Role, scheme: Scheme, overrides: Sequence[Override], matched: set[int]
) -> tuple[Scheme | None, str]:
    """The scheme of a tensor, or None with the reason why it is kept; records which overrides matched."""
    eligible = is_matrix(info) or role is Role.EXPERTS
    by_default = role in (Role.LINEAR, Role.EXPERTS)
    chosen, reason = (scheme, "") if by_default else (None, role.value)
    if not eligible:
        return None, role.value
    for index, override in enumerate(overrides):
        if re.search(override.pattern, _module(info)):
            matched.add(index)
            chosen = override.scheme
            reason = str(override) if chosen is None else ""
    if chosen is not None and role is Role.EMBEDDING:
        raise UnsupportedTensorError(info.name, "no server looks embeddings up in 8 or 4 bits; remove the override")
    if chosen is not None and not is_dense_float(info):
        raise UnsupportedTensorError(
            info.name, f"weights are quantized from BF16, F16 or F32, found {info.dtype}; keep it with --exclude"
        )
    return chosen, reason


def _parts(checkpoint: Source, info: TensorInfo, role: Role, scheme: Scheme, layout: WriteLayout) -> tuple[Part, ...]:
    layout.check(scheme)
    if text_config(checkpoint.config).get("model_type") in CONV1D_MODEL_TYPES:
        raise UnsupportedTensorError(
            info.name, "this architecture stores Conv1D weights [in, out], which servers do not read quantized"
        )
    if role is Role.EXPERTS:
        return _expert_parts(checkpoint, info, scheme, layout)
    rows, cols = info.shape
    return (_part(_module(info), scheme, (rows, cols), layout, info),)


def _part(
    module: str,
    scheme: Scheme,
    shape: tuple[int, int],
    layout: WriteLayout,
    info: TensorInfo,
    *,
    matrix: int = 0,
    first_row: int = 0,
    transposed: bool = False,
) -> Part:
    """One part, after checking that the scheme's groups divide its rows."""
    rows, cols = shape
    _, block_cols = scheme.weight.granularity.block(shape)
    if rows == 0 or cols == 0:
        raise ShapeError(info.name, f"an empty weight {rows}x{cols}; keep it with --exclude")
    if scheme.weight.granularity.rows == 1 and cols % block_cols:
        raise ShapeError(
            info.name,
            f"{scheme.name} needs a multiple of {block_cols} columns, found {cols}; keep these weights with "
            f"--exclude '{_suffix_pattern(module)}' or give them a scheme without groups: "
            f"--override '{_suffix_pattern(module)}=fp8'",
        )
    tensors = layout.weight_tensors(module, scheme.weight, shape)
    return Part(module, scheme, shape, tensors, fused_group(module), matrix, first_row, transposed)


def _suffix_pattern(module: str) -> str:
    """A pattern for all modules that end like this one: ``mlp.down_proj`` of every layer."""
    return re.escape(".".join(re.sub(r"\.\d+\.", ".", module).rsplit(".", 2)[-2:])) + "$"


def _expert_parts(checkpoint: Source, info: TensorInfo, scheme: Scheme, layout: WriteLayout) -> tuple[Part, ...]:
    """Split fused experts into one linear per expert and projection, the form that servers load quantized.

    ``gate_up_proj`` is ``[E, 2 I, H]`` or ``[E, H, 2 I]``, ``down_proj`` ``[E, H, I]`` or ``[E, I, H]``; which one is
    told from the config's sizes, and refused where they do not tell.
    """
    config = text_config(checkpoint.config)
    if config.get("model_type") == "gpt_oss":
        raise UnsupportedTensorError(
            info.name,
            "gpt-oss interleaves gate and up and ships its experts as MXFP4 already; keep them with --exclude",
        )
    stem, _, projection = _module(info).rpartition(".")
    hidden = config.get("hidden_size")
    inner = next((config[key] for key in ("moe_intermediate_size", "intermediate_size") if config.get(key)), None)
    transposed = _are_transposed(checkpoint, stem, hidden, inner)
    if transposed is None:
        raise UnsupportedTensorError(
            info.name,
            f"fused experts {list(info.shape)}: hidden_size {hidden} and moe_intermediate_size {inner} of the config "
            "do not tell rows from columns; keep them with --exclude",
        )
    wide = projection == "gate_up_proj"
    experts, rows, cols = (info.shape[0], *info.shape[:0:-1]) if transposed else info.shape
    names = (("gate_proj", 0), ("up_proj", rows // 2)) if wide else (("down_proj", 0),)
    return tuple(
        _part(
            f"{stem}.{expert}.{name}",
            scheme,
            (rows // len(names), cols),
            layout,
            info,
            matrix=expert,
            first_row=first_row,
            transposed=transposed,
        )
        for expert in range(experts)
        for name, first_row in names
    )


def _are_transposed(checkpoint: Source, stem: str, hidden: int | None, inner: int | None) -> bool | None:
    """Whether fused experts are stored ``[E, in, out]``; None where the sizes do not tell.

    One of the two projections may be square, never both, so the other one decides for both.
    """
    if not hidden or not inner:
        return None
    answers = set()
    for projection, as_linear in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
        for suffix in ("", ".weight"):
            info = checkpoint.tensors.get(f"{stem}.{projection}{suffix}")
            if info is None:
                continue
            if info.shape[1:] not in (as_linear, as_linear[::-1]):
                return None
            if as_linear[0] != as_linear[1]:
                answers.add(info.shape[1:] != as_linear)
    return answers.pop() if len(answers) == 1 else None


def _kept(tensors: Sequence[TensorPlan]) -> tuple[str, ...]:
    """Linears that a server would otherwise expect quantized."""
    return kept_linears(
        (tensor.source for tensor in tensors if not tensor.parts),
        {part.module for tensor in tensors for part in tensor.parts},
    )


def kept_linears(plain: Iterable[TensorInfo], quantized: Collection[str]) -> tuple[str, ...]:
    """The linears among plain tensors, for a server's list of what is not quantized; lm_head even where it is tied.

    Args:
        plain: The tensors that stay as they are.
        quantized: The modules that are quantized.
    """
    kept = tuple(_module(info) for info in plain if is_matrix(info) and role_of(info) is not Role.EMBEDDING)
    return kept if "lm_head" in quantized or "lm_head" in kept else (*kept, "lm_head")


def _check_groups(plan: Plan) -> None:
    """Modules that servers run as one must be stored alike."""
    fused_and_kept = [_module(t.source) for t in plan.tensors if t.role is Role.EXPERTS and not t.parts]
    modules: Mapping[str, Scheme | None] = dict.fromkeys([*plan.kept, *fused_and_kept], None) | plan.modules
    first: dict[str, str] = {}
    for module in modules:
        for group in {fused_group(module), expert_group(module) or module}:
            other = first.setdefault(group, module)
            if modules[other] != modules[module]:
                names = [scheme.name if scheme else KEEP for scheme in (modules[other], modules[module])]
                raise UsageError(
                    f"{other} ({names[0]}) and {module} ({names[1]}) are run as one by servers and must share a "
                    "scheme; widen the override so that it matches both"
                )


def _no_match(override: Override, tensors: Sequence[TensorPlan], checkpoint: Source) -> str:
    names = [_module(t.source) for t in tensors if is_matrix(t.source) or t.role is Role.EXPERTS]
    message = f"the pattern {override.pattern!r} matches no weight of {checkpoint.path}"
    if "lm_head" not in names and re.search(override.pattern, "lm_head"):
        return f"{message}: lm_head is tied to the embedding and has no weight of its own"
    return f"{message}; weights are named like {', '.join(names[:3])}"
