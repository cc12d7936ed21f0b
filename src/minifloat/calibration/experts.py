"""The forward of transformers' stacked experts, one expert at a time, with a look at what each one multiplies.

transformers has several implementations of it, most of them one multiplication for all experts, into which nothing can
look. This one says the same as its eager one, for every class that `use_experts_implementation` decorates: the flags
that the decorator sets tell how the weights lie. It stands in for the module's `forward` only while it is observed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

#: Called with the expert's index, whether the input is that of the down projection, and the input ``[tokens, K]``.
Record = Callable[[int, bool, Tensor], None]


def watch_experts(module: Any, record: Record) -> Callable[[], None]:
    """Have an experts module run by `_forward`.

    Returns:
        What undoes it.
    """
    before = module.__dict__.get("forward")
    module.forward = functools.partial(_forward, module, record)

    def undo() -> None:
        del module.forward
        if before is not None:
            module.forward = before

    return undo


def _forward(module: Any, record: Record, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts that tokens were routed to.

    Args:
        module: An experts module.
        record: Sees the inputs.
        hidden_states: ``[tokens, H]``.
        top_k_index: ``[tokens, k]``, the experts of each token; an index beyond the last one stands for none.
        top_k_weights: ``[tokens, k]``.

    Returns:
        ``[tokens, H]``, the dtype of `hidden_states`.
    """
    result = torch.zeros_like(hidden_states)
    inner = "gate_up_proj" if module.has_gate else "up_proj"
    for expert in top_k_index.flatten().bincount().nonzero().flatten().tolist():
        if expert >= module.num_experts:
            continue
        position, token = torch.where((top_k_index == expert).T)
        x = hidden_states[token]
        record(expert, False, x)
        x = _project(module, inner, expert, x)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        record(expert, True, x)
        x = _project(module, "down_proj", expert, x)
        if getattr(module, "has_post_expert_norm", False):
            x = module.post_expert_norm(x)
        weighted = x * top_k_weights[token, position, None]
        result.index_add_(0, token, weighted.to(result.dtype))
    return result


def _project(module: nn.Module, name: str, expert: int, x: Tensor) -> Tensor:
    """``x`` times one expert's weight, plus its bias; the weight may be a `QuantizedExperts`."""
    weight = getattr(module, name)[expert]
    y: Tensor = x @ weight if module.is_transposed else linear(x, weight)
    return y + getattr(module, f"{name}_bias")[expert] if module.has_bias else y
