"""A source of any dtype is quantized with and without data, loads everywhere, and is compared."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import minifloat.transformers
from minifloat.commands.main import main
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.engine.native_decoder import grouped
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.run import compare_models
from minifloat.kernels.pack import FusedWeights, pack
from minifloat.model.runtime.load import LoadOptions, load

minifloat.transformers.unregister()  # the import registers; tests of other modules need transformers as it is

MakeModel = Callable[..., Path]
IDS = torch.tensor([[5, 7, 11, 13, 17, 19]])
#: The dtype of the weights of a twin, and of its norms.
TWINS = {
    "BF16": (torch.bfloat16, torch.bfloat16),
    "F16": (torch.float16, torch.float16),
    "F32": (torch.float32, torch.float32),
    "BF16 with F32 norms": (torch.bfloat16, torch.float32),
    "F16 with F32 norms": (torch.float16, torch.float32),
}
#: Options of `quantize` for each way of choosing codes and scales; TEXT stands for a file.
METHODS = {
    "nearest": ("--scheme", "mxfp4"),
    "self": ("--scheme", "mxfp4", "--data", "self", "--calibration-samples", "60", "--calibration-seq-len", "32"),
    "static": ("--scheme", "fp8-static", "--calibration", "TEXT", "--calibration-seq-len", "32"),
}

twins = pytest.mark.parametrize("twin", TWINS)
methods = pytest.mark.parametrize("method", METHODS)


@pytest.fixture(scope="module")
def source_of(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that writes a model in the dtypes of a twin: no narrower dtype holds its weights."""

    @functools.cache
    def make(twin: str) -> Path:
        weights, norms = TWINS[twin]
        folder = make_llama(tmp_path_factory.mktemp("twin") / "source", dtype="float32")
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for name, tensor in tensors.items():
            is_norm = "norm" in name
            changed = tensor + torch.rand(tensor.shape) / 8 if is_norm else tensor
            tensors[name] = changed.to(norms if is_norm else weights)
        save_file(tensors, file, metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["dtype"] = str(weights).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join("".join(random.Random(i).choices("abcdefgh", k=5)) for i in range(400)))
    return file


@pytest.fixture(scope="module")
def output_of(
    source_of: Callable[[str], Path], text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """A function that quantizes a twin once."""

    @functools.cache
    def make(twin: str, method: str) -> Path:
        output = tmp_path_factory.mktemp("quantized") / "output"
        options = [str(text) if option == "TEXT" else option for option in METHODS[method]]
        result = CliRunner().invoke(main, ["quantize", str(source_of(twin)), str(output), *options])
        assert result.exit_code == 0, result.output
        return output

    return make


@pytest.fixture
def registered() -> Iterator[None]:
    minifloat.transformers.register()
    yield
    minifloat.transformers.unregister()


@twins
@methods
@pytest.mark.usefixtures("registered")
def test_load_and_transformers_compute_the_same_in_the_dtype_of_the_source(
    output_of: Callable[[str, str], Path], twin: str, method: str
) -> None:
    output, dtype = output_of(twin, method), TWINS[twin][0]
    loaded = load(output)
    assert loaded.dtype == dtype
    with torch.inference_mode():
        expected = loaded(IDS).logits
        found = AutoModelForCausalLM.from_pretrained(output, dtype=dtype)(IDS).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert expected.isfinite().all()


@twins
@methods
def test_the_native_engine_answers_with_the_logits_of_load(
    output_of: Callable[[str, str], Path], twin: str, method: str
) -> None:
    """Activations of 16 bits round differently in the two; float32 does not."""
    output, dtype = output_of(twin, method), TWINS[twin][0]
    engine = Engine(output, EngineOptions(lm_head="bf16"))
    assert engine.info.runner == "native", engine.info.reason_not_native
    assert engine.info.dtype == engine.info.lm_head == str(dtype).removeprefix("torch.")
    scores = torch.cat(list(engine.logits(IDS[0].tolist())))
    with torch.inference_mode():
        expected = load(output, LoadOptions(weight_only=True))(IDS).logits[0].float()
    within = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(scores.float(), expected, rtol=0, atol=within * float(expected.abs().max()))
    answer = engine.generate([IDS[0].tolist()], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))[0]
    assert answer.tokens[0] == int(scores[-1].argmax())


@pytest.mark.parametrize("twin", ["F16", "F32"])
def test_a_source_writes_its_own_text_on_the_native_engine(source_of: Callable[[str], Path], twin: str) -> None:
    engine = Engine(source_of(twin), EngineOptions())
    assert engine.info.runner == "native", engine.info.reason_not_native
    scores = torch.cat(list(engine.logits(IDS[0].tolist())))
    with torch.inference_mode():
        expected = load(source_of(twin))(IDS).logits[0].float()
    torch.testing.assert_close(scores, expected, rtol=0, atol=(4e-3 if twin == "F16" else 1e-5) * float(expected.max()))


def test_weights_of_one_call_get_one_dtype() -> None:
    """BF16 holds the first, not the second."""
    weights = [torch.ones(32, 64), torch.full((32, 64), 1 / 3)]
    packed = [pack(weight.bfloat16() if index == 0 else weight) for index, weight in enumerate(weights)]
    both = grouped(FusedWeights, packed, "q")
    assert [weight.dtype for weight in both] == [torch.float32, torch.float32]
    assert all(torch.equal(weight.dequantize(), exact) for weight, exact in zip(both, weights, strict=True))


@twins
@methods
def test_compare_measures_the_output_on_the_engine(
    source_of: Callable[[str], Path], output_of: Callable[[str, str], Path], text: Path, twin: str, method: str
) -> None:
    result = compare_models(
        source_of(twin), output_of(twin, method), text, CompareOptions(max_tokens=300, window=64, prompts=0)
    )
    assert 0 < result.candidates[0].texts[0].kl_mean.value < 1
