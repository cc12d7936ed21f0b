"""Observation of a running model: the input of every linear and expert, and K and V of every attention.

An `Observer` is a context manager around forward passes.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minifloat.calibration.sites import Sites, find_sites, watch_experts
from minifloat.calibration.stats import KVStats, ModuleStats
from minifloat.checkpoint import Checkpoint
from minifloat.errors import NonFiniteError, UnsupportedTensorError, UsageError
from minifloat.kernels.observe import observe
from minifloat.model.runtime.products import fast_products
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.histogram import BINS, MANTISSA_BITS, Counts, Floats


def non_finite_error(module: str, tensor: str, sequence: int) -> NonFiniteError:
    """Return the error for a module with NaN or Inf in a tensor, such as ``"input"`` or ``"K or V"``."""
    cure = "the model overflows in this dtype (try float32), or its weights are damaged"
    return NonFiniteError(module, f"NaN or Inf in its {tensor} in sequence {sequence}; {cure}")


@dataclass(frozen=True)
class Measurement:
    """The statistics of one tensor."""

    amax: Tensor  # float32 ``[1]`` on the tensor's device; NaN or Inf if the tensor holds either
    tokens: int
    histogram: Tensor | None  # int64 ``[BINS]`` on the tensor's device, or None
    channel_amax: Tensor | None  # float32 ``[K]`` on the tensor's device, or None


def measure(x: Tensor, *, histogram: bool, per_channel: bool) -> Measurement:
    """Return the statistics of a tensor ``[..., K]`` of any floating-point dtype that models compute in."""
    rows = x.detach().reshape(-1, x.shape[-1])
    counts = torch.zeros(BINS, dtype=torch.int64, device=x.device) if histogram else None
    if not rows.numel():
        amax = torch.zeros(1, device=x.device)
    elif x.device.type == "cpu":
        largest, nonfinite = observe(rows.contiguous(), None if counts is None else counts.numpy())
        amax = torch.tensor([math.nan if nonfinite else largest])
    else:
        amax = torch.linalg.vector_norm(rows, math.inf, dtype=torch.float32).view(1)
        if counts is not None:
            counts = _histogram(rows)
    channels = None
    if per_channel:
        empty = torch.zeros(rows.shape[1], device=x.device)
        channels = torch.maximum(rows.amax(0), -rows.amin(0)).float() if rows.numel() else empty
    return Measurement(amax, len(rows), counts, channels)


def head_amax(x: Tensor) -> Tensor:
    """Return the amax of each head, float32 ``[heads]``, of a tensor ``[B, heads, T, head size]``; NaN gives NaN."""
    return x.detach().abs().amax((0, 2, 3)).float()


def _histogram(rows: Tensor) -> Tensor:
    """Return the counts of `numerics.histogram.count_magnitudes`, computed on the device without reading back."""
    magnitude = rows.float().view(torch.int32) & torch.iinfo(torch.int32).max
    bins = magnitude >> (FLOAT32.mantissa_bits - MANTISSA_BITS)
    return torch.histc(bins, BINS, min=0, max=BINS - 1).long()  # one integer value per bin, including the last bin


@dataclass
class Tally:
    """The measurements of all sequences. A slot is one measured input, which several linears may share."""

    slots: Sequence[tuple[str, ...]]
    widths: Sequence[int]
    rows: dict[int, tuple[Floats, Counts]] = field(default_factory=dict)
    kv: dict[str, dict[int, tuple[Floats, Floats]]] = field(default_factory=dict)
    _histograms: dict[int, Tensor] = field(default_factory=dict)
    _channels: dict[int, Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """Number of sequences: one more than the largest index."""
        return max(self.rows, default=-1) + 1

    def add(
        self, sequence: int, inputs: Sequence[tuple[int, Measurement]], kv: Sequence[tuple[str, Tensor, Tensor]]
    ) -> None:
        """Add one forward pass of the model, or of a part of it; on an error nothing is added."""
        fetched = iter(_fetch([entry.amax for _, entry in inputs] + [t for _, k, v in kv for t in (k, v)]))
        amaxes = [float(next(fetched)[0]) for _ in inputs]
        heads = [(name, next(fetched), next(fetched)) for name, _, _ in kv]
        for (slot, _), amax in zip(inputs, amaxes, strict=True):
            if not math.isfinite(amax):
                raise non_finite_error(self.slots[slot][0], "input", sequence)
        for name, k, v in heads:
            if not (np.isfinite(k).all() and np.isfinite(v).all()):
                raise non_finite_error(name, "K or V", sequence)
        row, tokens = self.rows.setdefault(
            sequence, (np.zeros(len(self.slots), np.float32), np.zeros(len(self.slots), np.int64))
        )
        for (slot, measurement), amax in zip(inputs, amaxes, strict=True):
            row[slot] = max(row[slot], amax)
            tokens[slot] += measurement.tokens
            _accumulate(self._histograms, slot, measurement.histogram, torch.add)
            _accumulate(self._channels, slot, measurement.channel_amax, torch.maximum)
        for name, k, v in heads:
            k_total, v_total = self.kv.setdefault(name, {}).setdefault(sequence, (np.zeros_like(k), np.zeros_like(v)))
            np.maximum(k_total, k, out=k_total)
            np.maximum(v_total, v, out=v_total)

    def inputs(self, *, histogram: bool, per_channel: bool) -> dict[str, ModuleStats]:
        """Return the statistics of each linear's input by name, including slots that no token reached."""
        amax = np.zeros((len(self.slots), self.sequences), np.float32)
        tokens = np.zeros((len(self.slots), self.sequences), np.int64)
        for sequence, row in self.rows.items():
            amax[:, sequence], tokens[:, sequence] = row
        stats: dict[str, ModuleStats] = {}
        for slot, names in enumerate(self.slots):
            counts = _host(self._histograms.get(slot), BINS if histogram else None, np.int64)
            channels = _host(self._channels.get(slot), self.widths[slot] if per_channel else None, np.float32)
            stats |= dict.fromkeys(names, ModuleStats(amax[slot], tokens[slot], counts, channels))
        return stats

    def kv_stats(self) -> dict[str, KVStats]:
        """Return the statistics of each attention that ran."""
        stats = {}
        for name, by_sequence in self.kv.items():
            heads = len(next(iter(by_sequence.values()))[0])
            k_amax, v_amax = (np.zeros((self.sequences, heads), np.float32) for _ in range(2))
            for sequence, (k, v) in by_sequence.items():
                k_amax[sequence], v_amax[sequence] = k, v
            stats[name] = KVStats(k_amax, v_amax)
        return stats


