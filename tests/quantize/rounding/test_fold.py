"""Folded scales keep the function of every supported family, and are chosen where they lower the error."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from minifloat.checkpoint import TensorInfo
from minifloat.errors import ShapeError
from minifloat.model.architecture.families import family_of
from minifloat.model.architecture.family import FoldKind
from minifloat.model.architecture.folding import FoldPart, FoldSite, fold_sites, folding_types, why_not_fold
from minifloat.numerics.formats import E2M1, E4M3, E8M0
from minifloat.numerics.granularity import GROUP_16, GROUP_32
from minifloat.numerics.scheme import SCHEMES, ActivationSpec
from minifloat.quantize.rounding.folding import (
    OutputLoss,
    apply_exponents,
    channel_classes,
    choose_exponents,
    exponent_limits,
    powers_of_two,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
    "use_bias": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def random_model(model_type: str, dtype: torch.dtype) -> PreTrainedModel:
    """A small model of a family with random weights, biases and norms."""
    generator = torch.Generator().manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES), dtype=dtype).eval()
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator) * (0.2 if weight.ndim > 1 else 0.1)
        weight.data = (noise + ("norm" in name and name.endswith("weight"))).to(dtype)
    return model


def infos(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(name, NAMES[t.dtype], tuple(t.shape), "", 0, 0) for name, t in tensors.items()}


def fold_at_random(model: PreTrainedModel) -> list[FoldKind]:
    """Fold random exponents at every site of a model; return the sites' kinds."""
    generator = torch.Generator().manual_seed(2)
    tensors, config = model.state_dict(), json.loads(model.config.to_json_string())
    kinds = []
    for layer in range(SIZES["num_hidden_layers"]):
        for site in fold_sites(f"model.layers.{layer}", infos(tensors), config):
            exponents = torch.randint(-5, 6, (site.channels,), generator=generator, dtype=torch.int32)
            classes = channel_classes(site)
            changed = apply_exponents(site, tensors, exponents if classes is None else exponents[classes])
            for name, tensor in changed.items():
                assert not torch.equal(tensors[name], tensor)
                tensors[name].copy_(tensor)
            kinds.append(site.kind)
        assert why_not_fold(f"model.layers.{layer}", infos(tensors), config) == ""
    return kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", folding_types())
