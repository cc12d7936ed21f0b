"""The tensors of a checkpoint by the names of a plain one, its KV scales, and the device and memory that they go to."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, KernelUnavailable, ShapeError, UnsupportedTensorError, UsageError
from minifloat.model.layouts import Description, StoredWeight, read_weight
from minifloat.model.layouts.stored import kv_scale_of
from minifloat.model.runtime.config import config_dtype
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import CHANNEL, TENSOR, Granularity
from minifloat.numerics.tensor import QuantizedTensor

#: Number of weights that are read ahead.
DEPTH = 2
#: References to an array that only a deque holds, and the call that counts them.
_UNUSED = 2


class _Buffers:
    """Memory for codes of weights, used again for weights of the same size: new memory takes longer than reading."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[npt.NDArray[np.uint8]]] = {}

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return memory that no array uses, undefined."""
        kept = self._kept.get(nbytes)
        if kept is None:  # most often the only weight of its size, as an embedding is: not kept
            self._kept[nbytes] = deque(maxlen=DEPTH + 2)
            return np.empty(nbytes, np.uint8)
        for _ in range(len(kept)):
            kept.rotate()
            if sys.getrefcount(kept[0]) == _UNUSED:
                return kept[0][:]
        kept.append(np.empty(nbytes, np.uint8))
        return kept[-1][:]


class ReadAhead:
    """Reads weights on a second thread, in an announced order, while others are being packed."""

    def __init__(self, checkpoint: Checkpoint, order: Iterable[StoredWeight]) -> None:
        self._checkpoint = checkpoint
        self._rest = iter(order)
        self._reads: dict[str, Future[QuantizedTensor]] = {}
        self._empty = _Buffers().empty
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="minifloat-read")
        for _ in range(DEPTH):
            self._read_next()

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._reads.clear()

    def read(self, stored: StoredWeight) -> QuantizedTensor:
        read = self._reads.pop(stored.module, None)
        if read is None:
            return read_weight(self._checkpoint, stored)
        weight = read.result()
        self._read_next()
        return weight

    def _read_next(self) -> None:
        stored = next(self._rest, None)
        if stored is not None:
            self._reads[stored.module] = self._pool.submit(read_weight, self._checkpoint, stored, self._empty)


_LOG = logging.getLogger(__name__)

#: Safetensors dtype of a tensor that belongs to no quantized weight -> torch dtype.
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensors:
    """The tensors of an open checkpoint under the names of a plain checkpoint."""

    def __init__(self, checkpoint: Checkpoint, description: Description) -> None:
        self.checkpoint, self.description = checkpoint, description
        self.quantized: dict[str, list[StoredWeight]] = {}
        for stored in sorted(description.weights.values(), key=lambda weight: weight.expert or 0):
            self.quantized.setdefault(stored.plain_name, []).append(stored)
        used = {name for weight in description.weights.values() for name in weight.tensors} | description.auxiliary
        self.plain = [name for name in checkpoint.tensors if name not in used]
        self.read_weight: Callable[[StoredWeight], QuantizedTensor] = functools.partial(read_weight, checkpoint)

    @property
    def names(self) -> list[str]:
        return [*self.plain, *self.quantized]

    def dtype(self) -> torch.dtype:
        """Return the dtype that config.json names, else that of the first plain floating tensor."""
        stored = (TORCH_DTYPES.get(self.checkpoint.tensors[name].dtype) for name in self.plain)
        first = next((dtype for dtype in stored if dtype is not None and dtype.is_floating_point), torch.float32)
        return config_dtype(self.checkpoint) or first

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a tensor has in the plain checkpoint: ``[E, N, K]`` for fused experts."""
        stored = self.quantized.get(name)
        if stored is None:
            return self.checkpoint.tensors[name].shape
        return (len(stored), *stored[0].shape) if stored[0].fused else stored[0].shape

    @contextlib.contextmanager
    def reading_ahead(self, names: Iterable[str]) -> Iterator[None]:
        """Read quantized weights on a second thread, while the caller packs those it has."""
        with ReadAhead(self.checkpoint, (weight for name in names for weight in self.quantized.get(name, ()))) as ahead:
            direct, self.read_weight = self.read_weight, ahead.read
            try:
                yield
            finally:
                self.read_weight = direct

    def read_plain(self, name: str, dtype: torch.dtype) -> Tensor:
        info = self.checkpoint.tensors[name]
        stored = TORCH_DTYPES.get(info.dtype)
        if stored is None or stored.is_floating_point != dtype.is_floating_point:
            fitting = [key for key, known in TORCH_DTYPES.items() if known.is_floating_point == dtype.is_floating_point]
            raise UnsupportedTensorError(name, f"the model has {dtype} here; expected {fitting}, found {info.dtype}")
        return torch.from_numpy(self.checkpoint.read(name)).view(stored).reshape(info.shape)

    def refuse_surplus(self, architecture: str, names: Sequence[str], ignorable: re.Pattern[str]) -> None:
        """Raise an error for tensors that the model has no place for; `ignorable` ones are dropped with a warning."""
        lost = [name for name in names if not ignorable.search(name)]
        if lost:
            raise self.error(
                f"{len(lost)} tensors have no place in {architecture}: {listing(lost)}; "
                "the config is of another model, or transformers is too old for this one"
            )
        if names:
            _LOG.warning("%d tensors are not used by the model: %s", len(names), listing(names))

    def refuse_missing(self, architecture: str, names: Sequence[str]) -> None:
        """Raise a CheckpointError that names the parameters without a tensor, if there are any."""
        if names:
            raise self.error(f"{len(names)} parameters of {architecture} have no tensor: {listing(names)}")

    def refuse_doubled(self, parameter: str, names: Sequence[str]) -> None:
        """Raise a CheckpointError if several tensors would be the same parameter."""
        if len(names) > 1:
            raise self.error(f"{listing(names)} are all the parameter {parameter}; expected one of them")

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(self.checkpoint.path, problem)


