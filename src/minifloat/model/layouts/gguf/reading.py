"""Reads GGUF files of any type: what is in one, and its weights as the plain tensors of a checkpoint."""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, TensorInfo
from minifloat.checkpoint.files import byte_view
from minifloat.errors import CheckpointError, UsageError
from minifloat.model.layouts import describe
from minifloat.model.layouts.decoded import DecodedCheckpoint
from minifloat.model.layouts.gguf.architectures import architecture_of
from minifloat.model.layouts.gguf.places import Place, Places, row_axis
from minifloat.model.runtime.config import plain_config

_DTYPE, _ITEM_BYTES = "F32", 4
#: Name of a part, by its name without numbers; the most parts that are credible.
_PART = re.compile(r"(.+)-00001-of-\d{5}\.gguf")
_MOST_PARTS = 99_999
_LATER_PART = re.compile(r".+-(?!00001)\d{5}-of-\d{5}\.gguf")
EMBEDDING = "token_embd.weight"


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a file, or of the first of several, and all tensors, each by name; weights are not read."""
    fields, tensors = _read_part(path)
    count = number_in(fields, "split.count", 1)
    if count == 1:
        return fields, tensors
    match = _PART.fullmatch(path.name)
    if match is None or number_in(fields, "split.no", -1) != 0 or not 0 < count <= _MOST_PARTS:
        raise CheckpointError(path, f"one of {count} parts; give the first, named NAME-00001-of-{count:05}.gguf")
    for at in range(1, count):
        part = path.with_name(gguf.SHARD_NAME_FORMAT.format(match[1], at + 1, count))
        others, more = _read_part(part)
        if (number_in(others, "split.no", -1), number_in(others, "split.count", 1)) != (at, count):
            raise CheckpointError(part, f"not part {at + 1} of the {count} of {path.name}; download it again")
        tensors |= more
    wanted = number_in(fields, "split.tensors.count", len(tensors))
    if len(tensors) != wanted:
        raise CheckpointError(path, f"{wanted} tensors, and its {count} parts hold {len(tensors)}; download them again")
    return fields, tensors


def is_later_part(name: str) -> bool:
    """Return whether a file name is that of a part that is read with the first one."""
    return _LATER_PART.fullmatch(name) is not None


def number_in(fields: dict[str, Any], name: str, default: int) -> int:
    """Return a number of a file's fields."""
    return int(fields[name].contents()) if name in fields else default


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        reader = gguf.GGUFReader(path)
        fields = dict(reader.fields)
        for name in fields.keys() & {"split.count", "split.no", "split.tensors.count"}:
            int(fields[name].contents())
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror or error}") from error
    except Exception as error:  # the reader checks little, so that damage ends in errors of many kinds
        if gguf.GGMLQuantizationType.__name__ in str(error):
            raise CheckpointError(
                path, f"a tensor's type is newer than the package gguf ({error}): update it"
            ) from error
        raise CheckpointError(
            path, f"no whole GGUF file ({error or type(error).__name__}); download it again"
        ) from error
    return fields, tensors


