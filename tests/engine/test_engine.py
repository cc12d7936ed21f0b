"""The engine makes the tokens that transformers makes, whatever else runs beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import GREEDY, LENGTH, Recorder, collect, fail_and_poison, prompts_of, tokens
from modes import full

from minifloat.checkpoint import Checkpoint
from minifloat.engine import Engine, Request, SamplingParams, TokenUsage
from minifloat.engine.blueprint import blueprint_of
from minifloat.engine.opening import _kv_cache, open_model
from minifloat.engine.options import EngineOptions
from minifloat.errors import ContextLengthError, UsageError
from minifloat.model.layouts import describe
from minifloat.model.runtime.config import plain_config
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tensors import StoredTensors, kv_scales
from minifloat.numerics.granularity import TENSOR
from minifloat.quantize.job import quantize_checkpoint

MakeModel = Callable[..., Path]

#: Model type -> what its config has beyond what all test models have; test_native_families.py has all native ones.
NATIVE: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen3_moe": {},
}
FOREIGN: dict[str, dict[str, Any]] = {"llama4_text": {}, "bloom": {}}


def expected(
    folder: Path, prompts: list[tuple[int, ...]], length: int = LENGTH, lm_head: str = "bf16"
) -> list[list[int]]:
    """What transformers generates, one prompt at a time, in float32."""
    model: Any = load(folder, LoadOptions(dtype=torch.float32, weight_only=True, impl="reference", lm_head=lm_head))
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, pad_token_id=0
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module", params=[*NATIVE, "llama4_text", full("bloom")])
def model(request: pytest.FixtureRequest, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder, prompts, and what transformers makes of them."""
    name = request.param
    folder = make_model(tmp_path_factory.mktemp(name), name, **{**NATIVE, **FOREIGN}[name])
    prompts = prompts_of(17)
    return folder, "native" if name in NATIVE else "transformers", prompts, expected(folder, prompts)


def test_greedy_tokens_are_those_of_transformers_alone_and_among_others(model: Any) -> None:
    folder, runner, prompts, answers = model
    engine = Engine(folder, EngineOptions(dtype="float32"))
    assert engine.info.runner == runner
    assert [tokens(engine, [prompt])[0] for prompt in prompts[:3]] == answers[:3]
    assert tokens(engine, prompts) == answers


def test_tokens_are_the_same_when_prompts_are_cut_into_pieces(model: Any) -> None:
    folder, _, prompts, answers = model
    engine = Engine(folder, EngineOptions(dtype="float32", max_num_seqs=5, max_num_batched_tokens=13))
    assert tokens(engine, prompts) == answers


def test_tokens_are_the_same_when_the_cache_is_too_small_for_all(model: Any) -> None:
    folder, _, prompts, answers = model
    info = Engine(folder, EngineOptions(dtype="float32")).info
    recorder = Recorder()
    engine = Engine(
        folder,
        EngineOptions(dtype="float32", kv_cache_memory=info.kv_bytes_per_token * 16 * 9, max_model_len=100),
        observer=recorder,
    )
    assert tokens(engine, prompts) == answers
    assert recorder.preemptions > 0
    assert engine.kv_usage == 0.0


def test_tokens_are_the_same_after_a_hit_in_the_prefix_cache(model: Any) -> None:
    folder, runner, prompts, answers = model
    engine = Engine(folder, EngineOptions(dtype="float32"))
    assert tokens(engine, prompts) == answers
    again = engine.generate(prompts, GREEDY)
    assert [list(completion.tokens) for completion in again] == answers
    cached = [completion.usage.cached_tokens for completion in again]
    wanted = [(len(prompt) - 1) // 16 * 16 if runner == "native" else 0 for prompt in prompts]
    assert cached == wanted


def test_bf16_logits_are_near_those_of_transformers(llama_folder: Path) -> None:
    engine = Engine(llama_folder)
    reference: Any = load(llama_folder)
    prompt = prompts_of(1, low=40)[0]
    completion = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, logprobs=20))[0]
    assert completion.logprobs is not None
    logprobs = reference(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    top = {entry.token: entry.logprob for entry in completion.logprobs[0].top}
    assert len(top) == 20
    assert all(abs(float(logprobs[token]) - value) < 0.03 for token, value in top.items())


def test_the_pieces_of_text_join_to_the_decoded_text(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    completion = engine.generate(["ä prompt"], params)[0]
    prompt = engine.tokenizer("ä prompt").input_ids
    whole = engine.tokenizer.decode([*prompt, *completion.tokens], skip_special_tokens=True)
    assert completion.text == whole[len("ä prompt") :]
    assert completion.finish_reason == "length"
    assert completion.usage == TokenUsage(len(prompt), 40, 0)


def test_a_stop_string_ends_the_text_before_it_and_is_never_shown(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    whole = engine.generate(["abc"], params)[0]
    stop = whole.text[11:14]
    at = whole.text.index(stop)
    stopping = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, stop=(stop,))
    pieces = list(engine.generate(["abc"], stopping, stream=True))
    assert "".join(piece.text for piece in pieces) == whole.text[:at]
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)
    shown = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, stop=(stop,), include_stop=True)
    assert engine.generate(["abc"], shown)[0].text == whole.text[: at + len(stop)]


