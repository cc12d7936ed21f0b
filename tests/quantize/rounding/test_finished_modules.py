"""Modules that end with a linear are found, and their use does not change a bit of the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_cases import OpenLayer, make_text, open_layer, round_model, write_model
from torch import nn

from minifloat.calibration.layerwise.storage import TensorFile
from minifloat.quantize.rounding import walk
from minifloat.quantize.rounding.stages import FinishedModule, FinishedModules, find_finished_modules

#: Model type -> config beyond the common sizes, and the closed modules with their linears.
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "llama": ({}, {"self_attn": "self_attn.o_proj", "mlp": "mlp.down_proj"}),
    "phi3": ({}, {"self_attn": "self_attn.o_proj", "mlp": "mlp.down_proj"}),
    "cohere": ({}, {"self_attn": "self_attn.o_proj", "mlp": "mlp.down_proj"}),
    "qwen3_moe": ({}, {"self_attn": "self_attn.o_proj"}),
    "qwen2_moe": ({}, {"self_attn": "self_attn.o_proj", "mlp.shared_expert": "mlp.shared_expert.down_proj"}),
}


def finished_of(opened: OpenLayer, index: int) -> dict[int, FinishedModule]:
    """The finished modules of an open layer."""
    prefix = f"{opened.stack.path}.{index}"
    return find_finished_modules(
        opened.stack.model, prefix, opened.layer, opened.stages, opened.calls[0], opened.hidden[0]
    )


@pytest.mark.parametrize(("model_type", "config", "expected"), [(k, *v) for k, v in CASES.items()], ids=CASES)
def test_attention_and_mlp_end_with_a_linear(
    tmp_path: Path, model_type: str, config: dict[str, Any], expected: dict[str, str]
) -> None:
    folder = write_model(tmp_path / "model", model_type, **config)
    with open_layer(folder, tmp_path / "arguments", make_text(1), 1) as opened:
        prefix = f"{opened.stack.path}.1"
        found = finished_of(opened, 1)
        names = {
            item.path.removeprefix(f"{prefix}."): item.linear.removeprefix(f"{prefix}.") for item in found.values()
        }
        assert names == expected
        for number, item in found.items():
            assert opened.stages[number].path == item.linear


def test_a_module_that_changes_the_output_of_its_linear_is_not_closed(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    with open_layer(folder, tmp_path / "arguments", make_text(1), 0) as opened:
        attention, plain = opened.layer.self_attn, type(opened.layer.self_attn).forward
        attention.forward = lambda *a, **k: (plain(attention, *a, **k)[0].mul_(0.5), None)  # in place: the same memory
        assert finished_of(opened, 0) == {}
        del attention.forward


def test_the_linear_runs_alone_on_the_kept_inputs(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))
    model = nn.ModuleDict({"block": block})
    inputs = torch.randn(6, 8)
    with TensorFile(tmp_path / "file") as file, torch.inference_mode():
        finished = FinishedModules(model, {2: FinishedModule("block", "block.2", 3, 2)}, file)
        finished.keep(1, 0, torch.randn(6, 5))  # of a stage that closes nothing
        finished.keep(2, 0, inputs)
        hidden = torch.randn(2, 3, 4)
        with finished.applied(0, hidden):
            output, nothing = block(hidden)
            assert output.equal(block[2](inputs.view(2, 3, 8)))
            assert nothing is None
        with finished.applied(1, hidden):  # no inputs of this batch
            assert block(torch.randn(2, 4)).shape == (2, 4)
        assert block(torch.randn(2, 4)).shape == (2, 4)


def test_a_linear_runs_once_for_each_batch_whatever_follows_it(tmp_path: Path) -> None:
    parts = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, width, bias=False)) for width in (4, 8, 4)]
    model = nn.ModuleDict({"a": parts[0], "b": parts[1], "c": parts[2]})
    counts = dict.fromkeys(model, 0)
    for name, part in model.items():
        part[1].weight.data = torch.randint(-3, 4, part[1].weight.shape).float()  # sums are exact
        plain = part[1].forward
        part[1].forward = lambda x, name=name, plain=plain: (counts.update({name: counts[name] + 1}), plain(x))[1]
    modules = {stage: FinishedModule(name, f"{name}.1", 3, 0) for stage, name in enumerate(model)}
    kept = torch.randint(-3, 4, (3, 3, 6)).float()
    with TensorFile(tmp_path / "file") as file, torch.inference_mode():
        finished = FinishedModules(model, modules, file)
        for stage in modules:
            finished.keep(stage, 5, kept[stage])
        expected = [part[1](kept[stage][None]) for stage, part in enumerate(parts)]
        counts.update(dict.fromkeys(counts, 0))
        for _ in range(3):
            hidden = torch.randn(1, 3, 4)
            with finished.applied(5, hidden):
                assert all(part(hidden).equal(want) for part, want in zip(parts, expected, strict=True))
    assert counts == {"a": 1, "b": 1, "c": 3}  # nothing follows the last one: its output is not kept


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("llama", "mxfp4"), ("llama", "nvfp4-w4a4"), ("qwen2_moe", "fp8-dynamic"), ("cohere", "nvfp4")],
)
def test_the_codes_are_those_of_whole_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, scheme: str
) -> None:
    folder = write_model(tmp_path / "model", model_type)
    text = make_text(6), make_text(3, seed=1)
    short = round_model(folder, tmp_path / "work", *text, scheme, fold=True)
    monkeypatch.setattr(walk, "find_finished_modules", lambda *_: {})
    whole = round_model(folder, tmp_path / "work", *text, scheme, fold=True)
    assert short == whole
