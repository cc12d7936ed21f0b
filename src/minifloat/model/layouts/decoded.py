"""`DecodedCheckpoint`: a quantized checkpoint read as the plain one that its codes and scales stand for.

A quantized weight is float32 there, decoded row by row as it is read; whatever takes a plain `Checkpoint` takes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint import Checkpoint, OutputTensor, TensorInfo
from minifloat.checkpoint.files import byte_view
from minifloat.errors import UsageError
from minifloat.model.architecture.families import family_of
from minifloat.model.layouts import describe, fp8
from minifloat.model.layouts.contradictions import refuse_unknown_quantization
from minifloat.model.layouts.reading import Bytes, Floats, read_rows, stored_ranges
from minifloat.model.layouts.stored import Description, StoredWeight
from minifloat.model.layouts.writing import WriteLayout

_DTYPE = "F32"
_ITEM_BYTES = 4
#: Dtype in a config -> safetensors dtype.
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
#: Keys of a config that say how weights are stored.
_QUANTIZATION_KEYS = ("quantization_config", "compression_config", "quantization", "expert_dtype")


class DecodedCheckpoint(Checkpoint):
    """The plain view of a quantized checkpoint."""

    def __init__(self, stored: Checkpoint, description: Description) -> None:
        self.stored, self.description = stored, description
        self.path, self.shards, self.metadata = stored.path, stored.shards, stored.metadata
        self.ignored_files = stored.ignored_files
        self.config = without_quantization(stored.config)
        self.quantization_config = None
        by_codes: dict[str, list[StoredWeight]] = {}
        for weight in description.weights.values():
            by_codes.setdefault(weight.codes, []).append(weight)
        used = {name for weight in description.weights.values() for name in weight.tensors} | description.auxiliary
        self.weights: dict[str, tuple[StoredWeight, ...]] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in stored.tensors.items():
            if name in by_codes:
                plain = plain_tensor(by_codes[name], _DTYPE)
                tensors[plain.name] = TensorInfo(plain.name, _DTYPE, plain.shape, info.shard, info.offset, plain.nbytes)
                self.weights[plain.name] = tuple(by_codes[name])
            elif name not in used:
                tensors[name] = info
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @property
    def readable(self) -> bool:
        return self.stored.readable

    @property
    def dropped(self) -> tuple[TensorInfo, ...]:
        """The tensors of the source that no plain tensor is made from: scales of inputs and of the KV cache."""
        kept = {name for info in self.tensors.values() for name in self._sources(info)}
        return tuple(info for name, info in self.stored.tensors.items() if name not in kept)

    def close(self) -> None:
        self.stored.close()

    def stored_bytes(self, info: TensorInfo) -> int:
        """Return the bytes that a tensor takes on disk, scales included."""
        return sum(self.stored.tensors[name].nbytes for name in self._sources(info))

    def _sources(self, info: TensorInfo) -> tuple[str, ...]:
        """Return the names of the stored tensors that a plain tensor is made from."""
        weights = self.weights.get(info.name)
        if weights is None:
            return (info.name,)
        return tuple(dict.fromkeys(name for weight in weights for name in weight.tensors if name != weight.input_scale))

    def read_into(self, info: TensorInfo, buffer: memoryview | npt.NDArray[np.uint8], start: int = 0) -> None:
        """Fill `buffer` with the bytes of a tensor from byte `start` on; quantized weights are decoded. Thread-safe."""
        weights = self.weights.get(info.name)
        if weights is None:
            self.stored.read_into(info, buffer, start)
            return
        view = np.frombuffer(byte_view(buffer), np.uint8)
        if start < 0 or start + view.nbytes > info.nbytes:
            raise ValueError(f"{info.name}: bytes {start} to {start + view.nbytes} of a tensor of {info.nbytes}")
        matrix_bytes = info.nbytes // len(weights)
        done = 0
        while done < view.nbytes:
            matrix, first = divmod(start + done, matrix_bytes)
            count = min(matrix_bytes - first, view.nbytes - done)
            view[done : done + count] = self._matrix_bytes(weights[matrix], first, count)
            done += count

    def _matrix_bytes(self, weight: StoredWeight, start: int, count: int) -> Bytes:
        rows, cols = weight.shape
        if weight.expert is not None:  # the plain tensor is transposed
            matrix = np.ascontiguousarray(read_rows(self.stored, weight, 0, rows).T)
            return matrix.reshape(-1).view(np.uint8)[start : start + count]
        row_bytes = cols * _ITEM_BYTES
        first = start // row_bytes
        decoded = read_rows(self.stored, weight, first, -(-(start + count) // row_bytes))
        return decoded.reshape(-1).view(np.uint8)[start - first * row_bytes :][:count]

    def read_rows(self, info: TensorInfo, matrix: int, start: int, stop: int, out: Floats | None = None) -> Floats:
        """Return rows of a quantized linear ``[N, K]``, float32, also where the plain tensor is transposed."""
        return read_rows(self.stored, self.weights[info.name][matrix], start, stop, out)

    def stored_chunks(self, info: TensorInfo, first: int, count: int, nbytes: int) -> Iterator[Bytes]:
        """Yield what is stored of quantized weights, codes first, in chunks of at most `nbytes`, for a digest."""
        for weight in self.weights[info.name][first : first + count]:
            for source, offset, total in stored_ranges(self.stored, weight):
                for start in range(0, total, nbytes):
                    chunk = np.empty(min(nbytes, total - start), np.uint8)
                    self.stored.read_into(source, chunk, offset + start)
                    yield chunk

    def shard_path(self, shard: str) -> Any:
        return self.stored.shard_path(shard)


def plain_tensor(weights: list[StoredWeight], dtype: str) -> OutputTensor:
    """Return the plain tensor of a weight, or of the fused experts of gpt-oss: ``[E, K, N]``."""
    first = weights[0]
    if first.expert is None:
        return OutputTensor(f"{first.module}.weight", dtype, first.shape)
    return OutputTensor(first.module.rpartition(".")[0], dtype, (len(weights), first.shape[1], first.shape[0]))


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in config.items() if key not in _QUANTIZATION_KEYS}
    nested = plain.get("text_config")
    if isinstance(nested, dict):
        plain["text_config"] = without_quantization(nested)
    return plain


def language_configs(config: Mapping[str, Any]) -> Iterator[Any]:
    yield config
    if isinstance(config.get("text_config"), dict):
        yield config["text_config"]


def config_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype of the plain model as its config names it; bfloat16 if it does not."""
    names = (part.get("dtype") or part.get("torch_dtype") for part in language_configs(config))
    return next((str(name).removeprefix("torch.") for name in names if name), "bfloat16")


def plain_dtype(config: Mapping[str, Any]) -> str:
    """Return the safetensors dtype of the plain model: of its config, or BF16 if that names none of `DTYPES`."""
    return DTYPES.get(config_dtype(config), DTYPES["bfloat16"])


#: Key by which some models state the format of their experts, and its value for E4M3 in blocks.
_EXPERT_DTYPE, _FP8 = "expert_dtype", "fp8"


def quantized_model_config(
    source: Mapping[str, Any], layout: WriteLayout, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    config = without_quantization(source)
    # without the key vLLM takes experts for MXFP4 (0.32.0, models/deepseek_v4/quant_config.py)
    if layout.name == fp8.NAME and family_of(source).states_expert_dtype:
        config[_EXPERT_DTYPE] = _FP8
    return config | {"quantization_config": dict(quantization)}


def plain_view(checkpoint: Checkpoint) -> DecodedCheckpoint:
    description = describe(checkpoint)
    if not description.weights:
        raise UsageError(f"{checkpoint.path} is not quantized: leave --from-quantized out")
    refuse_unknown_quantization(checkpoint, description)
    return DecodedCheckpoint(checkpoint, description)