def check_shape(parameter: str, expected: Sequence[int], found: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ShapeError(
            parameter, f"the config expects {list(expected)}, the checkpoint holds {list(found)}: not the same model"
        )


def warn_of_dequantized(names: Sequence[str]) -> None:
    """Log the quantized weights that are held dequantized, if there are any."""
    if names:
        _LOG.warning(
            "%d quantized weights are held dequantized, because no quantized module can take their place: %s",
            len(names),
            listing(names),
        )


def ignorable_names(config: Any, patterns: Iterable[str] = ()) -> re.Pattern[str]:
    """Return the pattern of tensor names that a model may leave unused."""
    text_config = config.get_text_config()
    first = getattr(text_config, "num_hidden_layers", 0)
    prediction_layers = getattr(text_config, "num_nextn_predict_layers", 0) or 0
    alternatives = [
        *patterns,
        r"rotary_emb\.inv_freq$",
        r"(^|\.)position_ids$",
        *(rf"(^|\.)layers\.{first + index}\." for index in range(prediction_layers)),
    ]
    return re.compile("|".join(f"({pattern})" for pattern in alternatives))


def listing(names: Sequence[str], shown: int = 4) -> str:
    """Return the first names and how many more there are, for messages."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


#: Compute capability of Ampere, the first with BF16 arithmetic.
_OLDEST = (8, 0)


def device_named(name: str) -> torch.device:
    """Return the device of a name: "cpu", "cuda" (the current GPU) or "cuda:N"."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device: expected cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise KernelUnavailable(f"device {name}: torch {torch.__version__} sees no NVIDIA GPU here")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise KernelUnavailable(f"device {name}: torch sees {torch.cuda.device_count()} GPUs")
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        found = ".".join(map(str, capability))
        raise KernelUnavailable(f"device {name}: compute capability {found}; the kernels need 8.0 (Ampere) or newer")
    return torch.device("cuda", index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, on which kernels are launched; each thread begins with the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


#: Source: malloc.h of glibc; its own adjustment of the thresholds ends at DEFAULT_MMAP_THRESHOLD_MAX and twice that.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 32 << 20
#: Pieces of this many bytes and more are mapped one by one while a model is loaded.
_PIECE = 256 << 10


@contextlib.contextmanager
def returned_when_freed() -> Iterator[None]:
    """Within the context, return large pieces to the system when they are freed; afterwards glibc reuses them again.

    glibc keeps freed pieces of up to 32 MiB in heaps: a BF16 model of 2.2 GB, read weight by weight, held 4.2 GB.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _PIECE)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _LARGEST)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        library.malloc_trim(0)


#: (k_scale, v_scale) by the name of the attention module in the checkpoint; they multiply to dequantize.
KVScales = Mapping[str, tuple[float, float]]
Scales = tuple[float, ...]
#: The same, one scale for each key-value head.
KVHeadScales = Mapping[str, tuple[Scales, Scales]]


def kv_scales(checkpoint: Checkpoint, description: Description) -> KVScales | None:
    """Return the scales of a checkpoint's FP8 KV cache, one for each layer's keys and one for its values."""
    found = _read_scales(checkpoint, description, (TENSOR,), 1)
    return None if found is None else {name: (k[0], v[0]) for name, (k, v) in found.items()}


def kv_head_scales(checkpoint: Checkpoint, description: Description, kv_heads: int) -> KVHeadScales | None:
    """Return the scales of a checkpoint's FP8 KV cache for each key-value head."""
    found = _read_scales(checkpoint, description, (TENSOR, CHANNEL), kv_heads)
    if found is None:
        return None
    pairs = {name: tuple(x * kv_heads if len(x) == 1 else x for x in pair) for name, pair in found.items()}
    return {name: (k, v) for name, (k, v) in pairs.items()}


def _read_scales(
    checkpoint: Checkpoint, description: Description, granularities: Collection[Granularity], most: int
) -> KVHeadScales | None:
    declared = description.kv
    if declared is not None and (declared.element is not E4M3 or declared.granularity not in granularities):
        _LOG.warning(
            "%s declares a KV cache in %s per %s, which is not simulated; only E4M3 per %s is",
            checkpoint.path,
            declared.element.name,
            declared.granularity,
            " or ".join(map(str, granularities)),
        )
        return None
    scales: dict[str, dict[str, Scales]] = {}
    for name in checkpoint.tensors:
        scale_of = kv_scale_of(name)
        if scale_of is not None:
            attention, projection = scale_of
            scales.setdefault(attention, {})[projection] = _scale(checkpoint, name, most)
    if declared is None and not scales:
        return None
    return {name: (pair.get("k") or pair["v"], pair.get("v") or pair["k"]) for name, pair in scales.items()}


def _scale(checkpoint: Checkpoint, name: str, most: int) -> Scales:
    info = checkpoint.tensors[name]
    if math.prod(info.shape) not in (1, most) or info.dtype not in TORCH_DTYPES:
        expected = "one scale of the KV cache" + (f", or {most}" if most > 1 else "")
        raise UnsupportedTensorError(
            name, f"expected {expected}, found {info.dtype} {list(info.shape)}; others are not simulated"
        )
    tensor = torch.from_numpy(checkpoint.read(name)).view(TORCH_DTYPES[info.dtype])
    values = tuple(map(float, tensor.flatten().tolist()))
    bad = [value for value in values if not 0 < value < math.inf]
    if bad:
        raise CheckpointError(checkpoint.path, f"{name}: a scale is a positive number, found {bad[0]}")
    return values
