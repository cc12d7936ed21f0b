"""What inputs cost, measured layer by layer, equals what whole models with hooks on their linears give."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from minifloat.calibration.data import CalibrationSet
from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.scheme import SCHEMES
from minifloat.quantize.rounding import stage_inputs
from minifloat.quantize.rounding.damage import token_divergence
from minifloat.quantize.rounding.input_walk import INPUTS, WEIGHTS, measured_losses
from minifloat.quantize.rounding.methods import Grid, RoundingOptions

MakeModel = Callable[..., Path]
SCHEME = SCHEMES["fp8-dynamic"]


@torch.inference_mode()
def losses(original: PreTrainedModel, other: PreTrainedModel, text: CalibrationSet) -> tuple[float, float]:
    ids = torch.tensor(text.sequences)
    pairs = list(zip(original(ids).logits, other(ids).logits, strict=True))
    changed = torch.cat([one.argmax(-1) != two.argmax(-1) for one, two in pairs])
    return float(torch.cat([token_divergence(one, two)[0] for one, two in pairs]).mean()), float(
        changed.double().mean()
    )


def round_inputs(model: PreTrainedModel, modules: Iterable[str]) -> None:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        assert SCHEME.activation is not None
        codes, grid = quantize_activation(args[0], SCHEME.activation, None)
        return (dequantize_activation(codes, grid, SCHEME.activation).to(args[0].dtype),)

    for module in modules:
        model.get_submodule(module).register_forward_pre_hook(hook)


def test_each_loss_is_that_of_a_whole_model(
    make_llama: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = Mock(side_effect=stage_inputs.round_inputs)
    monkeypatch.setattr(stage_inputs, "round_inputs", rounded)
    folder = make_llama(tmp_path / "llama", dtype="float32")
    generator = random.Random(0)
    text = CalibrationSet(tuple(tuple(generator.randrange(256) for _ in range(32)) for _ in range(4)))
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, SCHEME, get_writer("compressed-tensors"))
        every = frozenset(plan.modules)
        with measured_losses(checkpoint, plan, text, RoundingOptions(), tmp_path / "work") as found:
            assert (tmp_path / "work").exists()
    assert not (tmp_path / "work").exists()
    assert rounded.call_count == 2 * 4  # in two layers q/k/v, o, gate/up, down, all sequences in one batch
    original, nearest = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    for module in every:
        weight = nearest.get_parameter(f"{module}.weight").data
        weight.copy_(Grid.of(weight, SCHEME.weight, None).nearest.dequantize())
    expected = {WEIGHTS: losses(original, nearest, text)}
    round_inputs(nearest, every)
    expected[INPUTS] = losses(original, nearest, text)
    assert found.keys() == expected.keys()
    for name, (kl, changed) in expected.items():
        assert found[name].kl == pytest.approx(kl, rel=2e-3)
        assert found[name].disagreement == pytest.approx(changed, abs=0.02)
    assert found[WEIGHTS].kl < found[INPUTS].kl
