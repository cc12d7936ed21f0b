"""Hessians of a model in a folder beside its activation statistics, so that one pass over the text serves every scheme.

The inputs of the original model do not depend on how its weights are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minifloat.calibration.stats import ModelIdentity
from minifloat.checkpoint.array_file import (
    Array,
    ArrayContent,
    ArrayFile,
    ArrayFormat,
    read_arrays,
    write_arrays,
)
from minifloat.checkpoint.files import storage_errors
from minifloat.checkpoint.schema import Check, any_object, exact_fields, flag, list_of, map_of, natural, or_null, text
from minifloat.errors import StatsError
from minifloat.model.runtime.tensors import TORCH_DTYPES
from minifloat.quantize.rounding.stages import Stage

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_MANIFEST = "hessians.safetensors"

_STAGE: dict[str, Check] = {
    "path": text,
    "slots": list_of(list_of(text)),
    "width": natural,
    "outer": or_null(flag),
    "tokens": list_of(natural),
}
HESSIANS_FORMAT = ArrayFormat("Hessians", 2, exact_fields({"stages": list_of(exact_fields(_STAGE))}), "calibrate again")
_MANIFEST_FORMAT = ArrayFormat(
    "list of Hessians",
    2,
    exact_fields({"model": map_of(text), "run": text, "data": any_object, "tokens": natural, "layers": list_of(text)}),
    "calibrate again",
    {},
)


def hessians_path(stats: Path) -> Path:
    """Return the folder of the Hessians beside a file of statistics."""
    return stats.with_name(f"{stats.stem}.hessians")


def layer_path(folder: Path, index: int) -> Path:
    """Return the file of a layer in a folder of Hessians."""
    return folder / f"layer-{index}.safetensors"


def pack_symmetric(matrix: Tensor) -> Tensor:
    """Return the upper triangle of a symmetric matrix ``[K, K]``, row by row, as ``[K (K + 1) / 2]``."""
    return torch.cat([row[index:] for index, row in enumerate(matrix)])


def unpack_symmetric(packed: Tensor, width: int) -> Tensor:
    """Return the symmetric matrix ``[K, K]`` with this upper triangle."""
    matrix, first = packed.new_empty(width, width), 0
    for index in range(width):
        row = packed[first : first + width - index]
        matrix[index, index:], matrix[index:, index] = row, row
        first += len(row)
    return matrix


@dataclass(frozen=True)
class SavedLayer:
    """What is stored of one layer, in a file."""

    file: ArrayFile
    stages: tuple[Stage, ...]
    tokens: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, file: ArrayFile) -> SavedLayer:
        rows = file.record["stages"]
        if any(len(row["tokens"]) != len(row["slots"]) for row in rows):
            raise StatsError(file.path, "not valid: expected a number of tokens for each expert; calibrate again")
        stages = [Stage(row["path"], tuple(map(tuple, row["slots"])), row["width"], outer=row["outer"]) for row in rows]
        return cls(file, tuple(stages), tuple(tuple(row["tokens"]) for row in rows))

    def hessian(self, stage: int, expert: int) -> Tensor:
        """Return X'X / tokens of a expert, float32 ``[K, K]``, zero if it saw no token."""
        packed, width = self._read(f"hessian.{stage}.{expert}"), self.stages[stage].width
        if packed is None or packed.shape != (width * (width + 1) // 2,):
            raise StatsError(
                self.file.path, f"the Hessian {stage}.{expert} is missing or has another size; calibrate again"
            )
        return unpack_symmetric(packed, width)

    def held_out(self, stage: int, expert: int) -> Tensor | None:
        """Return held-out inputs of a expert, float32 ``[T, K]``; None if no token reached it."""
        rows = self._read(f"held_out.{stage}.{expert}")
        return None if rows is None else rows.float()

    def largest(self, stage: int, expert: int) -> Tensor | None:
        """Return the largest input of each channel of a expert, float32 ``[K]``; None if no token reached it."""
        return self._read(f"amax.{stage}.{expert}")

    def fold_sample(self, stage: int, expert: int, held_out: bool) -> Tensor | None:
        """Return inputs to choose or to judge folds on, as `minifloat.quantize.rounding.layer_fold.SampleInputs`."""
        rows = self._read(fold_sample_name(stage, expert if self.stages[stage].outer else 0, held_out))
        return None if rows is None else rows.float()

    def _read(self, name: str) -> Tensor | None:
        if name not in self.file.names:
            return None
        info = self.file.info(name)
        return torch.from_numpy(self.file.read(name)).view(TORCH_DTYPES[info.dtype]).reshape(info.shape)


def fold_sample_name(stage: int, expert: int, held_out: bool) -> str:
    """Return the name of a sample for folds in the file of a layer."""
    return f"fold.{stage}.{expert}.{'held_out' if held_out else 'calibration'}"


def layer_hessians(
    stages: Sequence[Stage], tokens: Sequence[Sequence[int]], tensors: Mapping[str, Tensor]
) -> ArrayContent:
    rows = [
        {"path": stage.path, "slots": stage.experts, "width": stage.width, "outer": stage.outer, "tokens": list(counts)}
        for stage, counts in zip(stages, tokens, strict=True)
    ]
    return ArrayContent({"stages": rows}, {name: _array(tensor) for name, tensor in tensors.items()})


def _array(tensor: Tensor) -> Array:
    data = tensor.contiguous()
    return _DTYPE_NAMES[data.dtype], tuple(data.shape), data.reshape(-1).view(torch.uint8).numpy()


def read_saved_layer(path: Path) -> SavedLayer:
    """Return what is stored of a layer, after checking its digest."""
    try:
        return SavedLayer.of(read_arrays(path, HESSIANS_FORMAT))
    except FileNotFoundError:
        raise StatsError(path, "no such file: the Hessians are incomplete; run `minifloat calibrate` again") from None


@dataclass(frozen=True)
class SavedHessians:
    """The Hessians of all layers of a model."""

    folder: Path
    model: ModelIdentity
    run: str
    data: Mapping[str, Any]
    tokens: int
    layers: tuple[str, ...]

    def save(self) -> None:
        """Write the list of layers, which makes the folder complete."""
        record = {key: value for key, value in asdict(self).items() if key != "folder"}
        write_arrays(self.folder / _MANIFEST, _MANIFEST_FORMAT, ArrayContent(record, {}))

    @classmethod
    def load(cls, folder: Path) -> SavedHessians:
        try:
            record = read_arrays(folder / _MANIFEST, _MANIFEST_FORMAT).record
        except FileNotFoundError:
            raise StatsError(
                folder, "no Hessians: `minifloat calibrate MODEL STATS --data DATA --hessians` writes them beside STATS"
            ) from None
        identity = ModelIdentity(**{each.name: record["model"].get(each.name, "") for each in fields(ModelIdentity)})
        return cls(folder, identity, record["run"], record["data"], record["tokens"], tuple(record["layers"]))

    @staticmethod
    def exist(folder: Path) -> bool:
        """Return whether a folder holds complete Hessians."""
        return (folder / _MANIFEST).exists()

    @staticmethod
    def discard(folder: Path) -> None:
        """Make a folder incomplete, so that its layers can be written again."""
        with storage_errors(folder / _MANIFEST, "delete"):
            (folder / _MANIFEST).unlink(missing_ok=True)

    def layer(self, index: int) -> SavedLayer:
        layer = read_saved_layer(layer_path(self.folder, index))
        if layer.file.digest != self.layers[index]:
            raise StatsError(layer.file.path, f"not the layer that {_MANIFEST} names; calibrate again")
        return layer
