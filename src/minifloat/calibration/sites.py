"""The modules of a model to observe, with the names of their weights in the checkpoint.

Statistics use the names of the checkpoint, as quantizing, servers and reports do; transformers may hold the same
weights under other names or stacked (`runtime.names`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from minifloat.checkpoint import Checkpoint
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import Family, Role
from minifloat.model.architecture.roles import role_of
from minifloat.model.layouts import Description, describe
from minifloat.model.runtime.experts import batches_experts
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.names import Assignment, assign, empty_model, replace_forward
from minifloat.model.runtime.tensors import listing

_LOG = logging.getLogger(__name__)

#: Parameters of transformers' experts classes: those that multiply the input of the module, and those that come after.
_INNER = ("gate_up_proj", "up_proj")
_OUTER = "down_proj"


@dataclass(frozen=True)
class LinearSite:
    path: str
    names: tuple[str, ...]
    width: int


@dataclass
class ExpertsSite:
    """An experts module whose weights are stacked."""

    path: str
    inner: tuple[tuple[str, ...], ...] = ()
    outer: tuple[tuple[str, ...], ...] = ()
    inner_width: int = 0
    outer_width: int = 0


@dataclass(frozen=True)
class Sites:
    """All modules to observe, in the order of names in the checkpoint."""

    linears: tuple[LinearSite, ...]
    experts: tuple[ExpertsSite, ...]

    def attention_name(self, path: str) -> str:
        """Return the name of an attention module in the checkpoint, derived from a linear inside it, or its path."""
        for site in self.linears:
            if site.path.startswith(f"{path}."):
                return site.names[0].rsplit(".", site.path.count(".") - path.count("."))[0]
        return path


def find_sites(model: PreTrainedModel, checkpoint: Checkpoint, description: Description | None = None) -> Sites:
    """Return the modules to observe, and log a warning that names weights whose inputs cannot be observed."""
    description = description or describe(checkpoint)
    family = family_of(checkpoint.config)
    quantizable = (Role.LINEAR, Role.EXPERTS)
    observed = {info.name for info in checkpoint.tensors.values() if role_of(info, family) in quantizable}
    if description.weights:
        observed -= {tensor for weight in description.weights.values() for tensor in weight.tensors}
        observed |= {weight.plain_name for weight in description.weights.values()}
    # transformers' tables map to the parameter names of the unquantized model, which a quantized model does not have.
    unquantized = empty_model(checkpoint, model.dtype) if description.weights else model
    assignments, _ = assign(unquantized, observed)
    linears: list[LinearSite] = []
    experts: dict[str, ExpertsSite] = {}
    missed: list[str] = []
    for assignment in assignments:
        path, _, leaf = assignment.target.rpartition(".")
        owner = model.get_submodule(path)
        if isinstance(owner, nn.Linear | QuantizedLinear) and leaf == "weight":
            names = tuple(source.removesuffix(".weight") for source in assignment.sources)
            linears.append(LinearSite(path, names, int(owner.in_features)))
        elif not _add_experts(experts.setdefault(path, ExpertsSite(path)), owner, leaf, assignment, family):
            missed += assignment.sources
    if missed:
        _LOG.warning("%d weights are in modules whose inputs cannot be observed: %s", len(missed), listing(missed))
    return Sites(tuple(linears), tuple(site for site in experts.values() if site.inner and site.outer))


def _add_experts(site: ExpertsSite, owner: Any, leaf: str, assignment: Assignment, family: Family) -> bool:
    """Add the names of one stacked parameter to a site; return False if the module cannot be watched."""
    if leaf not in (*_INNER, _OUTER):
        return False
    transposed = is_transposed(owner, leaf)
    if transposed is None:
        return False
    experts, *sides = getattr(owner, leaf).shape
    names = _expert_names(assignment, experts, family)
    if names is None:
        return False
    width = sides[0 if transposed else 1]
    if leaf in _INNER:
        site.inner, site.inner_width = names, width
    else:
        site.outer, site.outer_width = names, width
    return True


def _expert_names(assignment: Assignment, experts: int, family: Family) -> tuple[tuple[str, ...], ...] | None:
    """Return for each expert the names of the linears that a stacked parameter is made of; None if they are unknown."""
    fused = family.fused_tensor(assignment.sources[0])
    if fused is not None and len(assignment.sources) == 1:
        parent = fused.parent(assignment.sources[0])
        return tuple(tuple(f"{parent}{linear.format(index)}" for linear in fused.linears) for index in range(experts))
    parts = assignment.expert_parts()
    if parts is None:
        return None
    return tuple(tuple(source.removesuffix(".weight") for source in part) for part in parts)


#: Called with the expert's index, whether the input is that of the down projection, the input ``[n, K]``, and the index
#: of each of its tokens, int64 ``[n]``. Returns the input to compute with instead, or None.
Record = Callable[[int, bool, Tensor, Tensor], Tensor | None]


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
