"""Checkpoints that other tools wrote: the logits and weights of an independent dequantization.

The expectations in tests/data/interop/ were made without this package; how, says the README there. They are those of
weight-only models; quantized inputs are the subject of test_quantized_inputs.py.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from minifloat.checkpoint import Checkpoint
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.model.layouts import describe, read_weight
from minifloat.model.runtime.experts import QuantizedExperts
from minifloat.model.runtime.linear import QuantizedLinear
from minifloat.model.runtime.load import LoadOptions, load

INTEROP = Path(__file__).parents[2] / "data" / "interop"
FIXTURES = sorted(path.parent.name for path in INTEROP.glob("*/expected.safetensors"))


def test_there_are_fixtures_of_every_tool() -> None:
    assert {name.split("-")[0] for name in FIXTURES} >= {"deepseek", "gpt", "llmc", "modelopt", "vllm"}


@pytest.mark.parametrize("name", FIXTURES)
def test_the_logits_are_those_of_an_independent_dequantization(name: str) -> None:
    expected = load_file(INTEROP / name / "expected.safetensors")
    model = load(INTEROP / name, LoadOptions(dtype=torch.float32, weight_only=True))
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits[0]
    tolerance = 1e-5 * float(expected["logits"].abs().max())
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=tolerance)


def with_tokenizer(source: Path, folder: Path) -> Path:
    """A copy with a word for each of the few tokens; the fixtures have none."""
    shutil.copytree(source, folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", FIXTURES)
def test_the_engine_continues_as_the_independent_logits_say(name: str, tmp_path: Path) -> None:
    expected = load_file(INTEROP / name / "expected.safetensors")
    prompt = tuple(expected["input_ids"][0].tolist())
    cache = "bfloat16" if "kv" in name else "auto"  # not the FP8 cache that some declare
    engine = Engine(
        with_tokenizer(INTEROP / name, tmp_path / "model"), EngineOptions(dtype="float32", kv_cache_dtype=cache)
    )
    (completion,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    likeliest = expected["logits"][-1].topk(2)
    assert likeliest.values[0] - likeliest.values[1] > 0.01, "the fixture does not tell"
    assert completion.tokens == (int(likeliest.indices[0]),)


@pytest.mark.parametrize("name", ["gpt-oss-mxfp4", "llmc-moe-fp8-dynamic", "modelopt-moe-nvfp4"])
def test_experts_that_must_be_dequantized_give_the_same_logits(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("minifloat.model.runtime.load.indexes_experts", lambda *_: False)
    expected = load_file(INTEROP / name / "expected.safetensors")
    model = load(INTEROP / name, LoadOptions(dtype=torch.float32, weight_only=True))
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
