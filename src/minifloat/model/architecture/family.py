"""`Family`: all that minifloat knows about one family of models; the defaults of the fields are the general rules."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple


class Role(enum.Enum):
    """Role of a tensor; the value is its name in reports."""

    LINEAR = "linear"
    EXPERTS = "fused experts"
    LM_HEAD = "lm_head"
    EMBEDDING = "embedding"
    ROUTER = "router"
    TOWER = "vision or audio tower"
    #: A linear that vLLM or SGLang builds without quantization, so that codes would have no place.
    UNQUANTIZED_IN_SERVERS = "not quantized in servers"
    VECTOR = "norm or bias"
    OTHER = "other"


class FoldKind(enum.Enum):
    """What comes before the linears of a place where scales can be folded; the value is its name in reports."""

    NORM = "norm"  #: a norm and all linears that read its output
    VALUE = "value"  #: v_proj and o_proj, with the attention between them
    UP = "up"  #: up_proj and down_proj, with the product by the activated gate between them


#: For families whose norms multiply by the weight, and stand before the linears.
ALL_FOLDS = frozenset(FoldKind)
#: For families whose norms multiply by ``1 + w``, or stand after the attention and the MLP.
FOLDS_WITHOUT_NORMS = frozenset({FoldKind.VALUE, FoldKind.UP})


class SingleExpert(NamedTuple):
    """The place of one expert's linear in a tensor of fused experts."""

    fused: FusedTensor
    parent: str
    expert: int
    position: int


@dataclass(frozen=True)
class FusedTensor:
    """A tensor on disk that holds a linear, or two, of every expert of a layer."""

    name: str
    linears: tuple[str, ...]
    transposed: bool = False  #: ``[E, K, N]`` (as ``x @ w``), not ``[E, N, K]``
    both_exist: bool = False
    interleaved: bool = False
    reads_hidden: bool = True

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern of the tensor's name; the group ``parent`` is what `linears` follow."""
        name = re.escape(self.name.removesuffix(".weight"))
        return re.compile(rf"^(?P<parent>(?:.*\.)?){name}(?:\.weight)?$")

    @cached_property
    def linear_patterns(self) -> tuple[re.Pattern[str], ...]:
        """Patterns of the module names of single experts, one for each of `linears`."""
        names = (re.escape(linear).replace(r"\{\}", r"(?P<expert>\d+)") for linear in self.linears)
        return tuple(re.compile(rf"^(?P<parent>(?:.*\.)?){name}$") for name in names)

    def parent(self, name: str) -> str:
        """Return the part of a tensor's name before `name`, with a dot at its end."""
        match = self.pattern.match(name)
        assert match is not None
        return match["parent"]


#: Fused experts of most families.
GATE_UP_DOWN = (
    FusedTensor("experts.gate_up_proj", ("experts.{}.gate_proj", "experts.{}.up_proj"), both_exist=True),
    FusedTensor("experts.down_proj", ("experts.{}.down_proj",), both_exist=True, reads_hidden=False),
)


#: How config.json states the rotary embedding: as most do, with the part of a head that it turns, or once for each type
#: of layer.
Rope = Literal["", "partial", "by layer type"]


@dataclass(frozen=True)
class ShortConfig:
    """A config.json that leaves out fields, which is read without transformers."""

    required: str = ""  #: fields beyond those of every type, with spaces between
    defaults: tuple[tuple[str, Any], ...] = ()  #: of fields that it may leave out
    theta: float = 10_000.0
    windows: Literal["none", "stated", "unused", "layers"] = "unused"
    no_window: int | None = None


@dataclass(frozen=True)
class NativeType:
    """A ``model_type`` of a text model that minifloat's decoders run."""

    model_type: str
    architecture: str
    layer: str = ""  #: ``module.function`` of `decoder.families` that returns a layer
    stated: str = ""  #: fields of the layout that config.json must state to be read without transformers
    also: str = ""  #: further fields that the layout obeys
    rope: Rope = ""
    renamed: tuple[tuple[str, str], ...] = ()
    newer: tuple[tuple[str, Any], ...] = ()  #: fields that files before transformers 5.10 lack, and their defaults
    short: ShortConfig | None = None
    decoder: str = ""  #: the function that returns the whole decoder where more than its layers is special
    w1_w2_w3: bool = False

    @property
    def fields(self) -> set[str]:
        return {*self.stated.split(), *self.also.split(), *(name for name, _ in self.newer)}


class OuterType(NamedTuple):
    """A ``model_type`` of a model around a text model that the decoders run, and the usual type of that."""

    model_type: str
    architecture: str
    text: str


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    types: tuple[str | NativeType | OuterType, ...]
    roles: tuple[tuple[str, Role], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fused_experts: tuple[FusedTensor, ...] = GATE_UP_DOWN
    stored_fused: bool | None = None  #: released files hold fused experts; None: transformers' tables decide
    transformers_splits: bool = False
    servers_read_single: bool = True
    #: Regular expressions and replacements from names in the checkpoint to transformers'; None: its tables decide.
    renames: tuple[tuple[str, str], ...] | None = None
    heads: tuple[str, ...] = ("lm_head",)
    folds: frozenset[FoldKind] = frozenset()
    states_expert_dtype: bool = False
    conv1d: bool = False  #: matrices are ``[in, out]``
    known: bool = True

    @property
    def model_types(self) -> tuple[str, ...]:
        return tuple(entry if isinstance(entry, str) else entry.model_type for entry in self.types)

    def own_role(self, name: str) -> Role | None:
        """Return the role that the row gives to a matrix; None where the general rules decide."""
        return next((role for pattern, role in self.roles if re.search(pattern, name)), None)

    def fused_tensor(self, name: str) -> FusedTensor | None:
        return next((tensor for tensor in self.fused_experts if tensor.pattern.match(name)), None)

    def single_expert(self, module: str) -> SingleExpert | None:
        """Return the place of a linear of one expert in a tensor of fused experts; None for any other module."""
        for fused in self.fused_experts:
            for position, pattern in enumerate(fused.linear_patterns):
                match = pattern.match(module)
                if match:
                    return SingleExpert(fused, match["parent"], int(match["expert"]), position)
        return None


#: The general rules alone.
GENERAL = Family(name="unknown", types=(), known=False)
