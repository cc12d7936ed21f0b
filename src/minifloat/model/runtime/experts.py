"""The quantized experts of a layer, in the place of the one parameter ``[E, ...]`` that transformers makes of them.

Its eager forward reads ``self.gate_up_proj[expert]``, so an object with `__getitem__` suffices. The source of a class
shows whether it does nothing else with the parameter.
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
from minifloat.model.runtime.linear import QuantizedWeight


class QuantizedExperts(nn.Module):
    """All experts of a layer's projection, in place of a parameter ``[E, N, K]`` or, transposed, ``[E, K, N]``."""

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
        """Return the weight ``[N, K]`` (``[K, N]`` if transposed) of one expert."""
        if isinstance(index, Tensor) and (index.numel() != 1 or index.is_floating_point()):
            raise TypeError(f"experts are taken one at a time; got an index of shape {list(index.shape)}")
        parts = [part for part in self.experts[int(index)].children() if isinstance(part, QuantizedWeight)]
        if self.multiplied:
            return ExpertFactor(parts, self.transposed)
        weight = torch.cat([part.weight for part in parts])
        return weight.T if self.transposed else weight


class ExpertFactor:
    """One expert's weight in ``F.linear(x, w)``, or in ``x @ w`` if it is transposed; any other use is a TypeError.

    torch calls `__torch_function__` of operands that are not tensors; only there is the input known.
    """

    def __init__(self, parts: Sequence[QuantizedWeight], transposed: bool) -> None:
        self.parts, self.transposed = parts, transposed

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Tensor:
        """Multiply; torch calls this in the place of `func`."""
        if len(args) == 2 and not kwargs and isinstance(args[0], Tensor) and isinstance(args[1], cls):
            x: Tensor = args[0]
            factor: ExpertFactor = args[1]
            expected = _MATRIX_PRODUCTS if factor.transposed else (nn.functional.linear,)
            if func in expected:
                return factor.multiply(x)
        raise TypeError(f"a quantized expert can only be multiplied with an input; got {func}")

    def multiply(self, x: Tensor) -> Tensor:
        """Return ``x @ w.T`` with the rows of all parts: ``[..., K]`` to ``[..., N]``."""
        held = [part.held for part in self.parts]
        packed = [weight for weight in held if isinstance(weight, PackedWeight)]
        first = self.parts[0]
        alike = all(
            part.activation is None and part.spec == first.spec and part.int8_inputs == first.int8_inputs
            for part in self.parts
        )
        if alike and len(packed) == len(held):
            products = linear_fused(x, packed, int8_inputs=first.int8_inputs)
        else:
            products = tuple(part.multiply(x) for part in self.parts)
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


_MATRIX_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


def indexes_experts(cls: type[nn.Module], name: str) -> bool:
    """Return whether the code of a module class reads ``self.<name>`` only as ``self.<name>[...]``."""
    return all(isinstance(use, ast.Subscript) for use, _ in _uses(cls, name)) and bool(_uses(cls, name))


def multiplies_experts(cls: type[nn.Module], name: str) -> bool:
    """Return whether a module class uses ``self.<name>[...]`` only in ``linear(x, ...)`` or ``x @ ...``."""
    return indexes_experts(cls, name) and all(_is_factor(use, parent) for use, parent in _uses(cls, name))


def batches_experts(cls: type[nn.Module], name: str) -> bool:
    """Return whether a module class uses ``self.<name>`` in ``torch.bmm(x, ...)`` alone, for all experts at once."""
    uses = [use for use, _ in _uses(cls, name) if not (isinstance(use, ast.Attribute) and use.attr == "shape")]
    return bool(uses) and all(isinstance(use, ast.Call) and ast.unparse(use.func) == "torch.bmm" for use in uses)


def _is_factor(use: ast.AST, parent: ast.AST) -> bool:
    """Return whether an expression is the weight of the product that contains it."""
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, ast.MatMult) and parent.right is use
    if not isinstance(parent, ast.Call) or parent.keywords or len(parent.args) != 2:
        return False
    return ast.unparse(parent.func).rpartition(".")[2] == "linear" and parent.args[1] is use


def _uses(cls: type[nn.Module], name: str) -> list[tuple[ast.AST, ast.AST]]:
    """Return, for each ``self.<name>`` that a class reads, the expression around it and the one around that."""
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


@functools.cache  # finding a class in its file takes milliseconds, and every layer needs it
def _parsed(cls: Any) -> ast.Module | None:
    """Return the syntax tree of a class; None if its source is missing."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None
