"""Configs and tensors that lie about groups and scales are refused, with the tensor and the rule, by every reader."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minifloat.checkpoint import Checkpoint
from minifloat.errors import ConfigError, MinifloatError, NonFiniteError, ShapeError, UnsupportedTensorError
from minifloat.model.layouts import describe
from minifloat.model.layouts.reading import read_rows, read_weight

DATA = Path(__file__).parents[2] / "data" / "interop"
Edit = Callable[[dict[str, Any]], Any]


def edited(tmp_path: Path, fixture: str, edit: Edit) -> Path:
    """Copy a recorded checkpoint, with another config.json."""
    folder = tmp_path / "model"
    shutil.copytree(DATA / fixture, folder)
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def group(config: dict[str, Any]) -> Any:
    return next(iter(config["quantization_config"]["config_groups"].values()))


def of_weights(size: int) -> Edit:
    return lambda config: group(config)["weights"].update(group_size=size)


def of_inputs(size: int) -> Edit:
    return lambda config: group(config)["input_activations"].update(group_size=size)


@pytest.mark.parametrize("size", [16, 31, 33, 34, 36, 64])
@pytest.mark.parametrize("fixture", ["llmc-mxfp4a16", "llmc-mxfp8a16", "llmc-mxfp4", "llmc-mxfp8"])
def test_groups_of_mx_formats_are_32(tmp_path: Path, fixture: str, size: int) -> None:
    folder = edited(tmp_path, fixture, of_weights(size))
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(ShapeError, match=rf"weight_scale: .* an MX format, whose groups are group 1x32; .* 1x{size}: "),
    ):
        describe(checkpoint)


@pytest.mark.parametrize("size", [8, 15, 17, 32])
@pytest.mark.parametrize("fixture", ["llmc-nvfp4", "llmc-nvfp4a16"])
def test_groups_of_nvfp4_are_16(tmp_path: Path, fixture: str, size: int) -> None:
    folder = edited(tmp_path, fixture, of_weights(size))
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(ShapeError, match=rf"weight_scale: .* an NVFP4 format, whose groups are group 1x16; .* 1x{size}"),
    ):
        describe(checkpoint)


@pytest.mark.parametrize(("fixture", "size"), [("llmc-nvfp4", 17), ("llmc-mxfp4", 33), ("llmc-mxfp8", 36)])
def test_groups_of_inputs_are_those_of_their_format(tmp_path: Path, fixture: str, size: int) -> None:
    folder = edited(tmp_path, fixture, of_inputs(size))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ShapeError, match=rf"inputs of model\..* 1x{size}"):
        describe(checkpoint)


@pytest.mark.parametrize(
    ("fixture", "edit", "message"),
    [
        (
            "modelopt-nvfp4",
            lambda config: config["quantization_config"].update(group_size=17, config_groups=None),
            r"group_size is 17, and the scales of model\..* are group 1x16",
        ),
        (
            "modelopt-nvfp4",
            lambda config: config["quantization_config"].update(
                config_groups={"g": {"weights": {"num_bits": 4, "group_size": 17}}}
            ),
            r"config_groups\.g\.weights\.group_size is 17; groups of 4 bits in this layout are 16",
        ),
        (
            "modelopt-mxfp8",
            lambda config: config["quantization_config"].update(group_size=33, config_groups=None),
            r"group_size is 33, and the scales of model\..* are group 1x32",
        ),
    ],
)
def test_modelopt_declares_the_groups_of_its_tensors(tmp_path: Path, fixture: str, edit: Edit, message: str) -> None:
    folder = edited(tmp_path, fixture, edit)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ConfigError, match=message):
        describe(checkpoint)


def test_the_layout_mxfp8_has_blocks_of_32(tmp_path: Path) -> None:
    def as_mxfp8(config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "mxfp8", "weight_block_size": [1, 33]}

    folder = edited(tmp_path, "deepseek-block32-ue8m0", as_mxfp8)
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(ConfigError, match=r"weight_block_size: MXFP8 has group 1x32, found \[1, 33\]"),
    ):
        describe(checkpoint)


@pytest.mark.parametrize(
    ("fixture", "codes", "scales", "rule"),
    [
        ("llmc-mxfp8a16", (4, 48), (4, 2), "MX formats have whole groups of 32 columns; found 48"),
        ("llmc-nvfp4a16", (4, 12), (4, 2), "NVFP4 formats have whole groups of 16 columns; found 24"),
    ],
)
def test_groups_divide_the_columns(
    tmp_path: Path, fixture: str, codes: tuple[int, int], scales: tuple[int, int], rule: str
) -> None:
    folder = edited(tmp_path, fixture, lambda _: None)
    with Checkpoint.open(folder) as checkpoint:
        name = next(iter(describe(checkpoint).weights))
        packed = describe(checkpoint).weights[name].codes
    _rewrite(folder / "model.safetensors", packed, lambda _: np.zeros(codes, np.uint8))
    _rewrite(folder / "model.safetensors", f"{name}.weight_scale", lambda _: np.zeros(scales, np.uint8))
    with Checkpoint.open(folder) as checkpoint, pytest.raises(ShapeError, match=rf"{name}\.weight_scale: {rule}"):
        describe(checkpoint)


# Scales


def with_tensor(tmp_path: Path, fixture: str, suffix: str, change: Callable[[Any], Any]) -> tuple[Path, str]:
    """Copy a recorded checkpoint with other values, of the same dtype, in the first tensor of a name."""
    folder = edited(tmp_path, fixture, lambda _: None)
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    with Checkpoint.open(folder) as checkpoint:
        info = next(info for name, info in checkpoint.tensors.items() if name.endswith(suffix))
    dtype = {"F32": np.float32, "F8_E4M3": np.uint8, "BF16": np.uint16, "U8": np.uint8}[info.dtype]
    view = np.frombuffer(raw, dtype, info.nbytes // np.dtype(dtype).itemsize, info.offset)
    changed = view.copy()
    changed[0] = change(dtype)
    raw[info.offset : info.offset + info.nbytes] = changed.tobytes()
    file.write_bytes(raw)
    return folder, info.name


def bits(value: float) -> Callable[[Any], Any]:
    """Return the value in the dtype of a tensor: float32, or the upper half of it for bfloat16."""
    return lambda dtype: (
        np.float32(value) if dtype is np.float32 else np.uint16(np.float32(value).view(np.uint32) >> np.uint32(16))
    )


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, float("-inf"), float("inf"), float("nan")])
@pytest.mark.parametrize("fixture", ["llmc-fp8-w8a16", "deepseek-block128", "modelopt-fp8-channel"])
def test_a_float_scale_that_is_not_positive_and_finite_is_refused(tmp_path: Path, fixture: str, value: float) -> None:
    suffix = ".weight_scale_inv" if fixture.startswith("deepseek") else ".weight_scale"
    folder, name = with_tensor(tmp_path, fixture, suffix, bits(value))
    with Checkpoint.open(folder) as checkpoint:
        stored = next(weight for weight in describe(checkpoint).weights.values() if weight.scale == name)
        for read in (lambda: read_weight(checkpoint, stored), lambda: read_rows(checkpoint, stored, 0, 1)):
            with pytest.raises(NonFiniteError, match=r"1 of \d+ scales are (zero or negative|NaN or Inf)"):
                read()


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("fixture", "suffix"), [("llmc-nvfp4a16", ".weight_global_scale"), ("modelopt-nvfp4", ".weight_scale_2")]
)
def test_a_global_scale_that_is_not_positive_and_finite_is_refused(
    tmp_path: Path, fixture: str, suffix: str, value: float
) -> None:
    folder, name = with_tensor(tmp_path, fixture, suffix, bits(value))
    with Checkpoint.open(folder) as checkpoint:
        stored = next(weight for weight in describe(checkpoint).weights.values() if weight.global_scale == name)
        with pytest.raises(NonFiniteError, match="expected a positive, finite global scale, found"):
            read_weight(checkpoint, stored)


def test_a_negative_scale_of_nvfp4_is_refused_and_a_zero_is_not(tmp_path: Path) -> None:
    folder, name = with_tensor(tmp_path, "llmc-nvfp4a16", ".weight_scale", lambda _: 0x81)
    with Checkpoint.open(folder) as checkpoint:
        stored = next(weight for weight in describe(checkpoint).weights.values() if weight.scale == name)
        with pytest.raises(NonFiniteError, match="scales are zero or negative"):
            read_weight(checkpoint, stored)
    shutil.rmtree(folder)
    folder, name = with_tensor(tmp_path, "llmc-nvfp4a16", ".weight_scale", lambda _: 0)
    with Checkpoint.open(folder) as checkpoint:
        assert not read_rows(checkpoint, stored, 0, 1)[0, :16].any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda scale: scale.repeat(2), ShapeError, r"weight_global_scale: expected one global scale, .* \[2\]"),
        (lambda scale: scale[:0], ShapeError, r"weight_global_scale: expected one global scale, .* \[0\]"),
        (None, ShapeError, "weight_global_scale: missing: NVFP4 weights have a global scale"),
    ],
)
def test_a_global_scale_is_one_number(tmp_path: Path, change: Any, error: type[MinifloatError], message: str) -> None:
    folder = edited(tmp_path, "llmc-nvfp4a16", lambda _: None)
    _rewrite(folder / "model.safetensors", ".weight_global_scale", change)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(error, match=message):
        describe(checkpoint)


def test_a_format_without_a_global_scale_has_none(tmp_path: Path) -> None:
    folder = edited(tmp_path, "llmc-mxfp4a16", lambda _: None)
    with Checkpoint.open(folder) as checkpoint:
        module = next(iter(describe(checkpoint).weights))
    _rewrite(folder / "model.safetensors", "", None, {f"{module}.weight_global_scale": np.ones(1, np.float32)})
    with (
        Checkpoint.open(folder) as checkpoint,
        pytest.raises(UnsupportedTensorError, match="weights with E8M0 scales have no global scale"),
    ):
        describe(checkpoint)


def _rewrite(file: Path, suffix: str, change: Any, more: dict[str, Any] | None = None) -> None:
    """Change, or with None remove, all tensors of a name, or add some; the others keep their bytes."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = {name: info for name, info in json.loads(raw[8 : 8 + length]).items() if name != "__metadata__"}
    entries, data = {}, b""
    for name, info in header.items():
        start, end = (8 + length + offset for offset in info["data_offsets"])
        content, shape = raw[start:end], info["shape"]
        if suffix and name.endswith(suffix):
            if change is None:
                continue
            array = change(np.frombuffer(content, np.float32 if info["dtype"] == "F32" else np.uint8))
            content, shape = array.tobytes(), list(array.shape)
        entries[name] = {**info, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    for name, array in (more or {}).items():
        entries[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [len(data), len(data) + 4]}
        data += array.tobytes()
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
