"""Damages measured layer by layer equal those of the whole model with plain autograd; experts are measured as one."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_cases import make_text, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.model.layouts import get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.activation import dequantize_activation, quantize_activation
from minifloat.numerics.scheme import SCHEMES, Scheme
from minifloat.quantize.rounding.group_damage import Change, DamageRequest, Damages
from minifloat.quantize.rounding.methods import Grid
from minifloat.quantize.rounding.output_moments import OutputMoments

#: Two of one length, which run together, and one more.
SEQUENCES = (*(sequence[:15] for sequence in make_text(2, 20).sequences), *make_text(1, 20, seed=1).sequences)
ATTENTION = {
    "qkv 0": [f"model.layers.0.self_attn.{kind}_proj" for kind in "qkv"],
    "o": [f"model.layers.{layer}.self_attn.o_proj" for layer in range(2)],
}


def damages(
    folder: Path, work: Path, groups: Mapping[str, Sequence[str]], schemes: Sequence[str], *, inputs: bool = False
) -> Damages:
    with Checkpoint.open(folder) as checkpoint:
        model = CalibrationModel(checkpoint, CalibrateOptions(dtype=torch.float32))
        plans = {name: make_plan(checkpoint, SCHEMES[name], get_writer("compressed-tensors")) for name in schemes}
        request = DamageRequest(groups, {name: Change(plan, inputs) for name, plan in plans.items()})
        with OutputMoments(work) as moments:
            moments.take(LayerStack(model, model.loader(), None), SEQUENCES, "fingerprint", request=request)
            return moments.damages


def of_whole_model(folder: Path, paths: Sequence[str], changed: Any) -> float:
    """Half the mean square over tokens of the products of gradients with changes of outputs, summed over modules.

    `changed` returns the output of a module that changed, from its path, the module and the arguments.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator, calls, outputs = torch.Generator().manual_seed(0), dict[str, Any](), dict[str, Tensor]()

    def keep(path: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        calls[path], outputs[path] = (args, kwargs), output

    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda _, args, kwargs, output, path=path: keep(path, args, kwargs, output), with_kwargs=True
        )
    total, tokens = 0.0, 0
    for sequence in SEQUENCES:
        logits = model(input_ids=torch.tensor([sequence])).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        loss = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
        seen = dict(outputs)
        gradients = torch.autograd.grad(loss, [seen[path] for path in paths])
        with torch.no_grad():
            change = torch.zeros(len(sequence), dtype=torch.float64)
            for path, gradient in zip(paths, gradients, strict=True):
                args, kwargs = calls[path]
                difference = changed(path, model.get_submodule(path), args, kwargs) - seen[path]
                change += (difference.double() * gradient.double()).sum(-1).flatten()
        total, tokens = total + float(change.square().sum()), tokens + len(sequence)
    return total / 2 / tokens


def nearest(weight: Tensor, scheme: Scheme) -> Tensor:
    amax = float(weight.abs().amax()) if scheme.weight.needs_tensor_amax else None
    return Grid.of(weight, scheme.weight, amax).nearest.dequantize()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_damage_of_weights_is_that_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, hidden_size=96, intermediate_size=160)
    groups = {**ATTENTION, "down": ["model.layers.1.mlp.down_proj"]}
    found = damages(folder, tmp_path / "work", groups, ["mxfp4", "fp8"])
    assert found.keys() == groups.keys()
    for name in ("mxfp4", "fp8"):

        def changed(_: str, module: Any, args: Any, __: Any, scheme: Scheme = SCHEMES[name]) -> Tensor:
            return torch.nn.functional.linear(args[0], nearest(module.weight.detach(), scheme), module.bias)

        expected = {
            "qkv 0": of_whole_model(folder, groups["qkv 0"], changed),
            "o": sum(of_whole_model(folder, [path], changed) for path in groups["o"]),
            "down": of_whole_model(folder, groups["down"], changed),
        }
        for group, damage in expected.items():
            assert found[group][name] == pytest.approx(damage, rel=2e-3)


def test_the_damage_of_rounded_inputs_is_that_of_the_whole_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    spec = SCHEMES["fp8-dynamic"].activation
    assert spec is not None
    found = damages(folder, tmp_path / "work", ATTENTION, ["fp8-dynamic"], inputs=True)

    def changed(_: str, module: Any, args: Any, __: Any) -> Tensor:
        codes, grid = quantize_activation(args[0], spec, None)
        return torch.nn.functional.linear(dequantize_activation(codes, grid, spec), module.weight, module.bias)

    expected = of_whole_model(folder, ATTENTION["qkv 0"], changed)
    assert found["qkv 0"]["fp8-dynamic"] == pytest.approx(expected, rel=1e-2)


def test_the_experts_of_a_layer_are_one_group(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "mixtral", hidden_size=96, intermediate_size=160)
    path = "model.layers.0.mlp.experts"
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, SCHEMES["mxfp4"], get_writer("compressed-tensors"))
    experts = [module for module in plan.modules if "layers.0." in module and ".experts." in module]
    found = damages(folder, tmp_path / "work", {"experts": experts}, ["mxfp4"])

    def changed(_: str, module: Any, args: Any, kwargs: Any) -> Tensor:
        rounded = copy.deepcopy(module)
        for parameter in rounded.parameters():
            parameter.data = torch.stack([nearest(matrix, SCHEMES["mxfp4"]) for matrix in parameter.data])
        output: Tensor = rounded(*args, **kwargs)
        return output

    expected = of_whole_model(folder, [path], changed)
    assert found["experts"]["mxfp4"] == pytest.approx(expected, rel=2e-3)
