"""The results of one layer in a file: the output tensors that replace those of a plain cast, and a record of how.

The tensors have the names, and hold the bytes, of the output checkpoint. The record is in the metadata of the header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minifloat.checkpoint.files import byte_view, open_regular, read_exactly, written_whole
from minifloat.checkpoint.header import encode_header, read_header, strict_json
from minifloat.checkpoint.tensors import OutputTensor, TensorInfo
from minifloat.errors import CheckpointError

_FORMAT = "minifloat rounded layer"

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class LayerResult:
    """The results of a layer, about to be written.

    Attributes:
        tensors: Output tensor name -> its bytes.
    """

    tensors: Mapping[str, Bytes]
    record: Mapping[str, Any]


@dataclass(frozen=True)
class LayerFile:
    """The results of a layer in a file."""

    path: Path
    record: Mapping[str, Any]
    _tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The names of the output tensors in the file."""
        return frozenset(self._tensors)

    def read(self, name: str) -> Bytes:
        """Return the bytes of an output tensor."""
        info = self._tensors[name]
        data = np.empty(info.nbytes, np.uint8)
        descriptor, _ = open_regular(self.path)
        try:
            read_exactly(descriptor, byte_view(data), info.offset, self.path)
        finally:
            os.close(descriptor)
        return data


def write_layer(result: LayerResult | LayerFile, path: Path) -> None:
    """Write the results of a layer in one step."""
    assert isinstance(result, LayerResult)
    content = json.dumps(result.record)
    outputs = [OutputTensor(name, "U8", (data.nbytes,)) for name, data in result.tensors.items()]
    header, spans = encode_header(outputs, {"format": _FORMAT, "content": content})
    with written_whole(path) as file:
        file.write(header)
        for name in spans:  # in the order of their offsets
            file.write(byte_view(result.tensors[name]))


def read_layer(path: Path) -> LayerFile:
    """Return the results in a file, whose bytes are those that were written (`WorkFolder` checks them)."""
    header, _ = read_header(path)
    metadata = header.metadata
    if metadata.get("format") != _FORMAT or "content" not in metadata:
        raise CheckpointError(path, "not the results of a rounded layer")
    return LayerFile(path, strict_json(metadata["content"]), {info.name: info for info in header.tensors})
