"""`RoundedModel`: the output tensors that rounding with data made, and the record of how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from minifloat.checkpoint.array_file import ArrayContent, ArrayFile, ArrayFormat, numpy_arrays
from minifloat.checkpoint.schema import any_object
from minifloat.model.plan.tensor_plan import Part
from minifloat.numerics.formats import FLOAT32
from minifloat.numerics.tensor import QuantizedTensor

Bytes = npt.NDArray[np.uint8]

#: The results of one layer, of the comparison, or of tuning.
LAYER_FORMAT = ArrayFormat("rounded layer", 1, any_object, "delete the work folder")


def layer_content(tensors: Mapping[str, Bytes], record: Mapping[str, Any]) -> ArrayContent:
    """Return the results of a layer: output tensors under their names in the checkpoint, and a record of how."""
    return ArrayContent(record, numpy_arrays(tensors))


class RoundedModel:
    """The output tensors that rounding made, on disk."""

    def __init__(self, files: Sequence[ArrayFile]) -> None:
        self.files = tuple(files)
        self._by_name = {name: file for file in files for name in file.names}
        records = [file.record for file in files]
        self.weights: dict[str, Mapping[str, Any]] = {
            row["module"]: row for record in records for row in record.get("weights", ())
        }
        self.folds: list[Mapping[str, Any]] = [row for record in records for row in record.get("folds", ())]
        self.inputs: list[Mapping[str, Any]] = [row for record in records for row in record.get("inputs", ())]
        self.kv: list[Mapping[str, Any]] = [row for record in records for row in record.get("kv", ())]
        self.held_out: Mapping[str, Any] = records[-1]["held_out"] or {}  # on text that nothing else looked at
        self.choosing: Mapping[str, Any] = records[-1].get("choosing", {})  # on the text that choices were made on
        self.seen: Mapping[str, Any] = records[-1].get("seen", {})  # on the text that codes were chosen with
        self.tuning: Mapping[str, Any] | None = records[-1].get("tuning")  # what tuning did
        self.damage: Mapping[str, Any] = next((record["damage"] for record in records if "damage" in record), {})

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def read(self, name: str) -> Bytes:
        """Return the bytes of an output tensor."""
        return self._by_name[name].read(name)

    def quantized(self, part: Part) -> QuantizedTensor:
        """Return a weight that was rounded with data."""
        spec, names = part.scheme.weight, part.tensors
        rows, cols = part.shape
        scale_dtype = torch.float32 if spec.scale is FLOAT32 else torch.uint8
        codes = torch.from_numpy(self.read(names.codes.name)).reshape(rows, cols * spec.element.bits // 8)
        scale = torch.from_numpy(self.read(names.scale.name)).view(scale_dtype)
        divisor = None
        if names.global_scale is not None:
            divisor = torch.from_numpy(self.read(names.global_scale.name)).view(torch.float32).reshape(())
        return QuantizedTensor(
            spec, part.shape, codes, scale.reshape(spec.granularity.scale_shape(part.shape)), divisor
        )
