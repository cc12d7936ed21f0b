"""Damages measured layer by layer equal those of whole models with exchanged weights; a stopped run continues."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rounding_cases import split
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from minifloat.calibration.data import CalibrationSet
from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.model.plan.tensor_plan import Part
from minifloat.numerics.scheme import SCHEMES
from minifloat.numerics.tensor import QuantizedTensor
from minifloat.quantize.rounding.damage import GroupsToMeasure, token_divergence
from minifloat.quantize.rounding.methods import RoundingOptions
from minifloat.quantize.rounding.rounded_model import RoundedModel
from minifloat.quantize.rounding.run import round_checkpoint

MakeModel = Callable[..., Path]
MXFP4 = SCHEMES["mxfp4"]
GROUPS = {
    "qkv": ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"],
    "down": ["model.layers.1.mlp.down_proj"],
    "both layers": ["model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"],
}


def sequences(count: int, seed: int) -> CalibrationSet:
    generator = random.Random(seed)
    return CalibrationSet(tuple(tuple(generator.randrange(256) for _ in range(32)) for _ in range(count)))


def dequantized(part: Part, model: RoundedModel) -> Tensor:
    rows, cols = part.shape
    codes = torch.from_numpy(model.read(part.tensors.codes.name)).reshape(rows, cols // 2)
    scale = torch.from_numpy(model.read(part.tensors.scale.name)).reshape(rows, -1)
    return QuantizedTensor(part.scheme.weight, part.shape, codes, scale, None).dequantize()


@torch.inference_mode()
def divergence(original: PreTrainedModel, other: PreTrainedModel, text: CalibrationSet) -> float:
    ids = torch.tensor(text.sequences)
    pairs = zip(original(ids).logits, other(ids).logits, strict=True)
    return float(torch.cat([token_divergence(one, two)[0] for one, two in pairs]).mean())


def put(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    for module, weight in weights.items():
        model.get_parameter(f"{module}.weight").data.copy_(weight)


def test_each_damage_is_that_of_whole_models_with_exchanged_weights(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama", dtype="float32")
    kept, held_out = sequences(24, 0), sequences(4, 1)
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, MXFP4, get_writer("compressed-tensors"))
        request = GroupsToMeasure(GROUPS, [MXFP4, SCHEMES["fp8"]])
        options = RoundingOptions(fold=False)
        with round_checkpoint(
            checkpoint, plan, split(kept, held_out), options, tmp_path / "work", groups=request
        ) as rounded:
            quantized = {p.module: dequantized(p, rounded) for tensor in plan.tensors for p in tensor.parts}
            damage, weights = rounded.damage, rounded.weights
    original, mixed = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    originals = {module: original.get_parameter(f"{module}.weight").data.clone() for module in quantized}
    put(mixed, quantized)
    assert damage["tokens"] == held_out.tokens
    assert damage["kl"] == pytest.approx(divergence(original, mixed, held_out), rel=1e-3)
    for name, modules in GROUPS.items():
        put(mixed, quantized | {module: originals[module] for module in modules})
        assert damage["given_back"][name] == pytest.approx(divergence(original, mixed, held_out), rel=1e-3)
        put(mixed, originals | {module: quantized[module] for module in modules})
        assert damage["alone"][name] == pytest.approx(divergence(original, mixed, held_out), rel=1e-3)
    errors = weights["model.layers.1.mlp.down_proj"]["format_errors"]
    assert 0 < errors["fp8"] < errors["mxfp4"] / 10


def test_a_run_that_stopped_in_a_later_layer_measures_the_same(make_llama: MakeModel, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "llama")
    kept, held_out = sequences(24, 0), sequences(4, 1)
    request = GroupsToMeasure(GROUPS, [MXFP4])

    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("layer 2"):
            raise KeyboardInterrupt

    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, MXFP4, get_writer("compressed-tensors"))

        def damage(work: str, *, killed: bool) -> object:
            options = RoundingOptions()
            report = stop if killed else None
            with round_checkpoint(
                checkpoint, plan, split(kept, held_out), options, tmp_path / work, report, groups=request
            ) as rounded:
                return rounded.damage

        with pytest.raises(KeyboardInterrupt):
            damage("killed", killed=True)
        assert damage("killed", killed=False) == damage("whole", killed=False)


def test_small_divergences_are_not_lost_in_rounding() -> None:
    original, other = torch.randn(2, 12, 300, generator=torch.Generator().manual_seed(0)).mul(8)
    other[:4] = original[:4] * (1 + 2e-4)  # in float32, rounding is as large as such divergences
    kl, differs = token_divergence(original, other)
    p, q = (logits.double().log_softmax(-1) for logits in (original, other))
    torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(-1), rtol=1e-6, atol=1e-12)
    assert differs.tolist() == (original.argmax(-1) != other.argmax(-1)).tolist()
