"""`Family`: everything that minifloat knows about one family of models, as one row.

A family is the set of models whose config has one of its `model_types`. What the rows do not state follows from the
general rules, which are the defaults of the fields; a model of an unknown family works by these alone. The rows are in
`families/`, and `families.family_of` finds the row of a config.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


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
    """A tensor on disk that holds a linear, or two, of every expert of a layer.

    Attributes:
        transposed: Whether the tensor is ``[E, K, N]`` (as ``x @ w``) and not ``[E, N, K]``.
    """

    name: str
    linears: tuple[str, ...]
    transposed: bool = False
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


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        stored_fused: Whether released checkpoints hold fused experts, the only form that transformers loads
            unquantized. None: the tables of the installed transformers decide.
        renames: Regular expression and replacement, applied in order to the name of a module in the checkpoint; the
            result is the module's name in transformers. None: the tables of the installed transformers decide.
        conv1d: Whether the matrices are Conv1D weights ``[in, out]``.
    """

    name: str
    model_types: tuple[str, ...]
    roles: tuple[tuple[str, Role], ...] = ()
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    fused_experts: tuple[FusedTensor, ...] = GATE_UP_DOWN
    stored_fused: bool | None = None
    transformers_splits: bool = False
    servers_read_single: bool = True
    renames: tuple[tuple[str, str], ...] | None = None
    heads: tuple[str, ...] = ("lm_head",)
    folds: frozenset[FoldKind] = frozenset()
    states_expert_dtype: bool = False
    conv1d: bool = False
    known: bool = True

    def own_role(self, name: str) -> Role | None:
        """Return the role that the row gives to a matrix; None where the general rules decide."""
        return next((role for pattern, role in self.roles if re.search(pattern, name)), None)

    def fused_tensor(self, name: str) -> FusedTensor | None:
        """Return the description of a tensor of fused experts; None for the name of any other tensor."""
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
GENERAL = Family(name="unknown", model_types=(), known=False)