class GgufCheckpoint(Checkpoint):
    """The weights of a GGUF file, decoded to float32, under the names of a model folder, whose config they have.

    Args:
        file: The GGUF file.
        model: The folder of the model that the file was made from, or of another one of the same shapes.
    """

    def __init__(self, file: Path, model: Checkpoint) -> None:
        row = architecture_of(model.config)
        fields, self._stored = read_header(file)
        found, wanted = fields["general.architecture"].contents(), gguf.MODEL_ARCH_NAMES[row.row]
        if found != wanted:
            raise UsageError(f"{file}: a model of the architecture {found}; {model.path} is {wanted} there")
        description = describe(model)
        plain = DecodedCheckpoint(model, description) if description.weights else model
        text = plain_config(model).get_text_config(decoder=True).to_dict()
        self._places = Places(row, text)
        self.file, self.path, self.config, self.quantization_config = file, model.path, dict(plain.config), None
        self.shards, self.metadata, self.ignored_files = (file.name,), MappingProxyType({file.name: {}}), ()
        tied = bool(text.get("tie_word_embeddings"))
        self.tensors = MappingProxyType(
            {
                name: TensorInfo(name, _DTYPE, info.shape, file.name, 0, math.prod(info.shape) * _ITEM_BYTES)
                for name, info in plain.tensors.items()
                if self._places.of(name) and not (tied and name == "lm_head.weight")
            }
        )
        for info in self.tensors.values():
            self._check(info)
        self._last: tuple[str, npt.NDArray[np.float32]] | None = None
        self._lock = threading.Lock()

    @property
    def readable(self) -> bool:
        return True

    def close(self) -> None:
        """Forget what was read; the file is mapped as long as the object exists."""
        self._last = None

    def shard_path(self, shard: str) -> Path:
        return self.file

    def stored_bytes(self, info: TensorInfo) -> int:
        """Return the bytes that a tensor takes in the file; of one that experts share, its part."""
        total = 0
        for place in self._places.of(info.name):
            tensor = self._stored[place.name]
            scale = self._scale_of(place)
            nbytes = int(tensor.n_bytes) + (0 if scale is None else scale.nbytes)
            total += nbytes // (1 if place.expert is None else int(tensor.shape[-1]))
        return total

    def read_into(self, info: TensorInfo, buffer: memoryview | npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill `buffer` with the float32 bytes of a tensor from byte `start` on. Thread-safe."""
        view = byte_view(buffer)
        if start < 0 or start + len(view) > info.nbytes:
            raise ValueError(f"{info.name}: bytes {start} to {start + len(view)} of a tensor of {info.nbytes}")
        with self._lock:
            if self._last is None or self._last[0] != info.name:
                self._last = info.name, self._decoded(info)
            values = self._last[1]
        view[:] = values.reshape(-1).view(np.uint8)[start : start + len(view)].data

    def _check(self, info: TensorInfo) -> None:
        for place in self._places.of(info.name):
            tensor = self._stored.get(place.name)
            if tensor is None:
                raise CheckpointError(self.file, f"no tensor {place.name}: it is not a file of {self.path}")
            found = tuple(int(extent) for extent in reversed(tensor.shape))
            shape = _upright(np.broadcast_to(np.float32(0), info.shape))
            axis = row_axis(shape.shape, place.name)
            rows = shape[:, place.rows] if axis else shape[place.rows]
            wanted = rows.shape if place.expert is None else (found[0], *rows.shape)
            fewer = place.name == EMBEDDING and found[0] < wanted[0]  # llama.cpp's converter cuts off unused tokens
            if found != wanted and not (fewer and found[1:] == wanted[1:]):
                raise CheckpointError(
                    self.file, f"{place.name} is {list(found)}, and {info.name} of {self.path} gives {list(wanted)}"
                )

    def _scale_of(self, place: Place) -> Any:
        tensor = self._stored.get(place.name.removesuffix(".weight") + ".scale")
        return None if tensor is None else tensor.data

    def _decoded(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        out = np.zeros(info.shape, np.float32)
        target = _upright(out)
        for place in self._places.of(info.name):
            tensor, index = self._stored[place.name], ... if place.expert is None else place.expert
            values = gguf.quants.dequantize(np.ascontiguousarray(tensor.data[index]), tensor.tensor_type)
            scale = self._scale_of(place)
            if scale is not None:  # one, or one for each expert
                scale = scale if place.expert is None else scale[place.expert]
                values = values * (scale.reshape(-1, 1, 1) if values.ndim > 2 else scale)
            values = values - np.float32(place.shift) if place.shift else values
            if row_axis(target.shape, place.name):
                target[:, place.rows] = values
            else:
                (target if len(values) == len(target) else target[: len(values)])[place.rows] = values
        return out


def _upright(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return a view of fused experts ``[E, K, N]`` as ``[E, N, K]``; other tensors as they are."""
    return values.swapaxes(-1, -2) if values.ndim > 2 else values
