"""Greedy continuations: those of transformers, end tokens, NaN logits, and where two continuations differ."""

import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from minifloat.errors import NonFiniteError, UsageError
from minifloat.evaluate.compare.generation import GreedyDivergence, greedy_divergence
from minifloat.evaluate.compare.models import Continuations
from minifloat.evaluate.compare.transformers_model import generate_greedy, kv_cache_factory
from minifloat.model.runtime.load import LoadOptions, load
from minifloat.model.runtime.tokenizer import end_tokens

MakeModel = Callable[..., Path]

NEW = 12


def prompts(count: int, length: int = 8) -> list[list[int]]:
    tokens: list[list[int]] = torch.randint(
        0, 256, (count, length), generator=torch.Generator().manual_seed(3)
    ).tolist()
    return tokens


def opened(folder: Path) -> Any:
    return load(folder, LoadOptions(dtype=torch.float32))


@pytest.fixture(scope="module")
def model(llama_folder: Path) -> Any:
    return opened(llama_folder)


@pytest.fixture(scope="module")
def tokenizer(llama_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(llama_folder)


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 5}),
        ("gemma2", {"sliding_window": 6, "head_dim": 16}),
        ("mixtral", {}),
        ("gpt_oss", {"sliding_window": 6}),
        ("bamba", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}),
        ("qwen3_next", {}),
    ],
)
def test_continuations_equal_those_of_transformers(
    make_model: MakeModel, tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "m", model_type, dtype="float32", **config)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    given = prompts(17)  # more than a batch
    expected = []
    for prompt in given:
        ids = torch.tensor([prompt])
        options = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=257, pad_token_id=0)
        made = reference.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        expected.append(tuple(made[0, len(prompt) :].tolist()))
    assert generate_greedy(reference, given, NEW) == tuple(expected)


def test_the_generation_config_does_not_change_continuations(llama_folder: Path, model: Any) -> None:
    expected = generate_greedy(model, prompts(4), NEW, ends=())
    other = opened(llama_folder)
    other.generation_config = GenerationConfig(
        do_sample=True,
        temperature=5.0,
        top_k=3,
        repetition_penalty=9.0,
        no_repeat_ngram_size=1,
        min_new_tokens=4,
        forced_eos_token_id=7,
        suppress_tokens=[expected[0][0]],
        use_cache=False,
    )
    other.config.use_cache = False
    assert generate_greedy(other, prompts(4), NEW, ends=()) == expected


def test_a_continuation_ends_with_its_end_token_and_the_others_continue(model: Any) -> None:
    whole = generate_greedy(model, prompts(4), NEW, ends=())
    assert {len(row) for row in whole} == {NEW}
    end = whole[1][5]
    expected = tuple(row[: row.index(end) + 1] if end in row else row for row in whole)
    assert len(expected[1]) <= 6
    assert any(len(row) == NEW for row in expected)
    assert generate_greedy(model, prompts(4), NEW, ends=(end, 287)) == expected


def test_generation_stops_when_all_continuations_have_ended(model: Any) -> None:
    given = prompts(3)
    first = {row[0] for row in generate_greedy(model, given, 1, ends=())}
    calls: list[tuple[int, int, str]] = []
    made = generate_greedy(model, given, 50, ends=first, progress=lambda *call: calls.append(call))
    assert [len(row) for row in made] == [1, 1, 1]
    assert calls == [(3, 150, "generation"), (150, 150, "generation")]


def test_progress_counts_tokens_over_batches(model: Any) -> None:
    calls: list[int] = []
    generate_greedy(model, prompts(34), 2, ends=(), progress=lambda done, total, what: calls.append(done))
    assert calls == [32, 64, 66, 68, 68]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [(None, {257}), (7, {7}), ([7, 9], {7, 9}), (-1, set())],
    ids=["config", "one", "several", "none"],
)
def test_end_tokens_come_from_the_generation_config_or_else_from_the_config(
    llama_folder: Path, declared: Any, expected: set[int]
) -> None:
    model = opened(llama_folder)
    model.generation_config = GenerationConfig(eos_token_id=declared)
    assert end_tokens(model.generation_config, model.config) == expected


