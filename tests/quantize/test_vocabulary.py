"""``--lm-head`` and ``--embedding``: bytes, files, who loads them, and logits against torch's in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import minifloat.transformers
from minifloat.checkpoint import Checkpoint
from minifloat.commands.main import main
from minifloat.deploy.check import LoadVerdict, check_checkpoint
from minifloat.engine import Engine, EngineOptions
from minifloat.evaluate.compare.options import CompareOptions
from minifloat.evaluate.compare.run import compare_models
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.quantize.job import quantize_checkpoint
from minifloat.quantize.options import QuantizeOptions
from minifloat.quantize.preview import preview_quantization

minifloat.transformers.unregister()  # the import registers; tests of other modules need transformers as it is

MakeModel = Callable[..., Path]
IDS = torch.tensor([[5, 7, 11, 13, 17, 19]])
VOCABULARY, HIDDEN = 288, 64
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IN_FLOAT32 = LoadOptions(dtype=torch.float32, weight_only=True)


@pytest.fixture(scope="module")
def models(make_llama: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model with an output layer of its own, and one whose output layer is tied to the embedding."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: make_llama(folder / name, tie_word_embeddings=name == "tied", num_hidden_layers=1)
        for name in ("own", "tied")
    }


@pytest.fixture
def registered() -> Iterator[None]:
    minifloat.transformers.register()
    yield
    minifloat.transformers.unregister()


def shapes(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of the stored tensors of embedding and output layer."""
    with Checkpoint.open(folder) as checkpoint:
        outer = [info for info in checkpoint.tensors.values() if "layers" not in info.name and "norm" not in info.name]
        return {info.name: (info.dtype, list(info.shape)) for info in outer}


def exact_logits(folder: Path) -> torch.Tensor:
    """Decode every weight of FP8 by hand, and run transformers' own Llama in float64."""
    stored = load_file(folder / "model.safetensors")
    weights = {}
    for name, tensor in stored.items():
        if name.endswith("_scale"):
            continue
        scale = stored.get(f"{name}_scale")
        weights[name] = tensor.double() if scale is None else tensor.double() * scale.double()
    config = LlamaForCausalLM.config_class.from_pretrained(folder)
    del config.quantization_config
    model = LlamaForCausalLM(config).double()
    weights.setdefault(HEAD, weights[EMBEDDING])
    model.load_state_dict(weights)
    with torch.inference_mode():
        logits: torch.Tensor = model(IDS).logits[0]
    return logits


