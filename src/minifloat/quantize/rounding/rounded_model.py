"""`RoundedModel`: the output tensors that rounding with data made, and the record of how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.array_file import ArrayFile, ArrayFormat
from minifloat.checkpoint.schema import any_object

Bytes = npt.NDArray[np.uint8]

#: The results of one layer, or of the comparison.
LAYER_FORMAT = ArrayFormat("rounded layer", 1, any_object, "delete the work folder")


class RoundedModel:
    """The output tensors that rounding made, on disk."""

    def __init__(self, files: Sequence[ArrayFile]) -> None:
        self._by_name = {name: file for file in files for name in file.names}
        records = [file.record for file in files]
        self.weights: dict[str, Mapping[str, Any]] = {
            row["module"]: row for record in records for row in record.get("weights", ())
        }
        self.folds: list[Mapping[str, Any]] = [row for record in records for row in record.get("folds", ())]
        self.inputs: list[Mapping[str, Any]] = [row for record in records for row in record.get("inputs", ())]
        self.kv: list[Mapping[str, Any]] = [row for record in records for row in record.get("kv", ())]
        self.held_out: Mapping[str, Any] = records[-1]["held_out"]  # on text that nothing else looked at
        self.choosing: Mapping[str, Any] = records[-1].get("choosing", {})  # on the text that choices were made on
        self.seen: Mapping[str, Any] = records[-1].get("seen", {})  # on the text that codes were chosen with

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def read(self, name: str) -> Bytes:
        return self._by_name[name].read(name)
