"""The tensors of a checkpoint by the names of a plain one: a quantized weight is ``<module>.weight``."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from minifloat.checkpoint import Checkpoint
from minifloat.errors import CheckpointError, ShapeError, UnsupportedTensorError
from minifloat.model.layouts import Description, StoredWeight, read_weight
from minifloat.model.runtime.config import config_dtype
from minifloat.numerics.tensor import QuantizedTensor

#: Number of weights that are read ahead.
DEPTH = 2


class ReadAhead:
    """Reads weights on a second thread, in an announced order, while others are being packed."""

    def __init__(self, checkpoint: Checkpoint, order: Iterable[StoredWeight]) -> None:
        self._checkpoint = checkpoint
        self._rest = iter(order)
        self._reads: dict[str, Future[QuantizedTensor]] = {}
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
            self._reads[stored.module] = self._pool.submit(read_weight, self._checkpoint, stored)


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
            name = f"{stored.module}.weight" if stored.expert is None else stored.module.rpartition(".")[0]
            self.quantized.setdefault(name, []).append(stored)
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
        return stored[0].shape if stored[0].expert is None else (len(stored), *stored[0].shape)

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
