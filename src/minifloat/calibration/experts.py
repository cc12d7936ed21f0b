"""The inputs of single experts in transformers' modules of stacked experts.

transformers has several implementations of stacked experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from minifloat.model.runtime.build import replace_forward
from minifloat.model.runtime.experts import batches_experts

#: Called with the expert's index, whether the input is that of the down projection, the input ``[n, K]``, and the index
#: of each of its tokens, int64 ``[n]``. Returns the input to compute with instead, or None.
Record = Callable[[int, bool, Tensor, Tensor], Tensor | None]

_OUTER = "down_proj"


def is_routed(module: Any) -> bool:
    """Return whether a module is of a class that `use_experts_implementation` decorates."""
    return hasattr(module, "has_gate") and hasattr(module, "num_experts")


def is_transposed(module: Any, name: str) -> bool | None:
    """Return whether a module of experts keeps the parameter `name` as ``[E, K, N]`` and not as ``[E, N, K]``."""
    if is_routed(module):
        return bool(module.is_transposed)
    return True if batches_experts(type(module), name) else None


def watch_experts(module: Any, record: Record) -> Callable[[], None]:
    """Replace the forward method of an experts module by one that reports the inputs of each expert."""
    if is_routed(module):
        return replace_forward(module, functools.partial(_forward, module, record))
    return replace_forward(module, functools.partial(_batched_forward, module, module.forward, record))


def inner_inputs(module: Any, hidden_states: Tensor, *routing: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that gets tokens, the index of each of its tokens, and its input ``[n, H]``."""
    if is_routed(module):
        for expert, _, token in _routed(module, routing[0]):
            yield expert, token, hidden_states[token]
        return
    for expert, rows in enumerate(hidden_states.view(len(getattr(module, _OUTER)), -1, hidden_states.shape[-1])):
        token = _tokens(rows)
        if len(token):
            yield expert, token, rows[token]


def _routed(module: Any, top_k_index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that tokens were routed to, with the position among the token's k experts and the token."""
    for expert in top_k_index.flatten().bincount().nonzero().flatten().tolist():
        if expert < module.num_experts:
            position, token = torch.where((top_k_index == expert).T)
            yield expert, position, token


def _tokens(rows: Tensor) -> Tensor:
    """Return the indices of the rows ``[T, K]`` that are not zero: of the tokens that were routed to the expert."""
    return rows.any(-1).nonzero().flatten()


def _batched_forward(module: Any, forward: Callable[[Tensor], Tensor], record: Record, hidden_states: Tensor) -> Tensor:
    """Run a batched module's own forward pass, and report the inputs of its products."""
    with _BatchedProducts(module, record):
        return forward(hidden_states)


class _BatchedProducts(TorchFunctionMode):  # type: ignore[misc, no-any-unimported, unused-ignore]
    """Reports the inputs of the products of a batched module, which are calls of ``torch.bmm``."""

    def __init__(self, module: Any, record: Record) -> None:
        super().__init__()
        self._outer, self._record = getattr(module, _OUTER), record
        self._routed_tokens: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `func`; report and replace the first factor of a batched product."""
        if func is torch.bmm:
            with torch._C.DisableTorchFunction():
                args = (self._recorded(args[0], outer=args[1] is self._outer), *args[1:])
        return func(*args, **(kwargs or {}))

    def _recorded(self, batch: Tensor, *, outer: bool) -> Tensor:
        """Report the inputs ``[E, T, K]`` of all experts, and return what to compute with."""
        if not outer:
            self._routed_tokens = [_tokens(rows) for rows in batch]
        replaced = None
        for expert, token in enumerate(self._routed_tokens):
            if not len(token):
                continue
            replacement = self._record(expert, outer, batch[expert, token], token)
            if replacement is not None:
                replaced = batch.clone() if replaced is None else replaced
                replaced[expert, token] = replacement
        return batch if replaced is None else replaced


def _forward(module: Any, record: Record, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of a routed module that tokens were routed to."""
    result = torch.zeros_like(hidden_states)
    inner = "gate_up_proj" if module.has_gate else "up_proj"
    for expert, position, token in _routed(module, top_k_index):
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
