"""`RoundedModel`: the output tensors that rounding with data made, and the record of how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minifloat.rounding.layer_file import Bytes, LayerFile


class RoundedModel:
    """The output tensors that rounding made, on disk.

    Args:
        files: A file per layer, and one of the comparison on held-out text.

    Attributes:
        weights: How each weight was rounded, by module.
        folds: The scales that were folded, layer by layer.
        held_out: The divergence from the original model on held-out text.
    """

    def __init__(self, files: Sequence[LayerFile]) -> None:
        self._by_name = {name: file for file in files for name in file.names}
        records = [file.record for file in files]
        self.weights: dict[str, Mapping[str, Any]] = {
            row["module"]: row for record in records for row in record.get("weights", ())
        }
        self.folds: list[Mapping[str, Any]] = [row for record in records for row in record.get("folds", ())]
        self.held_out: Mapping[str, Any] = records[-1]["held_out"]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def read(self, name: str) -> Bytes:
        """Return the bytes of an output tensor.

        Raises:
            StorageError: The system refused to read.
        """
        return self._by_name[name].read(name)
