"""Observation of K and V at the input of a model's attention: after rotary embedding and norms, before KV heads repeat.

Models of transformers look up their attention function by name in one table at every call. While a `KVTap` is open, the
function under that name is replaced by a function that passes K and V to the listeners of the calling module and then
calls the original. The name in the model's config stays, because some models branch on it. Architectures that do not
use the table are not observed (Bloom, MPT, GPT-J). For latent attention, which keeps a compressed cache, the listeners
get the decompressed K and V.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minifloat.errors import UnsupportedTensorError

#: Called with the path of the attention module, K and V, ``[B, KV heads, T, head size]`` each.
Listener = Callable[[str, Tensor, Tensor], None]

_lock = threading.Lock()
_listeners: dict[int, list[Callable[[Tensor, Tensor], None]]] = {}
_users: Counter[str] = Counter()
_originals: dict[str, Callable[..., Any] | None] = {}


class KVTap:
    """Passes K and V of one model to a listener while it is open; several taps may be open at once."""

    def __init__(self, model: PreTrainedModel, listener: Listener) -> None:
        self._listening = {id(module): functools.partial(listener, path) for path, module in model.named_modules()}
        configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        names = {config._attn_implementation for config in configs}
        self._names = sorted(name for name in names if isinstance(name, str))

    def __enter__(self) -> KVTap:
        with _lock:
            for key, listen in self._listening.items():
                _listeners.setdefault(key, []).append(listen)
            for name in self._names:
                _replace(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            for name in self._names:
                _restore(name)
            for key, listen in self._listening.items():
                _listeners[key].remove(listen)
                if not _listeners[key]:
                    del _listeners[key]


def _replace(name: str) -> None:
    if not _users[name]:
        _originals[name] = ALL_ATTENTION_FUNCTIONS.get(name)
        ALL_ATTENTION_FUNCTIONS[name] = functools.partial(_attend, _originals[name])
    _users[name] += 1


def _restore(name: str) -> None:
    _users[name] -= 1
    if _users[name]:
        return
    original = _originals.pop(name)
    ALL_ATTENTION_FUNCTIONS.pop(name)
    if original is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not original:
        ALL_ATTENTION_FUNCTIONS[name] = original


def _attend(
    original: Callable[..., Any] | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kw: Any,
) -> Any:
    """Call the listeners, then the original attention function.

    The table has no entry for eager attention: each model's file defines its own function.
    """
    for listen in _listeners.get(id(module), ()):
        listen(key, value)
    return (original or _eager(type(module)))(module, query, key, value, *args, **kw)


def _eager(cls: type[nn.Module]) -> Callable[..., Any]:
    for base in cls.__mro__:
        function: Callable[..., Any] | None = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedTensorError(cls.__name__, "its file has no eager_attention_forward; load the model with sdpa")
