"""A step that begins before the tokens of the step before are known changes no token, whatever happens meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import devices

from minifloat.engine import Delivery, Engine, EngineOptions, Request, SamplingParams
from minifloat.engine.device_runner import DeviceRunner

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 5, "max_model_len": 60}


def requests_of(random: random.Random) -> list[Request]:
    """Requests that end in every way: by length, by a stop token, by a stop string, with the context."""
    found = []
    for index in range(24):
        draws = {"temperature": random.choice([0.0, 0.7, 1.3]), "top_p": random.choice([1.0, 0.9])}
        params = SamplingParams(
            max_tokens=random.choice([0, 1, 2, 5, 20, None]),
            stop_token_ids=tuple(random.sample(range(250), 5)),
            stop=("e", "t") if random.random() < 0.3 else (),
            ignore_eos=random.random() < 0.5,
            seed=index,
            logprobs=1 if random.random() < 0.1 else None,
            **draws,
        )
        found.append(Request(str(index), tuple(random.randrange(250) for _ in range(random.randint(1, 30))), params))
    return found


def results(engine: Engine, seed: int, cancelled: str) -> dict[str, Any]:
    """Tokens, text and ends of requests that arrive while others run; `cancelled` is cancelled after two tokens."""
    generator = random.Random(seed)
    coming, parts = requests_of(generator), dict[str, list[Delivery]]()
    while coming or engine.has_work:
        while coming and generator.random() < 0.4:
            engine.add(coming.pop())
        for delivery in engine.step():
            parts.setdefault(delivery.request_id, []).append(delivery)
        if len(parts.get(cancelled, ())) == 2 and (last := engine.cancel(cancelled)) is not None:
            parts[cancelled].append(last)
    assert engine.kv_usage == 0.0
    wholes = {name: Delivery.joined(each) for name, each in parts.items()}
    return {name: (each.tokens, each.text, each.finish_reason, each.stop_reason) for name, each in wholes.items()}


@devices
@pytest.mark.parametrize("seed", range(3))
def test_arrivals_ends_and_cancellations_give_the_tokens_of_the_cpu_engine(
    device: str, seed: int, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, run_ahead = 0, DeviceRunner.run_ahead

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal ahead
        ahead += 1
        return run_ahead(*arguments)

    monkeypatch.setattr(DeviceRunner, "run_ahead", counted)
    found = results(Engine(llama_folder, EngineOptions(device=device, runner="device", **OPTIONS)), seed, "7")
    assert ahead > 20
    assert found == results(Engine(llama_folder, EngineOptions(**OPTIONS)), seed, "7")


@devices
def test_a_step_that_fails_to_begin_is_computed_later(
    device: str, llama_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5]]
    expected = [each.tokens for each in Engine(llama_folder, EngineOptions(**OPTIONS)).generate(prompts, params)]
    engine = Engine(llama_folder, EngineOptions(device=device, runner="device", **OPTIONS))

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("injected")

    monkeypatch.setattr(DeviceRunner, "run_ahead", broken)
    assert [each.tokens for each in engine.generate(prompts, params)] == expected
    assert "a step of 2 sequences failed" in caplog.text


@devices
def test_a_next_step_takes_no_block_of_others_and_preempts_none(device: str, llama_folder: Path) -> None:
    """The cache holds less than the sequences need, so that next steps find no block, and sequences are preempted."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[index + 1] * 10 for index in range(5)]
    expected = [each.tokens for each in Engine(llama_folder, EngineOptions(**OPTIONS)).generate(prompts, params)]
    memory = Engine(llama_folder, EngineOptions(runner="device", **OPTIONS)).info.kv_bytes_per_token * 16 * 9
    engine = Engine(llama_folder, EngineOptions(device=device, runner="device", kv_cache_memory=memory, **OPTIONS))
    assert engine.info.kv_blocks < 5 * 4
    assert [each.tokens for each in engine.generate(prompts, params)] == expected
    assert engine._scheduler.preemptions > 0