def test_a_model_without_end_tokens_generates_all_new_tokens(make_llama: MakeModel, tmp_path: Path) -> None:
    model = opened(make_llama(tmp_path / "m", eos_token_id=None))
    assert end_tokens(model.generation_config, model.config) == frozenset()
    assert [len(row) for row in generate_greedy(model, prompts(2), 5)] == [5, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_never_diverges_from_itself(llama_folder: Path, tokenizer: Any, dtype: torch.dtype) -> None:
    given = prompts(20)
    first, second = (generate_greedy(load(llama_folder, LoadOptions(dtype=dtype)), given, 40) for _ in range(2))
    result = greedy_divergence(tokenizer, given, first, second, 40)
    assert (result.parted, result.median, result.first_difference) == (0, None, (None,) * 20)
    assert result.identical_fraction.value == result.mean_prefix_match.value == 1
    assert 0.8 < result.mean_prefix_match.low < result.mean_prefix_match.high == 1
    assert all(sample.baseline == sample.candidate for sample in result.samples)


@torch.inference_mode()
def test_a_simulated_cache_is_used_in_every_step(llama_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float64)
    factory = kv_cache_factory(model, {f"model.layers.{index}.self_attn": (0.001, 0.001) for index in range(2)})
    given = prompts(3)
    ids = torch.tensor(given)
    for _ in range(NEW):
        logits = model(input_ids=ids, past_key_values=factory(), use_cache=True).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    found = generate_greedy(model, given, NEW, ends=(), cache_factory=factory)
    assert found == tuple(tuple(row) for row in ids[:, 8:].tolist())
    assert found != generate_greedy(model, given, NEW, ends=())


def broken(model: Any, row: int, calls: set[int]) -> Any:
    """Make a logit of one row NaN in some calls of the model, numbered from 0."""
    count = itertools.count()

    def spoil(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        if next(count) in calls:
            logits[row, -1, 7] = math.nan
        return logits

    model.lm_head.register_forward_hook(spoil)
    return model


def test_the_error_for_a_nan_logit_names_the_prompt_and_the_token(llama_folder: Path) -> None:
    with pytest.raises(NonFiniteError, match="logits: NaN or Inf where token 1 after prompt 33 is chosen"):
        generate_greedy(broken(opened(llama_folder), 1, {4}), prompts(34), 3, ends=())


def test_nan_logits_of_a_continuation_that_has_ended_are_ignored(llama_folder: Path, model: Any) -> None:
    expected = generate_greedy(model, prompts(2), 4, ends=())
    end = expected[0][0]
    assert end not in expected[1]
    made = generate_greedy(broken(opened(llama_folder), 0, {1, 2, 3}), prompts(2), 4, ends=(end,))
    assert made == ((end,), expected[1])


@pytest.mark.parametrize(
    ("given", "new", "message"),
    [
        ([[1, 2], [3]], 4, r"2 prompts of \[1, 2\] tokens"),
        ([], 4, "0 prompts"),
        ([[]], 4, r"1 prompts of \[0\] tokens"),
        ([[1]], 0, "0 to generate"),
        ([[1] * 100], 29, "the model attends to 128"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(model: Any, given: list[list[int]], new: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate_greedy(model, given, new)


def test_a_model_without_a_cache_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m", "mamba", state_size=4, num_hidden_layers=1)
    with pytest.raises(UsageError, match="MambaForCausalLM takes no KV cache"):
        generate_greedy(AutoModelForCausalLM.from_pretrained(folder), prompts(1), 4)


def divergence(tokenizer: Any, baseline: Continuations, candidate: Continuations) -> GreedyDivergence:
    return greedy_divergence(tokenizer, [[72, 73]] * len(baseline), baseline, candidate, 4)


def test_the_first_difference_is_counted_in_tokens_of_the_continuation(tokenizer: Any) -> None:
    baseline = ((1, 2, 3, 4), (1, 2, 3, 4), (1, 257), (1, 257), (1, 2, 3, 4))
    candidate = ((1, 2, 3, 4), (1, 2, 3, 5), (1, 257), (1, 257, 3, 4), (9, 2, 3, 4))
    result = divergence(tokenizer, baseline * 2, candidate * 2)
    assert result.first_difference == (None, 3, None, 2, 0) * 2
    assert (result.prompts, result.new_tokens, result.parted, result.median) == (10, 4, 6, 3)
    assert result.identical_fraction.value == 2 / 5
    assert result.mean_prefix_match.value == pytest.approx((4 + 3 + 4 + 2 + 0) / 5 / 4)
    assert 0 <= result.mean_prefix_match.low < result.mean_prefix_match.value < result.mean_prefix_match.high <= 1
    assert [sample.parted_at for sample in result.samples] == [0, 3, None]


def test_the_median_is_none_if_half_of_the_continuations_are_equal(tokenizer: Any) -> None:
    assert divergence(tokenizer, ((1,), (1,)), ((1,), (2,))).median is None
    assert divergence(tokenizer, ((1, 2), (1, 2)), ((1, 3), (2, 2))).median == 0.5


def test_the_identical_fraction_has_wilsons_interval(tokenizer: Any) -> None:
    found = divergence(tokenizer, ((1,),) * 10, (((1,),) * 8) + (((2,),) * 2)).identical_fraction
    assert (found.value, found.low, found.high) == pytest.approx((0.8, 0.490162, 0.943318), abs=1e-6)


def test_the_mean_of_one_prompt_has_no_interval(tokenizer: Any) -> None:
    found = divergence(tokenizer, ((1, 2, 3, 4),), ((1, 2, 3, 5),)).mean_prefix_match
    assert found.value == 0.75
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_samples_show_text_without_special_tokens_and_with_whole_characters(tokenizer: Any) -> None:
    prompt, same, other = (tokenizer(text).input_ids for text in ("Once", " é and", " é or"))
    result = greedy_divergence(tokenizer, [prompt], [(*same, 257)], [(*other, 257)], 16)
    assert len(result.samples) == 1
    sample = result.samples[0]
    assert (sample.prompt, sample.baseline, sample.candidate) == ("Once", " é and", " é or")
    assert sample.parted_at == len(tokenizer(" é ").input_ids)


def test_each_prompt_needs_both_continuations(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="2 and 1 continuations"):
        greedy_divergence(tokenizer, [[1], [2]], [(1,), (1,)], [(1,)], 4)
    with pytest.raises(UsageError, match="0 prompts"):
        greedy_divergence(tokenizer, [], [], [], 4)


def test_thirty_two_prompts_are_one_batch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    forward = type(model).forward

    def counted(self: Any, *arguments: Any, **named: Any) -> Any:
        batches.append(len(named["input_ids"]))
        return forward(self, *arguments, **named)

    monkeypatch.setattr(type(model), "forward", functools.wraps(forward)(counted))
    generate_greedy(model, prompts(32), 3)
    assert batches == [32] * 3