def _accumulate(totals: dict[int, Tensor], slot: int, new: Tensor | None, combine: Any) -> None:
    if new is None:
        return
    total = totals.get(slot)
    totals[slot] = new.clone() if total is None else combine(total, new.to(total.device), out=total)


def _host(total: Tensor | None, size: int | None, dtype: type) -> Any:
    if size is None:
        return None
    return np.zeros(size, dtype) if total is None else total.cpu().numpy().copy()


def _fetch(tensors: Sequence[Tensor]) -> list[Floats]:
    """Return float vectors as arrays, with one copy per device."""
    fetched: list[Floats] = [np.empty(0, np.float32)] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        on_device = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[index] for index in on_device]).cpu().numpy()
        ends = np.cumsum([tensors[index].numel() for index in on_device])
        for index, part in zip(on_device, np.split(flat, ends[:-1]), strict=True):
            fetched[index] = part
    return fetched


#: Called with the path of the attention module, K and V, ``[B, KV heads, T, head size]`` each.
Listener = Callable[[str, Tensor, Tensor], None]

_lock = threading.Lock()
_listeners: dict[int, list[Callable[[Tensor, Tensor], None]]] = {}
_users: Counter[str] = Counter()
_originals: dict[str, Callable[..., Any] | None] = {}


class KVObserver:
    """Passes K and V of one model to a listener while it is open; several may be open at once."""

    def __init__(self, model: PreTrainedModel, listener: Listener) -> None:
        self._listening = {id(module): functools.partial(listener, path) for path, module in model.named_modules()}
        configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
        names = {config._attn_implementation for config in configs}
        self._names = sorted(name for name in names if isinstance(name, str))

    def __enter__(self) -> KVObserver:
        with _lock:
            for key, listen in self._listening.items():
                _listeners.setdefault(key, []).append(listen)
            for name in self._names:
                _replace(name)
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            for name in self._names:
                _restore(name)
            for key, listen in self._listening.items():
                _listeners[key].remove(listen)
                if not _listeners[key]:
                    del _listeners[key]


# Models look up their attention function by name in one table at every call. The name in the config stays, because some
# models branch on it. Models that do not use the table are not observed (Bloom, MPT, GPT-J).
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
    """Call the listeners, then the original attention function."""
    for listen in _listeners.get(id(module), ()):
        listen(key, value)
    return (original or _eager(type(module)))(module, query, key, value, *args, **kw)


