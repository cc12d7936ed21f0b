"""A forward pass of transformers' stacked experts that runs one expert at a time, and reports each expert's inputs.

transformers has several implementations of stacked experts. Most of them multiply for all experts at once, so the
inputs of a single expert cannot be observed. The implementation in this module computes the same as the eager one, for
every class that `use_experts_implementation` decorates: the decorator's flags describe the layout of the weights. It
replaces the module's `forward` only while the module is observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Called with the expert's index, whether the input is that of the down projection, the input ``[n, K]``, and the index
#: of each of its tokens, int64 ``[n]``. Returns the input to compute with instead, or None.
Record = Callable[[int, bool, Tensor, Tensor], Tensor | None]


def watch_experts(module: Any, record: Record) -> Callable[[], None]:
    """Replace the forward method of an experts module by one that reports the inputs of each expert.

    Returns:
        A function that restores the former method.
    """
    former = module.__dict__.get("forward")
    module.forward = functools.partial(_forward, module, record)

    def undo() -> None:
        del module.forward
        if former is not None:
            module.forward = former

    return undo


def routed(module: Any, top_k_index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that tokens were routed to, with the position among the token's k experts and the token.

    Args:
        module: An experts module.
        top_k_index: ``[tokens, k]``, the experts of each token; an index beyond the last expert stands for no expert.
    """
    for expert in top_k_index.flatten().bincount().nonzero().flatten().tolist():
        if expert < module.num_experts:
            position, token = torch.where((top_k_index == expert).T)
            yield expert, position, token


def _forward(module: Any, record: Record, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts that tokens were routed to.

    Args:
        module: An experts module.
        record: Called with the inputs of each expert.
        hidden_states: ``[tokens, H]``.
        top_k_index: ``[tokens, k]``, the experts of each token; an index beyond the last expert stands for no expert.
        top_k_weights: ``[tokens, k]``, the weight of each expert's output.

    Returns:
        ``[tokens, H]``, the dtype of `hidden_states`.
    """
    result = torch.zeros_like(hidden_states)
    inner = "gate_up_proj" if module.has_gate else "up_proj"
    for expert, position, token in routed(module, top_k_index):
        x = hidden_states[token]
        x = _replaced(record(expert, False, x, token), x)
        x = _project(module, inner, expert, x)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        x = _replaced(record(expert, True, x, token), x)
        x = _project(module, "down_proj", expert, x)
        if getattr(module, "has_post_expert_norm", False):
            x = module.post_expert_norm(x)
        weighted = x * top_k_weights[token, position, None]
        result.index_add_(0, token, weighted.to(result.dtype))
    return result


def _replaced(replacement: Tensor | None, x: Tensor) -> Tensor:
    return x if replacement is None else replacement


def _project(module: nn.Module, name: str, expert: int, x: Tensor) -> Tensor:
    """Return ``x`` times one expert's weight, plus its bias; the weight may be a `QuantizedExperts`."""
    weight = getattr(module, name)[expert]
    y: Tensor = x @ weight if module.is_transposed else linear(x, weight)
    return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y
