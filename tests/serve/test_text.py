"""Streaming text: what arrives, when it ends, and that nothing is left running."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from minifloat.commands.main import main
from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.engine.text import Detokenizer
from minifloat.errors import CheckpointError, UsageError
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tokenizer import load_tokenizer
from minifloat.quantize.job import quantize_checkpoint
from minifloat.serve.text import generate, open_text_model

PROMPT = "Once upon"


@pytest.fixture(scope="module")
def model(llama_folder: Path) -> PreTrainedModel:
    return load(llama_folder, LoadOptions(dtype=torch.float32))


def force(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Let the model find these tokens the most probable, one after the other."""
    forward, coming = model.forward, itertools.chain(tokens, itertools.repeat(0))

    def forced(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits.zero_()[:, -1, next(coming)] = 1
        return output

    monkeypatch.setattr(model, "forward", forced)


def test_greedy_text_is_that_of_transformers(model: PreTrainedModel, llama_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama_folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    reference = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    with torch.no_grad():
        output = reference.generate(ids, max_new_tokens=20, do_sample=False)
    expected = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert "".join(generate(model, PROMPT, max_new_tokens=20)) == expected


def test_text_comes_piece_by_piece(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    force(model, monkeypatch, list(load_tokenizer(model.config.name_or_path)("abc def").input_ids))
    assert list(generate(model, PROMPT, max_new_tokens=7)) == list("abc def")


@pytest.mark.parametrize("text", ["naïve", "日本語", "a🙂b🙂", "e\u0301"])
def test_a_character_spread_over_tokens_comes_whole(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tokens = list(load_tokenizer(model.config.name_or_path)(text).input_ids)
    assert len(tokens) == len(text.encode())
    force(model, monkeypatch, tokens)
    assert list(generate(model, PROMPT, max_new_tokens=len(tokens))) == list(text)


def test_a_replacement_character_that_the_model_means_is_shown(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\N{REPLACEMENT CHARACTER}b"
    force(model, monkeypatch, list(load_tokenizer(model.config.name_or_path)(text).input_ids))
    assert "".join(generate(model, PROMPT, max_new_tokens=5)) == text


def test_bytes_that_are_no_character_are_not_held_back(llama_folder: Path) -> None:
    tokenizer = load_tokenizer(llama_folder)
    start_of_four = tokenizer("🙂").input_ids[0]
    decoder = Detokenizer(tokenizer, tokenizer("x").input_ids)
    pieces = [decoder.add(token) for token in [start_of_four] * 8]
    assert len("".join(pieces)) >= 4
    assert decoder.add(tokenizer("y").input_ids[0]) + decoder.rest() != ""


def test_an_unfinished_character_at_the_end_is_shown(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    force(model, monkeypatch, list(load_tokenizer(model.config.name_or_path)("a日").input_ids)[:2])
    assert "".join(generate(model, PROMPT, max_new_tokens=2)) == "a\N{REPLACEMENT CHARACTER}"


def test_text_ends_before_the_end_token(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(model.config.name_or_path)
    force(model, monkeypatch, [*tokenizer("ab").input_ids, tokenizer.eos_token_id, *tokenizer("cd").input_ids])
    assert "".join(generate(model, PROMPT, max_new_tokens=20)) == "ab"


def test_text_ends_where_the_positions_of_the_model_end(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    force(model, monkeypatch, [5] * 500)
    prompt = "x" * (model.config.max_position_embeddings - 3)
    assert len("".join(generate(model, prompt, max_new_tokens=100))) == 3


def test_a_seed_repeats_a_draw_and_leaves_the_global_state_alone(model: PreTrainedModel) -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    draws = ["".join(generate(model, PROMPT, max_new_tokens=12, temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_small_top_p_is_greedy(model: PreTrainedModel) -> None:
    greedy = "".join(generate(model, PROMPT, max_new_tokens=12))
    assert "".join(generate(model, PROMPT, max_new_tokens=12, temperature=1.0, top_p=1e-6, seed=0)) == greedy


def test_a_seed_draws_the_tokens_that_the_engine_draws(model: PreTrainedModel, llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32", runner="transformers"))
    params = SamplingParams(temperature=1.5, top_p=0.9, seed=3, max_tokens=12)
    (completion,) = engine.generate(PROMPT, params)
    text = "".join(generate(model, PROMPT, max_new_tokens=12, temperature=1.5, top_p=0.9, seed=3))
    assert text == completion.text


def test_an_error_in_the_model_reaches_the_reader(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the kernel broke")

    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(RuntimeError, match="the kernel broke"):
        list(generate(model, PROMPT))


def test_logits_that_are_nan_end_the_command_with_one_line(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] *= torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = CliRunner().invoke(main, ["generate", str(folder), "Once", "-n", "2"])
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert "minifloat: error: the text ended with an error: the model's logits are not finite" in result.output


def test_an_empty_prompt_begins_with_the_begin_token(model: PreTrainedModel) -> None:
    assert "".join(generate(model, "", max_new_tokens=5)) != ""


def test_a_folder_with_quantized_weights_is_accepted(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    text = "".join(generate(tmp_path / "q", PROMPT, max_new_tokens=12, temperature=1.0, seed=0))
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=12)
    assert text == Engine(tmp_path / "q").generate(PROMPT, params)[0].text != ""


@pytest.mark.parametrize(
    ("scheme", "is_native", "is_native_weight_only"),
    [("mxfp4", True, True), ("fp8-dynamic", False, True), ("fp8-block", False, True)],
)
def test_the_decoder_runs_what_does_not_quantize_inputs(
    scheme: str, is_native: bool, is_native_weight_only: bool, llama_folder: Path, tmp_path: Path
) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", scheme)
    assert isinstance(open_text_model(tmp_path / "q"), Engine) == is_native
    assert isinstance(open_text_model(tmp_path / "q", weight_only=True), Engine) == is_native_weight_only


def test_the_decoder_greedily_makes_the_text_of_transformers(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")  # values of BF16, computed with in float32: without near ties
    save_file({name: weight.float() for name, weight in weights.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    engine = open_text_model(folder)
    assert isinstance(engine, Engine)
    text = "".join(generate(engine, PROMPT, max_new_tokens=20))
    assert text == "".join(generate(load(folder), PROMPT, max_new_tokens=20)) != ""
    with pytest.raises(UsageError, match="has 200 tokens; the model attends to 128"):
        generate(engine, "x" * 200)


def test_a_model_that_the_decoder_does_not_support_is_left_to_transformers(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert isinstance(open_text_model(make_model(tmp_path / "m", "llama4_text")), PreTrainedModel)


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"temperature": float("nan")}],
)
def test_arguments_out_of_range_are_refused_before_anything_runs(
    model: PreTrainedModel, wrong: dict[str, float]
) -> None:
    with pytest.raises(UsageError, match="finite temperature >= 0"):
        generate(model, PROMPT, **wrong)  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="has 200 tokens; the model attends to 128"):
        generate(model, "x" * 200)


def test_a_folder_without_a_tokenizer_is_named(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match=r"it has no tokenizer; copy tokenizer\.json"):
        load_tokenizer(folder)


def test_a_broken_tokenizer_is_named(llama_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path / "m")