def _eager(cls: type[nn.Module]) -> Callable[..., Any]:
    for base in cls.__mro__:
        function: Callable[..., Any] | None = getattr(sys.modules.get(base.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UnsupportedTensorError(cls.__name__, "its file has no eager_attention_forward; load the model with sdpa")


class Observer:
    """Records statistics of the inputs of a model's linears and experts, and of K and V of its attentions.

    with Observer(model) as observer:
        observer.run(input_ids)
    observer.inputs(), observer.kv()
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sites: Sites | None = None,
        histogram: bool = False,
        per_channel: bool = False,
    ) -> None:
        self.model, self.histogram, self.per_channel = model, histogram, per_channel
        if sites is None:
            with Checkpoint.open(str(model.config.name_or_path)) as checkpoint:
                sites = find_sites(model, checkpoint)
        self.sites = sites
        slots = [(site.names, site.width) for site in self.sites.linears]
        self._first_expert_slot = []
        for experts in self.sites.experts:
            self._first_expert_slot.append(len(slots))
            slots += [(names, experts.inner_width) for names in experts.inner]
            slots += [(names, experts.outer_width) for names in experts.outer]
        self._tally = Tally([names for names, _ in slots], [width for _, width in slots])
        self._sequence: int | None = None
        self._inputs: list[tuple[int, Measurement]] = []
        self._kv: list[tuple[str, Tensor, Tensor]] = []
        self._last: tuple[Callable[[], Tensor | None], Measurement] | None = None
        self._open = ExitStack()

    def __enter__(self) -> Observer:
        with ExitStack() as stack:
            for slot, site in enumerate(self.sites.linears):
                module = self.model.get_submodule(site.path)
                hook = module.register_forward_pre_hook(partial(self._observe_linear, slot), with_kwargs=True)
                stack.callback(hook.remove)
            for first, experts in zip(self._first_expert_slot, self.sites.experts, strict=True):
                module = self.model.get_submodule(experts.path)
                stack.callback(watch_experts(module, partial(self._observe_expert, first, len(experts.inner))))
            stack.enter_context(KVObserver(self.model, self._observe_kv))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def sequences(self) -> int:
        """Number of observed sequences: one more than the largest index."""
        return self._tally.sequences

    @contextmanager
    def sequence(self, index: int) -> Iterator[None]:
        """Record the forward passes in the block, of the whole model or of a layer, as those of one sequence."""
        self._sequence = index
        try:
            yield
            self._tally.add(index, self._inputs, self._kv)
        finally:
            self._sequence, self._last = None, None
            self._inputs, self._kv = [], []

    @torch.inference_mode()
    def run(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        """Run the decoder, without lm_head, over each row of a batch as a sequence of its own."""
        keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for ids, mask in zip(input_ids, keep, strict=True):
            row = ids[mask.bool()]
            if not row.numel():
                continue
            with self.sequence(self.sequences), fast_products():
                self.model.base_model(input_ids=row[None].to(self.model.device), use_cache=False)

    def inputs(self) -> dict[str, ModuleStats]:
        """Return the statistics of each linear's input, by its name in the checkpoint, also of unreached linears."""
        return self._tally.inputs(histogram=self.histogram, per_channel=self.per_channel)

    def kv(self) -> dict[str, KVStats]:
        """Return the statistics of K and V of each attention that ran, by its name in the checkpoint."""
        return self._tally.kv_stats()

    def _observe_linear(self, slot: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._observe_input(slot, args[0] if args else next(iter(kwargs.values())))

    def _observe_expert(self, first: int, experts: int, expert: int, outer: bool, x: Tensor, _: Tensor) -> None:
        self._observe_input(first + expert + (experts if outer else 0), x)

    def _observe_input(self, slot: int, x: Tensor) -> None:
        index = self._current_sequence()
        # Linears that share an input are called one after the other with the same tensor, which is measured once.
        if self._last is not None and self._last[0]() is x:
            measurement = self._last[1]
        else:
            measurement = measure(x, histogram=self.histogram, per_channel=self.per_channel)
            self._last = weakref.ref(x), measurement
        if x.device.type == "cpu" and not measurement.amax.isfinite():
            raise non_finite_error(self._tally.slots[slot][0], "input", index)
        self._inputs.append((slot, measurement))

    def _observe_kv(self, path: str, key: Tensor, value: Tensor) -> None:
        index = self._current_sequence()
        name, k, v = self.sites.attention_name(path), head_amax(key), head_amax(value)
        if key.device.type == "cpu" and not (k.isfinite().all() and v.isfinite().all()):
            raise non_finite_error(name, "K or V", index)
        self._kv.append((name, k, v))

    def _current_sequence(self) -> int:
        if self._sequence is None:
            raise UsageError("run an observed model inside `with observer.sequence(index):`, or with `observer.run`")
        return self._sequence
