"""The inputs read stage by stage are those of hooks in the whole model; rows of two models are paired by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rounding_cases import make_text, open_layer, write_model
from torch import Tensor

from minifloat.calibration.layerwise.storage import TensorFile
from minifloat.errors import NonFiniteError
from minifloat.model.runtime.load import load
from minifloat.model.runtime.products import fast_products
from minifloat.quantize.rounding.stage_inputs import StageInputs, StageReader, StoredStageInputs, pair
from minifloat.quantize.rounding.stages import Residual, Stage

TEXT = make_text(3, 30)


class WholeModel:
    """The inputs of every module of a layer in the whole model, by path, for one sequence."""

    def __init__(self, folder: Path, layer: str, sequence: tuple[int, ...]) -> None:
        self.model: Any = load(folder)
        self.inputs: dict[str, tuple[Tensor, ...]] = {}
        for path, module in self.model.named_modules():
            if path.startswith(layer):
                module.register_forward_pre_hook(self._keep(path), with_kwargs=True)
        with torch.no_grad(), fast_products():
            self.model(torch.tensor([sequence]), use_cache=False)

    def _keep(self, path: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            self.inputs[path] = tuple(tensor.clone() for tensor in tensors)

        return hook

    def first(self, path: str) -> Tensor:
        """The first input of a module, token by token."""
        tensor = self.inputs[path][0]
        return tensor.reshape(-1, tensor.shape[-1])

    def expert_rows(self, path: str, outer: bool) -> list[tuple[int, int, Tensor]]:
        """Expert, token and input of every row of an experts module, one row at a time."""
        module = self.model.get_submodule(path)
        hidden, chosen = self.inputs[path][:2]
        rows = []
        for expert in range(module.num_experts):
            for token in range(len(hidden)):
                if expert in chosen[token]:
                    row = hidden[token]
                    if outer:
                        gate, up = (module.gate_up_proj[expert] @ row).chunk(2)
                        row = module.act_fn(gate) * up
                    rows.append((expert, token, row))
        return rows


@pytest.mark.parametrize("model_type", ["llama", "phi3", "granite", "gpt_oss", "qwen2_moe", "mixtral"])
@torch.no_grad()
def test_the_inputs_of_every_stage_are_those_of_hooks_in_the_whole_model(tmp_path: Path, model_type: str) -> None:
    folder = write_model(tmp_path / "model", model_type)
    with open_layer(folder, tmp_path / "arguments", TEXT, 1) as opened:
        layer = f"{opened.stack.path}.1"
        reader = StageReader(opened.stack.model, opened.layer, opened.stages)
        for number, sequence in enumerate(TEXT.sequences):
            whole = WholeModel(folder, layer, sequence)
            call, hidden = opened.calls[number], opened.hidden[number]
            output, all_readings = reader.read_all(call, hidden)
            if all(stage.outer is None for stage in opened.stages):
                assert torch.equal(output, call.run(opened.layer, hidden))
            else:  # transformers' kernel for all experts at once may sum in another order
                torch.testing.assert_close(output, call.run(opened.layer, hidden), rtol=0.02, atol=0.02)
            for stage, at_once in zip(opened.stages, all_readings, strict=True):
                alone = reader.read(stage, call, hidden)
                if stage.outer is None:
                    for stage_input in (at_once, alone):
                        assert torch.equal(stage_input.inputs, whole.first(stage.path))
                        assert (stage_input.experts, stage_input.tokens) == (None, None)
                        assert (stage_input.residual is None) == (stage.residual is None)
                        if stage.residual is not None:
                            assert torch.equal(stage_input.residual, whole.first(stage.residual.path or layer))
                    continue
                if not stage.outer:
                    assert torch.equal(at_once.inputs, whole.first(stage.path))
                    assert at_once.experts is None
                else:
                    assert torch.equal(at_once.inputs, alone.inputs)
                    assert torch.equal(at_once.experts, alone.experts)
                assert alone.experts is not None
                assert alone.tokens is not None
                if model_type == "gpt_oss" and stage.outer:
                    continue  # its gate is a formula of its own
                rows = whole.expert_rows(stage.path, stage.outer)
                assert torch.equal(alone.experts, alone.experts.sort().values)
                order = (alone.experts * 1000 + alone.tokens).argsort()  # the tokens of an expert come in any order
                found = zip(alone.experts[order].tolist(), alone.tokens[order].tolist(), strict=True)
                assert list(found) == [(expert, token) for expert, token, _ in rows]
                expected = torch.stack([row for _, _, row in rows])
                if stage.outer:  # of a product of one row, whose sum another kernel may order otherwise
                    torch.testing.assert_close(alone.inputs[order], expected, rtol=0.02, atol=0.02)
                else:
                    assert torch.equal(alone.inputs[order], expected)
        assert all("forward" not in module.__dict__ for module in opened.layer.modules())
        assert not any(module._forward_pre_hooks for module in opened.layer.modules())


# ------------------------------------------------------------------------------------------------- pairs

DENSE = Stage("layer.o_proj", (("layer.o_proj",),), 2)
INNER = Stage("layer.experts", (("layer.experts.0.gate_proj",), ("layer.experts.1.gate_proj",)), 2, outer=False)
OUTER = Stage("layer.experts", (("layer.experts.0.down_proj",), ("layer.experts.1.down_proj",)), 2, outer=True)


def rows(*values: float) -> Tensor:
    """Rows ``[n, 2]`` of equal numbers."""
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 2).clone()


def test_rows_of_a_dense_stage_are_paired_in_order() -> None:
    found, experts = pair(StageInputs(rows(1, 2, 3)), StageInputs(rows(1.5, 2.5, 3.5)), DENSE, "sequence 0")
    assert experts is None
    assert torch.equal(found.inputs, rows(1.5, 2.5, 3.5))
    assert torch.equal(found.reference, rows(1, 2, 3))
    assert found.residual is None


def test_the_error_of_the_residual_stream_counts_in_units_of_the_linears_output() -> None:
    stage = Stage("layer.o_proj", (("layer.o_proj",),), 2, residual=Residual("", 0.25))
    original, quantized = StageInputs(rows(1, 2), residual=rows(5, 6)), StageInputs(rows(1, 2), residual=rows(4, 8))
    found, _ = pair(original, quantized, stage, "sequence 0")
    assert found.residual is not None
    assert torch.equal(found.residual, rows(4, -8))


def test_the_reference_of_a_gate_is_the_hidden_state_of_its_token_whatever_its_expert_was() -> None:
    quantized = StageInputs(rows(10, 12, 11), torch.tensor([0, 0, 1]), torch.tensor([0, 2, 1]))
    found, experts = pair(StageInputs(rows(1, 2, 3)), quantized, INNER, "sequence 0")
    assert torch.equal(experts, torch.tensor([0, 0, 1]))
    assert torch.equal(found.inputs, rows(10, 12, 11))
    assert torch.equal(found.reference, rows(1, 3, 2))


def test_a_token_that_is_routed_elsewhere_in_the_quantized_model_counts_as_without_drift() -> None:
    original = StageInputs(rows(1, 2, 3), torch.tensor([0, 1, 1]), torch.tensor([5, 5, 7]))
    quantized = StageInputs(rows(10, 20, 30, 40), torch.tensor([0, 0, 1, 1]), torch.tensor([5, 7, 4, 7]))
    found, experts = pair(original, quantized, OUTER, "sequence 0")
    assert torch.equal(experts, torch.tensor([0, 0, 1, 1]))
    assert torch.equal(found.reference, rows(1, 20, 30, 3))
    assert torch.equal(found.inputs, rows(10, 20, 30, 40))


def test_an_expert_that_the_original_model_used_for_no_token_has_no_drift() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    quantized = StageInputs(rows(10, 20), torch.tensor([0, 1]), torch.tensor([3, 3]))
    found, _ = pair(StageInputs(rows(), none, none), quantized, OUTER, "sequence 0")
    assert torch.equal(found.reference, rows(10, 20))


def test_no_rows_are_a_pair_of_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    found, experts = pair(
        StageInputs(rows(1), torch.tensor([0]), torch.tensor([0])), StageInputs(rows(), none, none), OUTER, "sequence 0"
    )
    assert len(found.inputs) == len(found.reference) == 0
    assert experts is not None
    assert len(experts) == 0


@pytest.mark.parametrize("broken", ["original", "quantized"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_or_inf_in_an_input_is_refused_with_module_and_sequence(broken: str, value: float) -> None:
    stage_inputs = {"original": StageInputs(rows(1, 2)), "quantized": StageInputs(rows(1, 2))}
    stage_inputs[broken].inputs[1, 0] = value
    with pytest.raises(NonFiniteError, match=r"layer\.o_proj.*NaN or Inf in sequence 12"):
        pair(stage_inputs["original"], stage_inputs["quantized"], DENSE, "sequence 12")


def test_stored_readings_come_back_as_they_were(tmp_path: Path) -> None:
    stage_inputs = [
        StageInputs(torch.randn(5, 4).to(torch.bfloat16), residual=torch.randn(5, 3)),
        StageInputs(torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 1, 3]), torch.tensor([0, 4, 1, 2, 3, 0])),
        StageInputs(torch.randn(0, 7), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)),
    ]
    with TensorFile(tmp_path / "file") as file:
        stored = StoredStageInputs(file)
        stored.keep(0, stage_inputs)
        stored.keep(3, stage_inputs[::-1])
        for sequence, expected in ((0, stage_inputs), (3, stage_inputs[::-1])):
            for stage, stage_input in enumerate(expected):
                found = stored.read(sequence, stage)
                for left, right in zip(vars(found).values(), vars(stage_input).values(), strict=True):
                    assert (left is None and right is None) or torch.equal(left, right)
