"""Models and texts that cannot be rounded with data are refused, with the module, the text or the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rounding_cases import make_text, round_model, write_model
from safetensors.torch import load_file, save_file

from minifloat.calibration.data import CalibrationSet
from minifloat.errors import AlreadyQuantizedError, DataError, NonFiniteError, UsageError
from minifloat.quantize.job import quantize_checkpoint

KEPT, HELD_OUT = make_text(3, 30), make_text(2, 30, seed=1)


def set_value(folder: Path, tensor: str, row: int, value: float) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[tensor][row] = value
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("method", ["nearest", "gptq", "match"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("model.layers.1.mlp.up_proj.weight", r"model\.layers\.1\.mlp\.up_proj\.weight"),
        ("model.layers.1.mlp.down_proj.weight", r"model\.layers\.1\.mlp\.down_proj\.weight"),
        ("model.norm.weight", r"logits: .* on held-out sequence 0"),
        ("model.layers.1.input_layernorm.weight", r"model\.layers\.1\.self_attn\.q_proj"),
        ("model.layers.0.self_attn.v_proj.weight", r"model\.layers\.0\.self_attn\.v_proj\.weight"),
    ],
)
def test_nan_and_inf_in_a_weight_are_refused_with_the_module(
    tmp_path: Path, tensor: str, module: str, value: float, method: str
) -> None:
    folder = write_model(tmp_path / "model", "llama")
    set_value(folder, tensor, 3, value)
    with pytest.raises(NonFiniteError, match=module):
        round_model(folder, tmp_path / "work", KEPT, HELD_OUT, "fp8", method)


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("method", ["nearest", "gptq", "match"])
def test_nan_in_an_activation_is_refused_with_module_and_sequence(tmp_path: Path, method: str, fold: bool) -> None:
    folder = write_model(tmp_path / "model", "llama")
    token = KEPT.sequences[1][4]
    set_value(folder, "model.embed_tokens.weight", token, torch.nan)
    first = next(i for i, ids in enumerate(KEPT.sequences) if token in ids)
    with pytest.raises(NonFiniteError, match=rf"model\.layers\.0\.self_attn\.q_proj: .* in sequences? .*\b{first}\b"):
        round_model(folder, tmp_path / "work", KEPT, HELD_OUT, "fp8", method, fold=fold)


def test_text_of_another_vocabulary_is_refused_before_anything_runs(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    beyond = CalibrationSet(((1, 2, 288),))
    for kept, held_out in ((beyond, HELD_OUT), (KEPT, beyond)):
        with pytest.raises(DataError, match=r"vocabulary of 288"):
            round_model(folder, tmp_path / "work", kept, held_out)
    for kept, held_out in ((CalibrationSet(()), HELD_OUT), (KEPT, CalibrationSet(()))):
        with pytest.raises(DataError, match=r"at least one sequence"):
            round_model(folder, tmp_path / "work", kept, held_out)
    assert not (tmp_path / "work").exists()


def test_a_model_whose_layers_cannot_run_one_at_a_time_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path / "model",
        "gemma3n_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=288,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
    )
    with pytest.raises(UsageError, match=r"one at a time, because its layers share an object.*without data"):
        round_model(folder, tmp_path / "work", KEPT, HELD_OUT, "fp8")


def test_a_layer_larger_than_the_memory_allowed_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    with pytest.raises(UsageError, match=r"model\.layers\.\d needs"):
        round_model(folder, tmp_path / "work", KEPT, HELD_OUT, max_memory=10_000)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    quantize_checkpoint(folder, tmp_path / "quantized", "fp8")
    with pytest.raises(AlreadyQuantizedError):
        round_model(tmp_path / "quantized", tmp_path / "work", KEPT, HELD_OUT)
