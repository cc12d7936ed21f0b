"""The moments of gradients that are taken layer by layer equal those of the whole model with plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rounding_cases import make_text, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from minifloat.calibration.layerwise.layer_stack import LayerStack
from minifloat.calibration.model import CalibrationModel
from minifloat.calibration.options import CalibrateOptions
from minifloat.checkpoint import Checkpoint
from minifloat.kernels.rounding import ROW_BLOCK
from minifloat.quantize.estimate import moment_tokens
from minifloat.quantize.rounding import output_moments as module
from minifloat.quantize.rounding.output_moments import OutputMoments

#: Two of one length, which run together, and one more.
SEQUENCES = (*(sequence[:15] for sequence in make_text(2, 20).sequences), *make_text(1, 20, seed=1).sequences)


@contextmanager
def measured(folder: Path, work: Path, dtype: torch.dtype = torch.float32) -> Iterator[OutputMoments]:
    with Checkpoint.open(folder) as checkpoint:
        model = CalibrationModel(checkpoint, CalibrateOptions(dtype=dtype))
        stack = LayerStack(model, model.loader(), None)
        with OutputMoments(work) as found:
            found.take(stack, SEQUENCES, "fingerprint")
            yield found


def of_whole_model(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """X'X of the gradients of the outputs of some linears, ``[N, N]``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator, outputs, totals = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    for name in names:
        linear = model.get_submodule(name)
        linear.register_forward_hook(lambda _, __, output, name=name: outputs.__setitem__(name, output))
    for sequence in SEQUENCES:
        logits = model(input_ids=torch.tensor([sequence])).logits[0]
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        loss = -logits.log_softmax(-1).gather(1, drawn[:, None]).sum()
        for name, gradient in zip(names, torch.autograd.grad(loss, [outputs[name] for name in names]), strict=True):
            totals[name] = totals.get(name, 0) + gradient[0].T @ gradient[0]
    return totals


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
def test_the_moments_are_those_of_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", family, hidden_size=96, intermediate_size=160)
    attention = [f"model.layers.{n}.self_attn.{kind}_proj" for n in range(2) for kind in ("q", "k", "v", "o")]
    mlp = [f"model.layers.{n}.mlp.{kind}_proj" for n in range(2) for kind in ("gate", "up", "down")]
    names = attention + ([] if family == "mixtral" else mlp)
    expected = of_whole_model(folder, names)
    with measured(folder, tmp_path / "work") as moments:
        found = moments.of([*names, "model.layers.0.block_sparse_moe.experts.0.w1"])
    assert found.keys() == expected.keys()  # experts have none
    for name, full in expected.items():
        for block, own in enumerate(found[name]):
            rows = slice(block * ROW_BLOCK, (block + 1) * ROW_BLOCK)
            part = full[rows, rows]
            torch.testing.assert_close(own[: len(part), : len(part)], part, rtol=1e-3, atol=1e-5 * float(full.max()))
            assert not own[len(part) :].any()
            assert not own[:, len(part) :].any()
    assert not list(tmp_path.glob("work*"))


def test_finished_moments_are_read_and_those_of_an_interrupted_run_are_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, name = write_model(tmp_path / "model", "llama"), "model.layers.0.mlp.down_proj"
    with measured(folder, tmp_path / "undisturbed") as moments:
        expected = moments.of([name])[name]
    backward = module._Gradients._backward

    def fail(run: module._Gradients, index: int, *arguments: object) -> list[Tensor]:
        if not index:
            raise KeyboardInterrupt
        return backward(run, index, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(module._Gradients, "_backward", fail)
        with pytest.raises(KeyboardInterrupt), measured(folder, tmp_path / "work"):
            pass

    def fail_behind() -> None:
        with measured(folder, tmp_path / "work") as moments:
            assert torch.equal(moments.of([name])[name], expected)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_behind()
    monkeypatch.setattr(module._Gradients, "run", None)  # is not called
    with measured(folder, tmp_path / "work") as moments:
        assert torch.equal(moments.of([name])[name], expected)


def test_gradients_that_are_not_finite_count_as_none(tmp_path: Path) -> None:
    folder, name = write_model(tmp_path / "model", "llama"), "model.layers.0.mlp.down_proj"
    with Checkpoint.open(folder) as checkpoint:
        model = CalibrationModel(checkpoint, CalibrateOptions())
        loader = model.loader()
        stack = LayerStack(model, loader, None)
        gradient = stack.loss_gradient
        stack.loss_gradient = lambda *arguments: gradient(*arguments) * torch.inf  # type: ignore[method-assign]
        with OutputMoments(tmp_path / "work") as moments:
            moments.take(stack, SEQUENCES, "fingerprint")
            assert bool(moments.of([name])[name].isfinite().all())


def test_deep_and_wide_models_take_fewer_tokens() -> None:
    """Of 80 layers of 8,192 channels the hidden states of 6,472 tokens take 8 GiB."""
    assert moment_tokens({"hidden_size": 576}, 30, 2) == 16384
    assert moment_tokens({"hidden_size": 8192}, 80, 2) == (8 << 30) // (81 * 8192 * 2)