def test_random_exponents_keep_every_bit_of_the_logits(model_type: str, dtype: torch.dtype) -> None:
    model = random_model(model_type, dtype)
    ids = torch.randint(0, SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        before = model(ids).logits
        kinds = fold_at_random(model)
        after = model(ids).logits
    assert before.abs().max() > 0
    assert torch.equal(before, after)
    folds = family_of({"model_type": model_type}).folds
    expected = folds - ({FoldKind.UP} if model_type == "starcoder2" else set())  # its MLP has no gate
    assert set(kinds) == expected


def outlier_case(factor: float) -> tuple[list[Tensor], Tensor, Tensor]:
    """Weights, inputs and held-out inputs; four input channels are `factor` times as large, their weights as small."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.ones(128)
    scale[[3, 40, 77, 100]] = factor
    weights = [torch.randn(rows, 128, generator=generator) / scale for rows in (64, 32)]
    inputs, held_out = (torch.randn(300, 128, generator=generator) * scale for _ in range(2))
    return weights, inputs, held_out


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("factor", [8.0, 32.0, 100.0])
def test_outlier_channels_are_folded_away(name: str, factor: float) -> None:
    weights, inputs, held_out = outlier_case(factor)
    choice = choose_exponents(weights, SCHEMES[name], inputs, held_out)
    weights, inputs, held_out = outlier_case(1.0)
    plain = choose_exponents(weights, SCHEMES[name], inputs, held_out)
    assert choice.folds
    assert choice.loss_with < 0.7 * choice.loss_without
    assert choice.loss_with < 1.1 * plain.loss_without
    assert int(choice.exponents.median()) == 0


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "fp8", "fp8-static"])
def test_inputs_without_outliers_are_left_alone(name: str) -> None:
    weights, inputs, held_out = outlier_case(1.0)
    scheme = SCHEMES[name]
    choice = choose_exponents(weights, scheme, inputs, held_out)
    assert not choice.folds
    assert choice.alpha == 0.0
    assert choice.exponents.dtype == torch.int32


@pytest.mark.parametrize(
    ("weight", "activation", "factor"),
    [
        ("fp8-static", SCHEMES["fp8-static"].activation, 10000.0),  # E4M3 covers smaller outliers by itself
        ("mxfp4", ActivationSpec(E2M1, GROUP_32, True, E8M0), 100.0),
        ("nvfp4", ActivationSpec(E2M1, GROUP_16, True, E4M3), 100.0),
    ],
)
def test_outliers_of_quantized_inputs_are_folded_away(weight: str, activation: ActivationSpec, factor: float) -> None:
    weights, inputs, held_out = outlier_case(factor)
    choice = choose_exponents(weights, replace(SCHEMES[weight], activation=activation), inputs, held_out)
    assert choice.folds
    assert choice.loss_with < 0.7 * choice.loss_without


def test_the_loss_by_the_gram_matrix_is_the_loss_over_tokens() -> None:
    weights, inputs, _ = outlier_case(32.0)
    exponents = torch.arange(128, dtype=torch.int32) % 5 - 2
    loss = OutputLoss(weights, SCHEMES["nvfp4"].weight, inputs, None, None)
    assert loss.uses_gram
    assert loss.total(exponents) == pytest.approx(float(loss.per_token(inputs, exponents)[0].sum()), rel=1e-4)


def test_what_does_not_hold_on_held_out_inputs_is_not_accepted() -> None:
    weights, inputs, held_out = outlier_case(32.0)
    choice = choose_exponents(weights, SCHEMES["mxfp4"], inputs, held_out.roll(1, dims=1))
    assert not choice.folds
    assert choice.loss_with > 0.98 * choice.loss_without


def test_exponents_stay_within_the_limits() -> None:
    weights, inputs, held_out = outlier_case(32.0)
    upper = torch.full((128,), 8, dtype=torch.int32)
    upper[3] = 1
    limits = (-upper.new_full((128,), 8), upper)
    choice = choose_exponents(weights, SCHEMES["mxfp4"], inputs, held_out, limits=limits)
    assert int(choice.exponents[3]) == 1
    assert int(choice.exponents[40]) > 1


def value_site() -> tuple[FoldSite, dict[str, Tensor]]:
    site = FoldSite(FoldKind.VALUE, (FoldPart("v"), FoldPart("b")), (FoldPart("o"),), 16, 4, 2)
    generator = torch.Generator().manual_seed(0)
    shapes = {"v": (8, 32), "b": (8,), "o": (32, 16)}
    return site, {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def test_query_heads_of_a_group_share_the_exponents_of_their_value_head() -> None:
    site, tensors = value_site()
    classes = channel_classes(site)
    assert classes is not None
    assert classes.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]
    exponents = torch.arange(-4, 4, dtype=torch.int32)[classes]
    changed = apply_exponents(site, tensors, exponents)
    assert torch.equal(changed["o"], tensors["o"] * powers_of_two(exponents).bfloat16())
    rows = powers_of_two(-torch.arange(-4, 4, dtype=torch.int32))
    assert torch.equal(changed["v"].float(), tensors["v"].float() * rows[:, None])
    assert torch.equal(changed["b"].float(), tensors["b"].float() * rows)


def test_the_exponents_of_a_group_are_chosen_together() -> None:
    site, _ = value_site()
    generator = torch.Generator().manual_seed(0)
    scale = torch.ones(16)
    scale[[2, 6]] = 64.0
    weight = torch.randn(32, 16, generator=generator) / scale
    inputs, held_out = (torch.randn(300, 16, generator=generator) * scale for _ in range(2))
    classes = channel_classes(site)
    choice = choose_exponents([weight], SCHEMES["nvfp4"], inputs, held_out, classes=classes)
    heads = choice.exponents.view(2, 2, 4)
    assert choice.folds
    assert torch.equal(heads[:, 0], heads[:, 1])


def test_heads_of_a_group_with_different_exponents_are_an_error() -> None:
    site, tensors = value_site()
    with pytest.raises(ValueError, match="o: query heads that share a value head have different exponents"):
        apply_exponents(site, tensors, torch.arange(16, dtype=torch.int32) % 8)


def test_exponents_that_would_lose_bits_are_limited_and_refused() -> None:
    site = FoldSite(FoldKind.NORM, (FoldPart("n"),), (FoldPart("w"),), 4, 4)
    tensors = {"n": torch.tensor([1.0, 60000.0, 0.0, 1.0]).half(), "w": torch.tensor([[1.0, 1.0, 1e-4, 3e-5]]).half()}
    lower, upper = exponent_limits(site, tensors)
    assert lower.tolist() == [-8, 0, 0, 0]
    assert upper.tolist() == [8, 8, 8, 8]
    with pytest.raises(ValueError, match=r"w: exponents -1 to 0 are outside of exponent_limits"):
        apply_exponents(site, tensors, torch.tensor([0, -1, 0, 0], dtype=torch.int32))
    for exponents in (lower, upper):
        for name, changed in apply_exponents(site, tensors, exponents).items():
            back = changed.float() * powers_of_two(exponents if name == "n" else -exponents)
            assert torch.equal(back, tensors[name].float())


def test_wrong_shapes_are_named() -> None:
    weights, inputs, held_out = outlier_case(1.0)
    scheme = SCHEMES["mxfp4"]
    with pytest.raises(ShapeError, match="expected at least one weight"):
        choose_exponents([], scheme, inputs, held_out)
    with pytest.raises(ShapeError, match="held_out"):
        choose_exponents(weights, scheme, inputs, held_out[:0])
    with pytest.raises(ShapeError, match=r"weights\[1\]"):
        choose_exponents([weights[0], weights[1][:, :64]], scheme, inputs, held_out)
    site, tensors = value_site()
    with pytest.raises(ShapeError, match="expected 16 exponents"):
        apply_exponents(site, tensors, torch.zeros(8, dtype=torch.int32))