CASES = [
    ("own", {"lm_head": "fp8"}),
    ("own", {"embedding": "fp8"}),
    ("own", {"lm_head": "fp8", "embedding": "fp8"}),
    ("tied", {"embedding": "fp8"}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
@pytest.mark.usefixtures("registered")
def test_all_that_load_it_compute_what_the_codes_and_scales_say(
    models: dict[str, Path], tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    out = tmp_path / "out"
    quantize_checkpoint(models[name], out, "fp8", QuantizeOptions(**options))
    fp8, scales = ("F8_E4M3", [VOCABULARY, HIDDEN]), ("F32", [VOCABULARY, 1])
    expected = {EMBEDDING: ("BF16", [VOCABULARY, HIDDEN])} | ({} if name == "tied" else {HEAD: fp8})
    if "embedding" in options:
        expected |= {EMBEDDING: fp8, f"{EMBEDDING}_scale": scales}
    if name == "own":
        expected[HEAD] = fp8 if "lm_head" in options else ("BF16", [VOCABULARY, HIDDEN])
        expected |= {f"{HEAD}_scale": scales} if "lm_head" in options else {}
    assert shapes(out) == expected
    exact = exact_logits(out)
    engine = Engine(out, EngineOptions(dtype="float32", lm_head="bf16"))
    assert engine.info.runner == "native"
    assert engine.info.lm_head == ("fp8" if "lm_head" in options or name == "tied" else "bfloat16")
    with torch.inference_mode():
        found = {
            "engine": torch.cat(list(engine.logits(IDS[0].tolist()))),
            "load": load(out, IN_FLOAT32)(IDS).logits[0],
            "transformers": AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(IDS).logits[0],
        }
    if "lm_head" in options:  # load and transformers round inputs as the checkpoint declares, unless told not to
        del found["transformers"]
    for logits in found.values():
        torch.testing.assert_close(logits.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_the_device_decoder_multiplies_the_codes_of_a_tied_embedding(models: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(models["tied"], tmp_path / "out", "fp8", QuantizeOptions(embedding="fp8"))
    engine = Engine(tmp_path / "out", EngineOptions(dtype="float32", runner="device"))
    exact = exact_logits(tmp_path / "out")
    scores = torch.cat(list(engine.logits(IDS[0].tolist())))
    torch.testing.assert_close(scores.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    assert engine.info.lm_head == "fp8"


@pytest.mark.usefixtures("registered")
def test_save_pretrained_keeps_the_codes_of_an_embedding(models: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(models["tied"], tmp_path / "out", "fp8", QuantizeOptions(embedding="fp8"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "saved")
    assert shapes(tmp_path / "saved") == shapes(tmp_path / "out")


def quantize(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["quantize", *map(str, arguments)])


def test_mxfp8_and_the_command_that_repeats_the_run(models: dict[str, Path], tmp_path: Path) -> None:
    result = quantize(models["own"], tmp_path / "out", "--scheme", "mxfp4", "--lm-head", "mxfp8")
    assert result.exit_code == 0, result.output
    assert shapes(tmp_path / "out")[f"{HEAD}_scale"] == ("U8", [VOCABULARY, HIDDEN // 32])
    recipe = json.loads((tmp_path / "out" / "minifloat.json").read_text())["recipe"]
    assert "^lm_head$=mxfp8" in json.dumps(recipe)
    assert Engine(tmp_path / "out", EngineOptions()).info.lm_head == "mxfp8"


def test_a_tied_output_layer_has_no_format_of_its_own(models: dict[str, Path], tmp_path: Path) -> None:
    result = quantize(models["tied"], tmp_path / "out", "--lm-head", "fp8")
    assert result.exit_code == 2
    assert "--embedding fp8" in result.output


def test_embeddings_have_one_scheme(models: dict[str, Path], tmp_path: Path) -> None:
    result = quantize(models["own"], tmp_path / "out", "--override", "embed_tokens$=mxfp4")
    assert result.exit_code == 2
    assert "fp8 or 16 bits" in result.output


def test_what_would_be_saved_is_offered_with_the_bytes(models: dict[str, Path], tmp_path: Path) -> None:
    """And the offer holds to the byte; nothing is offered of what is quantized, or small beside the output."""
    for name, option in (("own", "lm_head"), ("own", "embedding"), ("tied", "embedding")):
        plain = preview_quantization(models[name], tmp_path / "out", "mxfp4")
        offers = [note for note in plain.notes if f"--{option.replace('_', '-')} fp8 would save" in note]
        assert len(offers) == 1
        smaller = preview_quantization(models[name], tmp_path / "out", "mxfp4", QuantizeOptions(**{option: "fp8"}))
        saved = plain.output_bytes - smaller.output_bytes
        assert saved == VOCABULARY * (HIDDEN - 4)
        assert f"{saved / 1024:.1f} KiB, {100 * saved / plain.output_bytes:.0f}% of the output" in offers[0]
        assert not [note for note in smaller.notes if f"--{option.replace('_', '-')} fp8" in note]


def test_servers_refuse_a_quantized_embedding_and_load_an_output_layer(models: dict[str, Path], tmp_path: Path) -> None:
    for name, options in (("embedding", {"embedding": "fp8"}), ("head", {"lm_head": "fp8"})):
        quantize_checkpoint(models["own"], tmp_path / name, "fp8-dynamic", QuantizeOptions(**options))
    for target, rule in (("vllm:h100", "vllm-embedding"), ("sglang:h100", "sglang-vocabulary")):
        rules = [finding.rule for finding in check_checkpoint(tmp_path / "embedding", target).failures]
        assert rules == [rule]
        assert not check_checkpoint(tmp_path / "head", target).failures
    assert check_checkpoint(tmp_path / "embedding", "minifloat:cpu").verdict is LoadVerdict.LOADS


def test_compare_measures_a_quantized_vocabulary(models: dict[str, Path], tmp_path: Path) -> None:
    quantize_checkpoint(models["tied"], tmp_path / "out", "fp8", QuantizeOptions(embedding="fp8"))
    quantize_checkpoint(models["tied"], tmp_path / "plain", "fp8")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 30)
    options = CompareOptions(max_tokens=300, window=64, prompts=0, lm_head="bf16")
    result = compare_models(models["tied"], [tmp_path / "out", tmp_path / "plain"], tmp_path / "text.txt", options)
    quantized, plain = (candidate.overall.kl_mean.value for candidate in result.candidates)
    assert 0 < plain < quantized < 1