def test_end_tokens_end_the_text_unless_ignored_or_before_min_tokens(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    end = engine.tokenizer.eos_token_id
    bias = {end: 100.0}
    at_once = engine.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=9, logit_bias=bias))[0]
    assert (at_once.tokens, at_once.text, at_once.finish_reason) == ((end,), "", "stop")
    later = engine.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logit_bias=bias))[0]
    assert (len(later.tokens), later.tokens[-1], later.finish_reason) == (5, end, "stop")
    never = engine.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logit_bias=bias))[0]
    assert (len(never.tokens), never.finish_reason) == (9, "length")
    own = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(65,), logit_bias={65: 100.0})
    assert engine.generate(["abc"], own)[0].stop_reason == 65


def test_end_tokens_that_the_model_does_not_have_are_left_out_with_a_warning(
    llama_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(values | {"eos_token_id": [65, -1, 2**31 - 1]}))
    engine = Engine(folder, EngineOptions(dtype="float32"))
    assert "no answer ends with the tokens [2147483647]: the model has " in caplog.text
    params = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=4, logit_bias={65: 100.0})
    completion = engine.generate(["abc"], params)[0]
    assert (len(completion.tokens), completion.finish_reason) == (5, "stop")


def test_a_text_ends_where_the_context_does(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32", max_model_len=20))
    completion = engine.generate([tuple(range(15))], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert (len(completion.tokens), completion.finish_reason) == (5, "length")
    with pytest.raises(ContextLengthError, match="20 tokens"):
        engine.generate([tuple(range(20))])


def test_draws_depend_on_the_seed_and_on_nothing_else(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    alone = tokens(engine, prompts_of(1), params)[0]
    assert tokens(engine, prompts_of(6), params)[0] == alone
    other = SamplingParams(temperature=1.0, seed=12, max_tokens=20, ignore_eos=True)
    assert tokens(engine, prompts_of(1), other)[0] != alone
    unseeded = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    assert tokens(engine, prompts_of(1), unseeded) != tokens(engine, prompts_of(1), unseeded)


def test_json_output_is_json_of_the_schema(llama_folder: Path) -> None:
    from minifloat.engine import Grammar

    pytest.importorskip("llguidance")
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(3):
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=200, grammar=Grammar.json_schema(schema))
        completion = engine.generate(["abc"], params)[0]
        assert completion.finish_reason == "stop"
        value = json.loads(completion.text)
        assert completion.text == json.dumps(value, ensure_ascii=False) or "\\" in completion.text
        assert isinstance(value["name"], str)
        assert isinstance(value["age"], int)


@pytest.mark.parametrize("place", ["choice", "text"])
def test_a_sequence_whose_choice_or_text_fails_ends_alone(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    prompts = prompts_of(4)
    answers = tokens(engine, prompts)
    add = engine.add

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    def poisoned(request: Any) -> None:
        add(request)
        if request.request_id == "2":
            sequence = engine._sequences["2"]
            sequence.sampling.params = SamplingParams(temperature=float(place == "choice"))
            sequence.sampling.uniform = fail  # type: ignore[method-assign]
            if place == "text":
                sequence.text.add = fail  # type: ignore[method-assign,assignment]

    monkeypatch.setattr(engine, "add", poisoned)
    deliveries = collect(engine, prompts)
    assert (deliveries["2"].finish_reason, deliveries["2"].error) == ("error", "injected")
    assert "Traceback" in caplog.text
    for index in (0, 1, 3):
        assert list(deliveries[str(index)].tokens) == answers[index]
    assert engine.kv_usage == 0.0


@pytest.mark.parametrize("runner", ["native", "transformers"])
def test_failures_and_nan_logits_stay_with_their_sequence(
    runner: str, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32", runner=runner))
    prompts = prompts_of(5)
    answers = tokens(engine, prompts)
    fail_and_poison(engine, monkeypatch)
    deliveries = collect(engine, prompts)
    assert (deliveries["2"].finish_reason, deliveries["2"].error) == ("error", "injected")
    assert "not finite" in str(deliveries["1"].error)
    assert [list(deliveries[name].tokens) for name in ("0", "3", "4")] == [answers[0], *answers[3:]]
    assert engine.kv_usage == 0.0


def test_cancelling_frees_everything(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    for index, prompt in enumerate(prompts_of(6)):
        engine.add(Request(str(index), prompt, GREEDY))
    engine.step()
    for index in range(6):
        delivery = engine.cancel(str(index))
        assert delivery is not None
        assert delivery.finish_reason == "cancelled"
    assert engine.cancel("0") is None
    assert (engine.running, engine.waiting, engine.kv_usage, engine.has_work) == (0, 0, 0.0, False)


def test_the_listener_receives_the_numbers_of_steps_tokens_and_requests(llama_folder: Path) -> None:
    recorder = Recorder()
    engine = Engine(llama_folder, EngineOptions(dtype="float32"), observer=recorder)
    prompts = prompts_of(5)
    engine.generate(prompts, GREEDY)
    assert sum(step.prompt_tokens for step in recorder.steps) == sum(map(len, prompts))
    assert sum(step.generation_tokens for step in recorder.steps) == 5 * LENGTH
    assert (len(recorder.first), len(recorder.between)) == (5, 5 * (LENGTH - 1))
    assert [reason for reason, _, _ in recorder.ends] == ["length"] * 5
    assert recorder.steps[-1].running == 0
    for _, timings, usage in recorder.ends:
        assert usage.completion_tokens == LENGTH
        assert timings.scheduled is not None
        assert timings.first_token is not None
        assert timings.finished is not None
        assert timings.arrived <= timings.scheduled <= timings.first_token <= timings.finished


def test_salts_keep_requests_apart(llama_folder: Path) -> None:
    engine = Engine(llama_folder, EngineOptions(dtype="float32"))
    prompt = tuple(range(50))
    hits = []
    for index, salt in enumerate(("a", "b", "a")):
        engine.add(Request(str(index), prompt, GREEDY, cache_salt=salt))
        while engine.has_work:
            hits += [delivery.usage.cached_tokens for delivery in engine.step() if delivery.usage]
    assert hits == [0, 0, 48]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "unknown dtype"),
        ({"kv_cache_dtype": "fp4"}, "unknown kv_cache_dtype"),
        ({"lm_head": "int4"}, "unknown lm_head"),
        ({"max_model_len": 100000}, "positions"),
        ({"kv_cache_memory": 100}, "less than a sequence"),
        ({"max_num_seqs": 600}, "max_num_batched_tokens"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"kv_cache_dtype": "fp8"}, "k_scale"),
    ],
)
def test_invalid_options_are_refused(llama_folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Engine(llama_folder, EngineOptions(**options))


def test_the_lm_head_is_fp8_beside_mxfp4_unless_the_user_keeps_it(llama_folder: Path, tmp_path: Path) -> None:
    quantize_checkpoint(llama_folder, tmp_path / "q", "mxfp4")
    opened = {name: open_model(tmp_path / "q", EngineOptions(lm_head=name)) for name in ("auto", "bf16", "fp8")}
    assert {name: model.info.lm_head for name, model in opened.items()} == {
        "auto": "fp8 (quantized while loading)",
        "bf16": "bfloat16",
        "fp8": "fp8 (quantized while loading)",
    }
    nbytes = {name: model.runner.weight_bytes for name, model in opened.items()}
    assert nbytes["auto"] == nbytes["fp8"] < nbytes["bf16"]
    assert open_model(llama_folder, EngineOptions()).info.lm_head == "bfloat16"


@pytest.mark.parametrize(("model_type", "runner"), [("llama", "native"), ("llama4_text", "transformers")])
def test_every_runner_computes_what_load_does_with_an_fp8_lm_head(
    model_type: str, runner: str, make_model: MakeModel, tmp_path: Path
) -> None:
    folder = make_model(tmp_path / "m", model_type, **FOREIGN.get(model_type, {}))
    quantize_checkpoint(folder, tmp_path / "q", "mxfp4")
    engine = Engine(tmp_path / "q", EngineOptions(dtype="float32"))
    assert (engine.info.runner, engine.info.lm_head) == (runner, "fp8 (quantized while loading)")
    prompts = prompts_of(3)
    assert tokens(engine, prompts) == expected(tmp_path / "q", prompts, lm_head="auto")


def test_the_scales_of_a_cache_are_found_where_modelopt_writes_them() -> None:
    folder = Path(__file__).parents[1] / "data" / "interop" / "modelopt-fp8-kv"
    with Checkpoint.open(folder) as checkpoint:
        tensors = StoredTensors(checkpoint, describe(checkpoint))
        blueprint = blueprint_of(plain_config(checkpoint), torch.bfloat16)
        element, scales = _kv_cache(tensors, EngineOptions(), blueprint, kv_scales, (TENSOR,))
    assert element == "E4M3"
    assert list(scales) == ["model.layers.0.self_attn"]
