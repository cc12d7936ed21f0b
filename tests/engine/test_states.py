"""States of sequences in the engine: their memory, copies for equal beginnings of prompts, what goes without them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import VOCAB, config_of, greedy, model_of, write

from minifloat.engine import Engine, EngineOptions, GeneratedText, Request, SamplingParams
from minifloat.engine.blueprint import blueprint_of
from minifloat.engine.cache import StateSnapshots
from minifloat.errors import ConfigError, UsageError
from minifloat.kernels.decoder import SequenceStates, cpu, reference
from minifloat.model.architecture.decoder import NotNative

COUNT = 5
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
CASE = "qwen3_5_text"


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SYSTEM = prompt(100, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return model_of(CASE)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(model, tmp_path_factory.mktemp("states") / "m")


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(folder, EngineOptions(dtype="float32", **options))


def run(engine: Engine, tokens: list[int]) -> GeneratedText:
    return engine.generate([tokens], GREEDY)[0]


# ------------------------------------------------------------------------------------- equal beginnings


def test_tokens_are_the_same_behind_a_copy_of_a_state(model: Any, folder: Path) -> None:
    engine = engine_of(folder)
    assert engine.info.state_copies == 16
    first, second, third = ([*SYSTEM, *prompt(30, seed)] for seed in (2, 3, 4))
    turn = [*first, *greedy(model, first, COUNT), *prompt(40, 5)]
    #: The prompt, and how many of its tokens are found: the second one parts from the first behind block 6, where no
    #: state was kept; the third begins there.
    for tokens, cached in ((first, 0), (first, 128), (second, 0), (third, 96), (turn, 128), (second, 128)):
        answer = run(engine, tokens)
        assert answer.usage.cached_tokens == cached
        assert list(answer.tokens) == greedy(model, tokens, COUNT, answer.tokens)


def test_sequences_that_run_together_use_copies(model: Any, folder: Path) -> None:
    engine = engine_of(folder, max_num_batched_tokens=32, max_num_seqs=3)
    prompts = [[*SYSTEM, *prompt(9 + seed, seed)] for seed in range(2, 8)]
    answers = [greedy(model, tokens, COUNT) for tokens in prompts]
    for _ in range(2):
        assert [list(answer.tokens) for answer in engine.generate(prompts, GREEDY)] == answers
    assert run(engine, prompts[0]).usage.cached_tokens == 96


def test_other_tenants_do_not_use_copies(folder: Path) -> None:
    engine = engine_of(folder)
    found = {}
    for number, salt in enumerate(("a", "b", "a")):
        engine.add(Request(str(number), tuple(SYSTEM), GREEDY, salt))
        while engine.has_work:
            for delivery in engine.step():
                if delivery.usage is not None:
                    found[number] = delivery.usage.cached_tokens
    assert found == {0: 0, 1: 0, 2: 96}


def test_without_prefix_cache_there_are_no_copies(folder: Path) -> None:
    engine = engine_of(folder, prefix_cache=False)
    assert engine.info.state_copies == 0
    assert engine.info.reason_no_prefix_cache == "it is switched off"
    assert [run(engine, SYSTEM).usage.cached_tokens for _ in range(2)] == [0, 0]


def test_the_longest_unused_copy_makes_room() -> None:
    states = SequenceStates(4, 5)
    states.data.copy_(torch.arange(20.0).view(5, 4))
    snapshots = StateSnapshots(states, (3, 4))
    digests = [bytes([number]) for number in range(4)]
    snapshots.keep(digests[0], 0)
    snapshots.keep(digests[1], 1)
    assert snapshots.longest(digests) == 2
    snapshots.restore(digests[0], 2)
    assert states.data[2].tolist() == [0.0, 1.0, 2.0, 3.0]
    snapshots.keep(digests[3], 0)
    assert snapshots.longest(digests[:3]) == 1, "the copy behind the second block was the longest unused"
    assert snapshots.longest(digests) == 4
    assert snapshots.longest([]) == 0


def test_copies_that_would_save_little_are_not_made() -> None:
    assert StateSnapshots.ends(0, 64, 0) == ()
    assert StateSnapshots.ends(0, 65, 0) == (64,)
    assert StateSnapshots.ends(96, 200, 8) == (192,)
    assert StateSnapshots.ends(0, 200, 5) == (80, 192)
    assert StateSnapshots.ends(192, 200, 12) == ()


# ------------------------------------------------------------------------------------- memory


def state_bytes(engine: Engine) -> int:
    return engine.info.state_bytes // (engine.info.max_num_seqs + engine.info.state_copies)


def test_states_count_in_the_memory_of_the_cache(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    roomy = engine_of(folder, max_num_seqs=4)
    channels, layers = 2 * 2 * 12 + 2 * 20, 2
    assert state_bytes(roomy) == layers * 4 * (-(-3 * channels // 16) * 16 + 2 * 12 * 32)
    assert roomy.info.to_dict()["state_bytes"] == roomy.info.state_bytes
    memory = 9 * state_bytes(roomy)
    with caplog.at_level(logging.WARNING, "minifloat"):
        engine = engine_of(folder, kv_cache_memory=memory)
    assert (engine.info.max_num_seqs, engine.info.state_copies) == (3, 1)
    assert engine.info.state_bytes + engine.info.kv_bytes <= memory
    assert "3 sequences run at a time, not 64: the state of each takes" in caplog.text


def test_too_little_memory_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"kv_cache_memory: 8.8 KiB hold 0 tokens, less than a sequence"):
        engine_of(folder, kv_cache_memory=9000)


def test_no_memory_for_copies_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = 7 * state_bytes(engine_of(folder))
    with caplog.at_level(logging.WARNING, "minifloat"):
        engine = engine_of(folder, kv_cache_memory=memory)
    assert engine.info.state_copies == 0
    assert "there is no memory for copies of states" in engine.info.reason_no_prefix_cache
    assert f"no prefix cache: {engine.info.reason_no_prefix_cache}" in caplog.text
    assert [run(engine, SYSTEM[:50]).usage.cached_tokens for _ in range(2)] == [0, 0]


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("options", [{"speculate": "self"}, {"speculate": "prompt"}, {"draft": "itself"}], ids=str)
def test_drafts_are_refused(folder: Path, options: dict[str, str]) -> None:
    given = {name: str(folder) if value == "itself" else value for name, value in options.items()}
    with pytest.raises(UsageError, match="speculate: this model keeps one state of each sequence"):
        engine_of(folder, **given)


def test_a_draft_with_states_is_refused(folder: Path, tmp_path: Path) -> None:
    llama = write(model_of("llama"), tmp_path / "llama")
    with pytest.raises(UsageError, match="cannot draft for the model: it keeps one state of each sequence"):
        engine_of(llama, draft=str(folder))


def test_the_decoder_of_gpus_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"does not cover this model: .*layers with a gated delta rule"):
        engine_of(folder, runner="device")


@pytest.mark.parametrize(
    ("case", "change", "error", "message"),
    [
        (CASE, {"layer_types": ["linear_attention"] * 3}, NotNative, "none of its layers has attention"),
        (CASE, {"hidden_act": "gelu"}, NotNative, "the activation 'gelu', not 'silu'"),
        (CASE, {"linear_num_value_heads": 3}, ConfigError, "linear_num_value_heads: expected a multiple of 2"),
        (CASE, {"linear_conv_kernel_dim": 0}, ConfigError, "linear_.: expected numbers of at least 1"),
        ("qwen3_next", {"linear_num_key_heads": 3}, ConfigError, "expected a multiple of 3 key heads, found 4"),
    ],
)
def test_configs_that_make_no_model_are_refused(
    case: str, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        blueprint_of(config_of(case, **change), torch.float32)


def test_layers_of_another_type_are_refused() -> None:
    config = config_of(CASE)
    config.layer_types = ["full_attention", "chunked_attention", "full_attention"]
    with pytest.raises(NotNative, match="layer 1 has 'chunked_attention'"):
        blueprint_of(config, torch.float32)


# ------------------------------------------------------------------------------------- failure


def test_a_step_that_fails_ends_its_sequences_and_no_other(
    model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)
    for number in range(2):
        engine.add(Request(str(number), tuple(prompt(20, number)), GREEDY))
    engine.step()

    def fails(*arguments: Any, **more: Any) -> torch.Tensor:
        monkeypatch.undo()
        raise MemoryError("no memory for this step")

    monkeypatch.setattr(cpu, "step", fails)
    monkeypatch.setattr(reference, "step", fails)
    deliveries = engine.step()
    assert [delivery.finish_reason for delivery in deliveries] == ["error", "error"]
    assert all("the state in slot" in str(delivery.error) for delivery in deliveries)
    assert not engine.has_work
    assert list(run(engine, SYSTEM).tokens) == greedy(model, SYSTEM, COUNT)
