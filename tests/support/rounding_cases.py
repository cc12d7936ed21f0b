"""Inputs of linears, checkpoints and calibration texts that the tests of calibrated rounding share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from minifloat.calibration.data import CalibrationSet
from minifloat.calibration.layerwise.calls import LayerCall
from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.layerwise.storage import ArgumentPool, TensorFile
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.progress import Progress
from minifloat.model.layouts import compressed_tensors, get_writer
from minifloat.model.plan.quantization import make_plan
from minifloat.numerics.scheme import Scheme, get_scheme
from minifloat.quantize.rounding import output_moments
from minifloat.quantize.rounding.methods import RoundingOptions, get_method
from minifloat.quantize.rounding.run import round_checkpoint
from minifloat.quantize.rounding.stages import Stage, find_stages
from minifloat.quantize.rounding.texts import SplitText

#: Sizes of the small models. A model type takes from them what its config has.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 288,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def correlated_inputs(tokens: int, width: int, seed: int = 1) -> Tensor:
    """Inputs ``[tokens, width]`` of one distribution, whose channels are correlated and of different sizes."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(width, width, generator=generator) * width**-0.5 + 0.5 * torch.eye(width)
    sizes = torch.rand(width, generator=generator) + 0.1
    return torch.randn(tokens, width, generator=generator.manual_seed(seed)) @ mixing * sizes


def hessian_of(inputs: Tensor) -> Tensor:
    """The mean of products X'X / tokens, computed in float64."""
    return (inputs.double().T @ inputs.double() / len(inputs)).float()


def write_model(folder: Path, model_type: str, *, fused: bool = False, **config: Any) -> Path:
    """Write a small model with random weights, biases and norms, and embeddings that lie near few directions."""
    generator = torch.Generator().manual_seed(0)
    values = {name: value for name, value in (SIZES | config).items() if value is not None or name == "pad_token_id"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator) * (0.15 if weight.ndim > 1 else 0.1)
        weight.data = noise + ("norm" in name and name.endswith("weight"))
    embeddings = model.get_input_embeddings().weight
    directions = torch.randn(8, embeddings.shape[1], generator=generator)
    near = torch.randn(len(embeddings), 8, generator=generator) @ directions * 8**-0.5
    embeddings.data = near + 0.1 * torch.randn(embeddings.shape, generator=generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    if fused:
        save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


def make_text(sequences: int, length: int = 48, seed: int = 0, tokens: range = range(3, 288)) -> CalibrationSet:
    """Sequences of random tokens; their lengths differ by a few tokens."""
    draw = random.Random(seed)
    lengths = [length + draw.randrange(-5, 6) for _ in range(sequences)]
    return CalibrationSet(tuple(tuple(draw.choice(tokens) for _ in range(each)) for each in lengths))


def split(kept: CalibrationSet, held_out: CalibrationSet) -> SplitText:
    """Choices are made, and reported, on the same held-out text."""
    return SplitText(kept, held_out, held_out)


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets an element with each pass that takes moments of outputs."""
    passes: list[None] = []
    run = output_moments._Gradients.run
    monkeypatch.setattr(output_moments._Gradients, "run", lambda *given: passes.append(run(*given)))
    return passes


@dataclass(frozen=True)
class Rounding:
    """The result of `round`: what `RoundedModel` holds, in memory."""

    tensors: dict[str, bytes]
    weights: dict[str, Any]
    held_out: dict[str, Any]
    seen: dict[str, Any]


def round_model(
    folder: Path,
    work: Path,
    kept: CalibrationSet,
    held_out: CalibrationSet,
    scheme: str | Scheme = "mxfp4",
    method: str = "match",
    *,
    layout: str = compressed_tensors.NAME,
    progress: Progress | None = None,
    **options: Any,
) -> Rounding:
    """Round a checkpoint, without folding unless asked for."""
    chosen = get_scheme(scheme) if isinstance(scheme, str) else scheme
    given = RoundingOptions(method=get_method(method), **{"fold": False, **options})
    with Checkpoint.open(folder) as checkpoint:
        plan = make_plan(checkpoint, chosen, get_writer(layout))
        with round_checkpoint(checkpoint, plan, split(kept, held_out), given, work, progress) as rounded:
            names = [tensor.name for row in plan.tensors for tensor in row.outputs if tensor.name in rounded]
            tensors = {name: rounded.read(name).tobytes() for name in names}
            return Rounding(tensors, dict(rounded.weights), dict(rounded.held_out), dict(rounded.seen))


@dataclass(frozen=True)
class OpenLayer:
    """A layer with its weights, and what it is called with."""

    stack: LayerStack
    layer: nn.Module
    stages: list[Stage]
    calls: list[LayerCall]
    hidden: list[Tensor]


@contextmanager
def open_layer(folder: Path, file: Path, text: CalibrationSet, index: int = 0) -> Iterator[OpenLayer]:
    """Run a model up to a layer, and open the layer."""
    with Checkpoint.open(folder) as checkpoint, TensorFile(file) as arguments, torch.no_grad():
        model = CalibrationModel(checkpoint, CalibrateOptions())
        stack = LayerStack(model, model.loader(), None)
        hidden: list[Tensor] = []
        pool = ArgumentPool(arguments, stack.device)
        calls = stack.capture(
            [(sequence,) for sequence in text.sequences], pool, lambda _, states: hidden.append(states.clone())
        )
        for earlier in range(index):
            with stack.weights.layer(earlier) as layer:
                hidden = [call[earlier].run(layer, x) for call, x in zip(calls, hidden, strict=True)]
        own = [call[index] for call in calls]
        with stack.weights.layer(index) as layer:
            prefix = f"{stack.path}.{index}"
            stages = find_stages(stack.model, prefix, layer, stack.sites_of(index), own[0], hidden[0])
            yield OpenLayer(stack, layer, stages, own, hidden)


def scale_channels(folder: Path, norms: list[str]) -> None:
    """Give two channels behind each norm outliers."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in norms:
        tensors[name][:2] *= 32
        prefix, _, kind = name.removesuffix(".weight").rpartition(".")
        inside = ("self_attn.q", "self_attn.k", "self_attn.v") if kind.startswith("input") else ("mlp", "block_sparse")
        for reader, weight in tensors.items():
            reads = reader.startswith(tuple(f"{prefix}.{part}" for part in inside))
            if reads and weight.ndim > 1 and "down_proj" not in reader and ".w2" not in reader:
                weight[:, :2] /= 32
    save_file(tensors, file, metadata={"format": "pt"})
