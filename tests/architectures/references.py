"""The model that a quantized checkpoint must answer as: the source with the decoded weights in the place of its own.

Where a decoded weight belongs is found by its values, not by a table: each one must be near some slice of a tensor of
the source. A split of fused experts in the wrong order, a transposed or a lost matrix is therefore found here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from decoded import DecodedCheckpoint
from safetensors.torch import save_file
from torch import Tensor

#: A quantized weight differs from its source by at most this; MXFP4 by about 0.12, another weight by 1.4.
_NEAR = 0.3
_EXPERT = re.compile(r"(?P<layer>.*\.)(?P<block>\w*experts\w*)\.(?P<index>\d+)\.(?P<leaf>\w+)")
_FIRST, _SECOND = ("first", "even"), ("second", "odd")
_ANY_PART = (*_FIRST, *_SECOND)
#: Linear of an expert -> the rows of a fused tensor that it may be.
_PARTS = {"gate_proj": _FIRST, "w1": _FIRST, "up_proj": _SECOND, "w3": _SECOND}


@dataclass
class Reference:
    """The reference of a quantized checkpoint."""

    tensors: dict[str, Tensor]
    places: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    quantized: int = 0

    def rounded(self) -> Reference:
        """Return it with quantized weights rounded to bfloat16, and all other tensors as they are."""
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        for name, slice_name in self.places.values():
            view = slice_of(tensors[name], slice_name)
            view.copy_(view.bfloat16())
        return replace(self, tensors=tensors)

    def write(self, source: Path, folder: Path) -> Path:
        """Write it as a float32 checkpoint with the config of the source."""
        folder.mkdir(exist_ok=True)
        tensors = {name: tensor.float().contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config.pop("quantization_config", None)
        (folder / "config.json").write_text(json.dumps(config))
        for name in ("generation_config.json",):
            if (source / name).exists():
                (folder / name).write_bytes((source / name).read_bytes())
        return folder


def slices(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the views of a tensor that a quantized weight may replace, with their names."""
    if tensor.ndim == 2:
        yield "whole", tensor
    if tensor.ndim == 3:
        yield "whole", tensor
        yield "transposed", tensor.mT
        for expert in range(tensor.shape[0]):
            for turn, matrix in (("", tensor[expert]), ("T", tensor[expert].T)):
                rows = matrix.shape[0]
                yield f"{expert}{turn}", matrix
                yield f"{expert}{turn}:first", matrix[: rows // 2]
                yield f"{expert}{turn}:second", matrix[rows // 2 :]
                yield f"{expert}{turn}:even", matrix[::2]
                yield f"{expert}{turn}:odd", matrix[1::2]


def slice_of(tensor: Tensor, name: str) -> Tensor:
    """Return the view of a tensor that `slices` yields under a name."""
    return dict(slices(tensor))[name]


def make_reference(source: dict[str, Tensor], decoded: DecodedCheckpoint) -> Reference:
    """Return the source with decoded weights."""
    reference = Reference({name: tensor.float().clone() for name, tensor in source.items()})
    filled: dict[str, int] = {}
    for module, weight in decoded.weights.items():
        place = _find_place(source, module, weight)
        if isinstance(place, str):
            reference.problems.append(f"{module}: {place}")
            continue
        name, slice_name = place
        slice_of(reference.tensors[name], slice_name).copy_(weight)
        reference.places[module] = place
        filled[name] = filled.get(name, 0) + weight.numel()
    for name, tensor in source.items():
        if name in filled:
            reference.quantized += filled[name]
            if filled[name] != tensor.numel():
                reference.problems.append(f"{name}: {filled[name]} of {tensor.numel()} elements are in the output")
        elif name not in decoded.plain:
            reference.problems.append(f"{name}: not in the output")
        elif not torch.equal(decoded.plain[name].float(), tensor.float()):
            reference.problems.append(f"{name}: copied with other values")
    return reference


def _find_place(source: dict[str, Tensor], module: str, weight: Tensor) -> tuple[str, str] | str:
    """Return the tensor and the slice that a weight is near, or what is wrong."""
    candidates = [name for name in (f"{module}.weight", module) if name in source]
    match = _EXPERT.fullmatch(module)
    if match:
        candidates += [name for name, tensor in source.items() if name.startswith(match["layer"]) and tensor.ndim == 3]
    found = []
    for name in dict.fromkeys(candidates):
        for slice_name, view in slices(source[name].float()):
            if view.shape == weight.shape:
                error = float((view - weight).norm() / view.norm())
                found.append((error, name, slice_name))
    if not found:
        return f"no tensor of the source has its shape {list(weight.shape)}"
    error, name, slice_name = min(found)
    if error >= _NEAR:
        return f"is not near any weight of the source (relative error {error:.2f})"
    if match and name not in (f"{module}.weight", module) and not _is_named(match, slice_name):
        return f"holds {slice_name} of {name}"
    return name, slice_name


def _is_named(module: re.Match[str], slice_name: str) -> bool:
    """Return whether a slice of fused experts is the one that a module's name says: its expert, and gate before up."""
    expert, _, part = slice_name.partition(":")
    return expert.rstrip("T") == module["index"] and (not part or part in _PARTS.get(module["leaf"], _ANY_PART))
