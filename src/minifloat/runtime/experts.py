"""The experts of a layer, quantized, in the place of the one parameter ``[E, ...]`` that transformers makes of them.

The eager forward of transformers' experts reads ``self.gate_up_proj[expert]`` for one expert at a time, so an object
with `__getitem__` is enough and no forward is rewritten. Whether a class keeps to that is read off its source. Where
it only multiplies with what the index returns, that is no tensor but an operand that multiplies in its own way.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.errors import ShapeError
from minifloat.kernels.linear import linear_fused
from minifloat.kernels.pack import PackedWeight
from minifloat.runtime.linear import QuantizedWeight


class QuantizedExperts(nn.Module):
    """All experts of a layer's projection, in place of a parameter ``[E, N, K]`` or, transposed, ``[E, K, N]``.

    Args:
        experts: Of each expert the weights that follow each other along N: gate and up, or one. Either all quantize
            their inputs or none does.
        transposed: Whether the model multiplies with ``x @ w[e]`` (gpt-oss) and not with ``x @ w[e].T``.
        multiplied: Whether the model does nothing else with them (`multiplies_experts`).

    Attributes:
        shape: The shape of the parameter that this stands for.

    Raises:
        ShapeError: The experts differ in shape.
    """

    def __init__(self, experts: Sequence[Sequence[QuantizedWeight]], transposed: bool, multiplied: bool) -> None:
        super().__init__()
        self.transposed, self.multiplied = transposed, multiplied
        self.experts = nn.ModuleList(nn.ModuleList(parts) for parts in experts)
        assert multiplied or all(part.activation is None for parts in experts for part in parts)
        heights = {sum(part.shape[0] for part in parts) for parts in experts}
        widths = {part.shape[1] for parts in experts for part in parts}
        if len(heights) != 1 or len(widths) != 1:
            raise ShapeError("experts", f"expected one shape for all; found rows {heights} and columns {widths}")
        rows, cols = heights.pop(), widths.pop()
        self.shape = torch.Size((len(experts), cols, rows) if transposed else (len(experts), rows, cols))

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, index: int | Tensor) -> Tensor | ExpertFactor:
        """The weight ``[N, K]`` (``[K, N]`` where transposed) of one expert, to multiply an input with.

        It is an `ExpertFactor`, which can do nothing but be multiplied with an input; where the model does more, the
        dequantized tensor in the model's dtype.

        Raises:
            TypeError: `index` is not one integer; other implementations of transformers' experts take many at once.
        """
        if isinstance(index, Tensor) and (index.numel() != 1 or index.is_floating_point()):
            raise TypeError(f"experts are taken one at a time; got an index of shape {list(index.shape)}")
        parts = [part for part in self.experts[int(index)].children() if isinstance(part, QuantizedWeight)]
        if self.multiplied:
            return ExpertFactor(parts, self.transposed)
        weight = torch.cat([part.weight for part in parts])
        return weight.T if self.transposed else weight


class ExpertFactor:
    """Stands for one expert's weight in ``F.linear(x, w)``, or in ``x @ w`` where it is transposed.

    Kernels take the weight together with its input, which is not known where experts are indexed, only where they are
    multiplied; so torch, which asks foreign operands what to do, is told to multiply by `QuantizedWeight.multiply`. Any
    other use raises TypeError: a product that passes by the quantization of inputs would be wrong in silence.

    Args:
        parts: The weights of the expert, whose results follow each other in the last dimension.
        transposed: Which of the two products it takes part in.
    """

    def __init__(self, parts: Sequence[QuantizedWeight], transposed: bool) -> None:
        self.parts, self.transposed = parts, transposed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        """Called by torch in the place of `func`."""
        if len(args) == 2 and not kwargs and isinstance(args[0], Tensor) and isinstance(args[1], cls):
            x: Tensor = args[0]
            factor: ExpertFactor = args[1]
            expected = _MATRIX_PRODUCTS if factor.transposed else (nn.functional.linear,)
            if func in expected:
                return factor.multiply(x)
        raise TypeError(f"a quantized expert can only be multiplied with an input; got {func}")

    def multiply(self, x: Tensor) -> Tensor:
        """``x @ w.T`` for the parts on top of each other: ``[..., K]`` to ``[..., N]``."""
        held = [part.held for part in self.parts]
        packed = [weight for weight in held if isinstance(weight, PackedWeight)]
        alike = all(part.activation is None and part.spec == self.parts[0].spec for part in self.parts)
        if alike and len(packed) == len(held):
            products = linear_fused(x, packed)
        else:
            products = tuple(part.multiply(x) for part in self.parts)
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


_MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def indexes_experts(cls: type[nn.Module], name: str) -> bool:
    """Whether the code of a module class reads ``self.<name>`` only as ``self.<name>[...]``.

    Llama 4 multiplies with the whole parameter, for one: there a `QuantizedExperts` cannot stand in for it.

    Args:
        cls: Class of the module that owns the parameter.
        name: Name of the parameter in it.

    Returns:
        False also where there is no source to read.
    """
    return all(isinstance(use, ast.Subscript) for use, _ in _uses(cls, name)) and bool(_uses(cls, name))


def multiplies_experts(cls: type[nn.Module], name: str) -> bool:
    """Whether all that a module class does with ``self.<name>[...]`` is ``linear(x, ...)`` or ``x @ ...``.

    That is what an `ExpertFactor` can do. Classes that convert the weight first (``.float()``) do more.

    Args:
        cls: Class of the module that owns the parameter.
        name: Name of the parameter in it.

    Returns:
        False also where there is no source to read.
    """
    return indexes_experts(cls, name) and all(_is_factor(use, parent) for use, parent in _uses(cls, name))


def _is_factor(use: ast.AST, parent: ast.AST) -> bool:
    """Whether an expression is the weight in the product around it."""
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.MatMult) and parent.right is use
    if not isinstance(parent, ast.Call) or parent.keywords or len(parent.args) != 2:
        return False
    return ast.unparse(parent.func).rpartition(".")[2] == "linear" and parent.args[1] is use


def _uses(cls: type[nn.Module], name: str) -> list[tuple[ast.AST, ast.AST]]:
    """What stands around ``self.<name>`` where a class reads it, and what stands around that.

    Empty where the class does not read it, or where there is no source.
    """
    uses = []
    for base in cls.__mro__:
        if base is nn.Module:
            break
        tree = _parsed(base)
        if tree is None:
            return []
        parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                use = parents[id(node)]
                uses.append((use, parents[id(use)]))
    return uses


@functools.cache  # finding a class in its file takes milliseconds, and every layer asks
def _parsed(cls: Any) -> ast.Module | None:
    """The syntax tree of a class, None where there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None
