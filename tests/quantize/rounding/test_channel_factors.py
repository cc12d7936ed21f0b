"""Columns that hold most of a weight's error get a factor, which the norm or up_proj before them makes up for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rounding_cases import make_text, round_model, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.rounding.channel_factors import channel_factors, takes_factors
from minifloat.quantize.rounding.methods import Grid

FORMATS = ["fp8-block", "mxfp8"]


def case() -> tuple[Tensor, Tensor]:
    """A weight in BF16 and mean squares of its inputs: column 70 has a super weight and large inputs."""
    weight = torch.randn(300, 192, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[7, 70] = -5.78125
    energy = torch.ones(192)
    energy[70] = 1e4
    return weight.bfloat16(), energy


def error(weight: Tensor, name: str, factors: Tensor, energy: Tensor) -> float:
    scaled = (weight * factors).bfloat16()
    rounded = Grid.of(scaled, SCHEMES[name].weight, None).nearest.dequantize() / factors
    return float(((rounded - weight).double().square().sum(0) * energy).sum())


def test_e4m3_under_powers_of_two_takes_factors() -> None:
    found = {scheme.weight for scheme in SCHEMES.values() if takes_factors(scheme.weight)}
    assert found == {SCHEMES[name].weight for name in FORMATS}


@pytest.mark.parametrize("name", FORMATS)
def test_a_super_weight_is_brought_to_a_code(name: str) -> None:
    weight, energy = case()
    spec = SCHEMES[name].weight
    factors = channel_factors([(weight[:128], spec), (weight[128:], spec)], energy)
    assert factors[70] != 1.0
    assert 2**-0.5 <= float(factors[70]) <= 2**0.5
    assert int((factors != 1).sum()) == 1
    assert error(weight, name, factors, energy) < 0.3 * error(weight, name, torch.ones(192), energy)


def test_a_norm_is_divided_exactly() -> None:
    weight, energy = case()
    norm = (1 + 0.3 * torch.randn(192, generator=torch.Generator().manual_seed(1))).bfloat16()
    factors = channel_factors([(weight, SCHEMES["fp8-block"].weight)], energy, norm)
    assert factors[70] != 1.0
    divided = (norm / factors).bfloat16()
    torch.testing.assert_close(divided.double() * factors.double(), norm.double(), rtol=1e-6, atol=0)
    norm[70] = 0.0
    assert bool((channel_factors([(weight, SCHEMES["fp8-block"].weight)], energy, norm) == 1).all())


def test_columns_of_equal_error_are_left_alone() -> None:
    weight = torch.randn(300, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert bool((channel_factors([(weight, SCHEMES["fp8-block"].weight)], torch.ones(192)) == 1).all())


def with_super_weights(folder: Path) -> Path:
    """Give down_proj of the first layer a super weight, and the up_proj row before it large outputs."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight"][5] *= 30
    tensors["model.layers.0.mlp.down_proj.weight"][9, 5] = 5.78125
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.parametrize("method", ["nearest", "match"])
def test_folding_a_super_weight_lowers_the_divergence(tmp_path: Path, method: str) -> None:
    folder = with_super_weights(write_model(tmp_path / "model", "llama"))
    text = make_text(12), make_text(4, seed=1)
    plain, folded = (
        round_model(folder, tmp_path / "work", *text, "mxfp8", method, fold=fold).held_out["method"]
        for fold in (False, True)
    )
    assert 0 < folded < plain


def test_the_folded_model_computes_what_the_original_does(tmp_path: Path) -> None:
    """Tensors that a fold changes and that stay in BF16 are exact; weights are rounded once more to BF16."""
    folder = with_super_weights(write_model(tmp_path / "model", "llama"))
    rounding = round_model(folder, tmp_path / "work", make_text(12), make_text(4, seed=1), "mxfp8", fold=True)
    up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))
    scales = {}
    for module in (up, down):
        codes = torch.frombuffer(bytearray(rounding.tensors[f"{module}.weight"]), dtype=torch.float8_e4m3fn).float()
        scale = torch.frombuffer(bytearray(rounding.tensors[f"{module}.weight_scale"]), dtype=torch.uint8).float()
        shape = load_file(folder / "model.safetensors")[f"{module}.weight"].shape
        groups = (2.0 ** (scale - 127)).view(shape[0], -1).repeat_interleave(32, 1)[:, : shape[1]]
        scales[module] = codes.view(shape) * groups
    before = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    down_factor = scales[down][9, 5] / before[f"{down}.weight"][9, 5]
    up_factor = (scales[up][5] @ before[f"{up}.weight"][5]) / before[f"{up}.weight"][5].square().sum()
    assert abs(float(down_factor) - 1) > 0.01
    assert float(down_factor * up_factor) == pytest.approx(1, rel=0.02)
