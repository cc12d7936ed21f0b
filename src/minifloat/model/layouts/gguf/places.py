"""`Places`: where each tensor of a checkpoint lies in a GGUF file, by the name map of the package gguf.

The same places serve a writer, which takes rows of a tensor, and a reader, which puts them back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from minifloat.model.layouts.gguf.architectures import Architecture, head_dim

Rows = npt.NDArray[np.intp] | slice

_ALL = slice(None)
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(.+)$")
#: Names of text models inside of models that see images, and of tensors that are none of the text model's.
_OUTER = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_TOWERS = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
_GATE_UP = "mlp.experts.gate_up_proj"


@dataclass(frozen=True)
class Place:
    """A tensor of a checkpoint, or rows of it, in a tensor of a GGUF file."""

    name: str
    rows: Rows = field(default_factory=lambda: _ALL)  #: rows of the checkpoint's matrix in the order of the file
    expert: int | None = None  #: index in the first dimension of the file's tensor
    shift: float = 0.0  #: what the file's values exceed the checkpoint's by


def row_axis(shape: tuple[int, ...], name: str) -> int:
    """Return the dimension of rows: the first, behind that of experts where one tensor holds all of them."""
    return int(len(shape) > 2 or (len(shape) > 1 and name.endswith("_exps.bias")))


class Places:
    """The places of the tensors of one model."""

    def __init__(self, row: Architecture, config: Mapping[str, Any]) -> None:
        self._row, self._config = row, config
        self._names = gguf.get_tensor_name_map(row.row, config["num_hidden_layers"])

    def of(self, name: str) -> tuple[Place, ...]:
        """Return the places of a plain tensor by its name; none for one that has none in the file."""
        for outer, inner in _OUTER:
            if name.startswith(outer):
                name = inner + name.removeprefix(outer)
        if self._row.name == "GPT_OSS":
            if name.endswith("self_attn.sinks"):
                name += ".weight"
            # experts are fused, with the rows of gate and up in turns: x_proj.N, x_proj or x_proj_bias
            match = re.fullmatch(r"(.*experts\.(?:gate_up|down)_proj)(?:\.(\d+))?(_bias|\.weight)?", name)
            if match is not None:
                return self._of_gpt_oss(match[1], match[2], "bias" if match[3] == "_bias" else "weight")
        match = _EXPERT.match(name)
        found = self._mapped(name if match is None else f"{match[1]}.{match[3]}")
        if found is None:
            return ()
        shift = self._row.norm_shift if name.endswith("norm.weight") else 0.0
        return (Place(found, self._rows(name), None if match is None else int(match[2]), shift),)

    def is_tower(self, name: str) -> bool:
        """Return whether a tensor is of the part of a model that sees images."""
        return name.startswith(_TOWERS)

    def _mapped(self, name: str) -> str | None:
        # the map has Mixtral's names as released by Mistral
        mixtral = name.replace("model.", "", 1).replace("block_sparse_moe.experts", "feed_forward.experts")
        for candidate in (name, mixtral):
            found = self._names.get_name(candidate, try_suffixes=(".weight", ".bias"))
            if found is not None:
                return found
        return None

    def _of_gpt_oss(self, module: str, expert: str | None, kind: str) -> tuple[Place, ...]:
        index = None if expert is None else int(expert)
        parts = [("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2))]
        if not module.endswith(_GATE_UP):
            parts = [("down_proj", _ALL)]
        parent = module.rpartition(".")[0]
        names = [(self._mapped(f"{parent}.{part}.{kind}"), rows) for part, rows in parts]
        return tuple(Place(name, rows, index) for name, rows in names if name is not None)

    def _rows(self, name: str) -> Rows:
        """Return the order of rows of queries and keys by pairs of neighbours."""
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        module = name.rpartition(".")[0].rpartition(".")[2]
        if not self._row.pairs or module not in heads:
            return _ALL
        count, size = self._config[heads[module]], head_dim(self._config)
        order: npt.NDArray[np.intp] = np.arange(count * size).reshape(count, 2, size // 2).swapaxes(1, 2).reshape(-1)
        return order
