"""The experts of a layer, quantized, in the place of the one parameter ``[E, ...]`` that transformers makes of them.

The eager forward of transformers' experts reads ``self.gate_up_proj[expert]`` for one expert at a time, so an object
with `__getitem__` is enough and no forward is rewritten. Whether a class keeps to that is read off its source.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minifloat.errors import ShapeError
from minifloat.quantize.tensor import QuantizedTensor
from minifloat.serve.linear import QuantizedWeight


class QuantizedExperts(nn.Module):
    """All experts of a layer's projection, in place of a parameter ``[E, N, K]`` or, transposed, ``[E, K, N]``.

    Args:
        experts: Of each expert the weights that follow each other along N: gate and up, or one.
        transposed: Whether the model multiplies with ``x @ w[e]`` (gpt-oss) and not with ``x @ w[e].T``.
        dtype: The model's dtype.

    Attributes:
        shape: The shape of the parameter that this stands for.

    Raises:
        ShapeError: The experts differ in shape.
    """

    def __init__(self, experts: Sequence[Sequence[QuantizedTensor]], transposed: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.transposed = transposed
        self.experts = nn.ModuleList(nn.ModuleList(QuantizedWeight(part, dtype) for part in parts) for parts in experts)
        heights = {sum(part.shape[0] for part in parts) for parts in experts}
        widths = {part.shape[1] for parts in experts for part in parts}
        if len(heights) != 1 or len(widths) != 1:
            raise ShapeError("experts", f"expected one shape for all; found rows {heights} and columns {widths}")
        rows, cols = heights.pop(), widths.pop()
        self.shape = torch.Size((len(experts), cols, rows) if transposed else (len(experts), rows, cols))

    def __len__(self) -> int:
        return len(self.experts)

    def __getitem__(self, index: int | Tensor) -> Tensor:
        """The dequantized weight ``[N, K]`` (``[K, N]`` where transposed) of one expert, in the model's dtype.

        Raises:
            TypeError: `index` is not one integer; other implementations of transformers' experts take many at once.
        """
        if isinstance(index, Tensor) and (index.numel() != 1 or index.is_floating_point()):
            raise TypeError(f"experts are dequantized one at a time; got an index of shape {list(index.shape)}")
        parts = [part for part in self.experts[int(index)].children() if isinstance(part, QuantizedWeight)]
        weight = torch.cat([part.weight for part in parts])
        return weight.T if self.transposed else weight


def indexes_experts(cls: type[nn.Module], name: str) -> bool:
    """Whether the code of a module class reads ``self.<name>`` only as ``self.<name>[...]``.

    Llama 4 multiplies with the whole parameter, for one: there a `QuantizedExperts` cannot stand in for it.

    Args:
        cls: Class of the module that owns the parameter.
        name: Name of the parameter in it.

    Returns:
        False also where there is no source to read.
    """
    indexed = False
    for base in cls.__mro__:
        if base is nn.Module:
            break
        tree = _parsed(base)
        if tree is None:
            return False
        subscripted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load):
                if id(node) not in subscripted:
                    return False
                indexed = True
    return indexed


@functools.cache  # finding a class in its file takes milliseconds, and every layer asks
def _parsed(cls: Any) -> ast.Module | None:
    """The syntax tree of a class, None where there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return None
