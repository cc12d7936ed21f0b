"""Checkpoints that other tools wrote: the logits and weights of an independent dequantization.

The expectations in tests/data/interop/ were made without this package; how, says the README there. They are those of
weight-only models; quantized inputs are the subject of test_quantized_inputs.py.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minifloat.checkpoint import Checkpoint
from minifloat.layouts import describe, read_weight
from minifloat.serve.experts import QuantizedExperts
from minifloat.serve.linear import QuantizedLinear
from minifloat.serve.load import load

INTEROP = Path(__file__).parent.parent / "data" / "interop"
FIXTURES = sorted(path.parent.name for path in INTEROP.glob("*/expected.safetensors"))


def test_there_are_fixtures_of_every_tool() -> None:
    assert {name.split("-")[0] for name in FIXTURES} >= {"deepseek", "gpt", "llmc", "modelopt", "vllm"}


@pytest.mark.parametrize("name", FIXTURES)
def test_the_logits_are_those_of_an_independent_dequantization(name: str) -> None:
    expected = load_file(INTEROP / name / "expected.safetensors")
    model = load(INTEROP / name, dtype=torch.float32, weight_only=True)
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits[0]
    tolerance = 1e-5 * float(expected["logits"].abs().max())
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["gpt-oss-mxfp4", "llmc-moe-fp8-dynamic", "modelopt-moe-nvfp4"])
def test_experts_that_must_be_dequantized_give_the_same_logits(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minifloat.serve.load.indexes_experts", lambda *_: False)
    expected = load_file(INTEROP / name / "expected.safetensors")
    model = load(INTEROP / name, dtype=torch.float32, weight_only=True)
    assert not any(isinstance(module, QuantizedExperts) for module in model.modules())
    assert "held dequantized" in caplog.text
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits[0]
    tolerance = 1e-5 * float(expected["logits"].abs().max())
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FIXTURES)
def test_the_weights_are_those_of_an_independent_dequantization(name: str) -> None:
    expected = load_file(INTEROP / name / "expected.safetensors")
    weights = {key: tensor for key, tensor in expected.items() if key not in ("logits", "input_ids")}
    assert weights
    with Checkpoint.open(INTEROP / name) as checkpoint:
        stored = describe(checkpoint).weights
        for key, weight in weights.items():
            if weight.ndim == 3:  # fused experts, transposed by their model
                found = torch.stack(
                    [read_weight(checkpoint, stored[f"{key}.{e}"]).dequantize().T for e in range(len(weight))]
                )
            else:
                found = read_weight(checkpoint, stored[key.removesuffix(".weight")]).dequantize()
            torch.testing.assert_close(found, weight, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FIXTURES)
def test_every_module_that_the_tool_quantized_stays_quantized(name: str) -> None:
    facts = json.loads((INTEROP / name / "expected.json").read_text())
    model = load(INTEROP / name)
    held = {path for path, m in model.named_modules() if isinstance(m, QuantizedLinear | QuantizedExperts)}
    stacked = {path.rpartition(".")[0] for path in held if path.endswith(("gate_up_proj", "down_proj"))}
    for module in facts["modules"]:
        assert module in held or any(module.startswith(f"{experts}.") for experts in stacked), module
    assert not any(parameter.element_size() == 1 for parameter in model.parameters())
