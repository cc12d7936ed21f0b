"""The matrix finds what is wrong: a weight in another's place, a lost tensor, a changed copy, a wrong scale."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from decoded import DecodedCheckpoint, decode_checkpoint, read_tensors
from references import make_reference
from safetensors.torch import save_file
from small_models import Case, make_model
from torch import Tensor

from minifloat import QuantizeOptions, quantize_checkpoint

_EXPERT = "model.layers.0.feed_forward.experts"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("llama4")
    source = make_model(Case("llama4_text", "llama4_text"), root / "source")
    quantize_checkpoint(source, root / "quantized", "fp8", QuantizeOptions(workers=1))
    return source, root / "quantized"


def problems(folders: tuple[Path, Path], tmp_path: Path, change: Callable[[dict[str, Tensor]], object]) -> list[str]:
    source, quantized = folders
    tensors = read_tensors(quantized)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    return make_reference(read_tensors(source), decode_checkpoint(tmp_path)).problems


def swap(tensors: dict[str, Tensor], first: str, second: str) -> None:
    for suffix in ("weight", "weight_scale"):
        a, b = f"{first}.{suffix}", f"{second}.{suffix}"
        tensors[a], tensors[b] = tensors[b], tensors[a]


def test_a_checkpoint_without_changes_has_no_problem(folders: tuple[Path, Path], tmp_path: Path) -> None:
    assert problems(folders, tmp_path, lambda _: None) == []


def test_a_wrong_scale_is_found(folders: tuple[Path, Path], tmp_path: Path) -> None:
    found = problems(folders, tmp_path, lambda tensors: tensors[f"{_EXPERT}.0.up_proj.weight_scale"].mul_(2))
    assert any("is not near any weight of the source (relative error 1.0" in problem for problem in found)


def test_a_lost_expert_is_found(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{_EXPERT}.1.down_proj.weight"], tensors[f"{_EXPERT}.1.down_proj.weight_scale"]

    found = problems(folders, tmp_path, lose)
    assert found == [f"{_EXPERT}.down_proj: 98304 of 131072 elements are in the output"]


@pytest.mark.parametrize(
    ("first", "second"),
    [(f"{_EXPERT}.0.up_proj", f"{_EXPERT}.0.gate_proj"), (f"{_EXPERT}.0.up_proj", f"{_EXPERT}.1.up_proj")],
    ids=["gate and up", "experts"],
)
def test_weights_in_each_others_places_are_found(
    folders: tuple[Path, Path], tmp_path: Path, first: str, second: str
) -> None:
    found = problems(folders, tmp_path, lambda tensors: swap(tensors, first, second))
    assert found[0].startswith(f"{min(first, second)}: holds ")
    assert found[1].startswith(f"{max(first, second)}: holds ")


def test_a_changed_copy_and_a_lost_one_are_found(folders: tuple[Path, Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"] += 1
        del tensors["model.embed_tokens.weight"]

    assert problems(folders, tmp_path, change) == [
        "model.embed_tokens.weight: not in the output",
        "model.norm.weight: copied with other values",
    ]


def test_packed_nvfp4_is_decoded_as_compressed_tensors_does(folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantize_checkpoint(folders[0], tmp_path / "quantized", "nvfp4", QuantizeOptions(workers=1))
    module = f"{_EXPERT}.2.down_proj"
    tensors = read_tensors(tmp_path / "quantized")
    stored = {name: tensors[f"{module}.{name}"] for name in ("weight_packed", "weight_scale", "weight_global_scale")}
    expected = NVFP4PackedCompressor.decompress(stored, preset_name_to_scheme("NVFP4A16", ["Linear"]))["weight"]
    decoded = decode_checkpoint(tmp_path / "quantized").weights[module]
    assert torch.equal(decoded.to(expected.dtype), expected)


def test_only_quantized_weights_of_a_reference_are_rounded_to_bfloat16() -> None:
    source = {"a.weight": torch.randn(4, 32), "sinks": torch.tensor([1.001])}
    reference = make_reference(
        source, DecodedCheckpoint({"a": source["a.weight"] * 1.01}, {}, {"sinks": source["sinks"]})
    )
    rounded = reference.rounded().tensors
    assert torch.equal(rounded["sinks"], source["sinks"])
    assert torch.equal(rounded["a.weight"], reference.tensors["a.weight"].bfloat16().float())
    assert not torch.equal(rounded["a.weight"], reference.tensors["a.weight"])
