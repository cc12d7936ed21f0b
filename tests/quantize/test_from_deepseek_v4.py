"""DeepSeek-V4's form: E4M3 in blocks and MXFP4 experts in int8, with E8M0 scales named ``scale``."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from converting import dequantize, requantize, stored
from safetensors.torch import load_file, save_file

from minifloat.deploy.check import check_checkpoint
from minifloat.errors import ShapeError, UnsupportedTensorError
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions

ATTENTION, EXPERTS, TABLE = "layers.0.attn.wq_b", "layers.0.ffn.experts", "layers.0.engram.table"
CONFIG = {
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def write_model(folder: Path) -> dict[str, np.ndarray]:
    """Write one attention weight, a table in groups and two experts; return their values in float64 by ml_dtypes."""
    random = np.random.default_rng(3)
    tensors: dict[str, torch.Tensor] = {"layers.0.attn_norm.weight": torch.ones(256, dtype=torch.bfloat16)}
    values: dict[str, np.ndarray] = {}

    def add(name: str, codes: torch.Tensor, elements: np.ndarray, block: tuple[int, int]) -> None:
        rows, cols = elements.shape
        exponents = random.integers(118, 130, (-(-rows // block[0]), -(-cols // block[1])), dtype=np.uint8)
        scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        tensors[f"{name}.weight"] = codes
        tensors[f"{name}.scale"] = torch.from_numpy(exponents).view(torch.float8_e8m0fnu)
        values[name] = elements * scales.repeat(block[0], 0).repeat(block[1], 1)[:rows, :cols]

    for name, block in ((ATTENTION, (128, 128)), (TABLE, (1, 32))):
        signs = random.integers(0, 2, (384, 256), dtype=np.uint8) << 7
        codes = signs | random.integers(0, 0x7F, (384, 256), dtype=np.uint8)
        elements = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        add(name, torch.from_numpy(codes).view(torch.float8_e4m3fn), elements, block)
    for expert in range(2):
        for leaf in ("w1", "w2", "w3"):
            packed = random.integers(0, 256, (128, 64), dtype=np.uint8)
            nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(128, 128)
            elements = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
            add(f"{EXPERTS}.{expert}.{leaf}", torch.from_numpy(packed.view(np.int8)), elements, (1, 32))
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return values


def test_every_weight_is_dequantized_as_ml_dtypes_decodes_it(tmp_path: Path) -> None:
    values = write_model(tmp_path / "model")
    dequantize(tmp_path / "model", tmp_path / "plain", "float32")
    written = load_file(tmp_path / "plain" / "model.safetensors")
    assert written.keys() == {"layers.0.attn_norm.weight", *(f"{name}.weight" for name in values)}
    for name, value in values.items():
        assert np.array_equal(written[f"{name}.weight"].double().numpy(), value), name
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config == {"model_type": "deepseek_v4", "dtype": "float32"}


def test_experts_keep_their_codes_as_mxfp4_and_the_attention_as_blocks(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    overrides = ["experts=mxfp4"]
    report = quantize_checkpoint(
        tmp_path / "model", tmp_path / "out", "fp8-block", QuantizeOptions(overrides=overrides, from_quantized=True)
    )
    before, after = stored(tmp_path / "model"), stored(tmp_path / "out")
    for expert in range(2):
        for leaf in ("w1", "w2", "w3"):
            module = f"{EXPERTS}.{expert}.{leaf}"
            assert after[f"{module}.weight_packed"][2] == before[f"{module}.weight"][2]
            assert after[f"{module}.weight_scale"][2] == before[f"{module}.scale"][2]
    assert after[f"{ATTENTION}.weight"][2] == before[f"{ATTENTION}.weight"][2]
    exponents = np.frombuffer(before[f"{ATTENTION}.scale"][2], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    assert after[f"{ATTENTION}.weight_scale"][2] == exponents.astype(np.float32).tobytes()
    assert report.quantized_source is not None
    assert report.quantized_source["copied_codes"] == 7
    assert "expert_dtype" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(("layout", "dtype"), [("fp8", "fp8"), ("compressed-tensors", None)])
def test_the_config_states_the_format_of_the_experts_where_vllm_reads_it(
    layout: str, dtype: str | None, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    quantize_checkpoint(
        tmp_path / "model", tmp_path / "out", "fp8-block", QuantizeOptions(layout=layout, from_quantized=True)
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()).get("expert_dtype") == dtype
    rules = {finding.rule for finding in check_checkpoint(tmp_path / "out", "vllm:h100").findings}
    assert "vllm-expert-dtype" not in rules


def rewrite(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")


def test_an_expert_without_its_scale_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    rewrite(tmp_path / "model", f"{EXPERTS}.1.w2.scale", None)
    with pytest.raises(
        UnsupportedTensorError, match=r"experts\.1\.w2\.weight: I8 codes without a scale .* download it"
    ):
        requantize(tmp_path / "model", tmp_path / "out", "mxfp4")


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (f"{EXPERTS}.0.w1", (4, 128), r"w1\.scale: group 1x32 scales of a 128x128 weight are a grid of 128x4; found"),
        (ATTENTION, (2, 3), r"wq_b\.scale: block 128x128 scales of a 384x256 weight are a grid of 3x2; found shape"),
    ],
)
def test_scales_of_another_shape_are_refused_by_name(
    module: str, shape: tuple[int, int], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    rewrite(tmp_path / "model", f"{module}.scale", torch.ones(shape, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    with pytest.raises(ShapeError, match=message):
        requantize(tmp_path / "model", tmp_path / "out", "mxfp4")
