"""Scales of fp8-block are powers of two, so that what DeepGEMM does to blocks while a server loads changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from minifloat import check_checkpoint, convert_checkpoint, quantize_checkpoint
from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import describe
from minifloat.model.layouts.stored import scale_rule_of
from minifloat.numerics.formats import E4M3
from minifloat.numerics.granularity import BLOCK_128
from minifloat.numerics.scale_rules import expand
from minifloat.numerics.scheme import SCHEMES, ScaleRule, WeightSpec
from minifloat.numerics.tensor import quantize_tensor

STORYBOOK = Path(__file__).parents[2] / "examples" / "storybook-4m"
INTEROP = Path(__file__).parents[1] / "data" / "interop"


def requantized(weight: Tensor) -> Tensor:
    """What vLLM's requant_weight_ue8m0_inplace leaves of a weight: scales rounded up to powers of two, codes anew."""
    rows, cols = -weight.shape[0] % 128, -weight.shape[1] % 128
    padded = torch.nn.functional.pad(weight, (0, cols, 0, rows))
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = torch.exp2((blocks.abs().amax((1, 3)).clamp(1e-4) / E4M3.max).log2().ceil())
    full = expand(scale, BLOCK_128, (weight.shape[0], weight.shape[1]))
    return (weight / full).to(torch.float8_e4m3fn).float() * full


@pytest.mark.parametrize("seed", range(3))
def test_rounding_the_scales_up_to_powers_of_two_changes_no_value(seed: int) -> None:
    weight = torch.randn(300, 400, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 2)
    ours = quantize_tensor(weight, SCHEMES["fp8-block"].weight).dequantize()
    others = quantize_tensor(weight, WeightSpec(E4M3, BLOCK_128)).dequantize()
    assert torch.equal(requantized(ours), ours)
    assert not torch.equal(requantized(others), others)
    errors = [float((weight - each).square().sum()) for each in (ours, others, requantized(others))]
    assert errors[0] < 1.05 * errors[1]
    assert errors[2] > 1.5 * errors[1]


def test_the_files_say_so_and_check_believes_them(tmp_path: Path) -> None:
    quantize_checkpoint(STORYBOOK, tmp_path / "out", "fp8-block")
    convert_checkpoint(tmp_path / "out", tmp_path / "converted", layout="fp8")
    for folder in (tmp_path / "out", tmp_path / "converted"):
        with Checkpoint.open(folder) as checkpoint:
            scales = [checkpoint.read(weight.scale) for weight in describe(checkpoint).weights.values()]
            assert {metadata["scale_rule"] for metadata in checkpoint.metadata.values()} == {ScaleRule.RCEIL.value}
        for scale in scales:
            values = torch.from_numpy(scale.copy()).view(torch.float32)
            assert torch.equal(values, torch.exp2(values.log2().round()))
        rules = {finding.rule for finding in check_checkpoint(folder, "vllm:b200").findings}
        assert "vllm-blocks-rounded-again" not in rules


def test_what_a_config_of_deepseek_says_is_in_the_files_of_a_conversion(tmp_path: Path) -> None:
    convert_checkpoint(INTEROP / "deepseek-block32-ue8m0", tmp_path / "out", layout="compressed-tensors")
    with Checkpoint.open(tmp_path / "out") as checkpoint:
        assert scale_rule_of(checkpoint) == ScaleRule.RCEIL.value
        assert checkpoint.quantization_config is not None
        assert "scale_fmt" not in checkpoint.quantization_config
