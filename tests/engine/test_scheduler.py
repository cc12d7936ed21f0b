"""Who runs when, without a model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from minifloat.engine.cache import BlockPool
from minifloat.engine.sampling import SamplingParams, SamplingState
from minifloat.engine.scheduler import Scheduler, WorkItem
from minifloat.engine.sequence import Request, Sequence, State
from minifloat.engine.text import TextStream
from minifloat.model.runtime.tokenizer import load_tokenizer


class Bench:
    """A scheduler with sequences whose tokens are made up."""

    def __init__(self, tokenizer: Any, blocks: int, **options: int) -> None:
        self.pool = BlockPool(blocks)
        self.tokenizer = tokenizer
        self.lost: list[str] = []
        limits = {"max_sequences": 8, "max_tokens": 64, "prompt_tokens_beside": 16, **options}
        self.scheduler = Scheduler(
            self.pool, preempted=lambda sequence: self.lost.append(sequence.request_id), **limits
        )
        self.made = 0

    def add(self, length: int, name: str | None = None, priority: int = 0) -> Sequence:
        self.made += 1
        tokens = tuple(range(1000 * self.made, 1000 * self.made + length))
        request = Request(name or str(self.made), tokens, priority=priority)
        sequence = Sequence(
            request,
            TextStream(self.tokenizer, [], [], include_stop=False),
            SamplingState(SamplingParams(), []),
            self.pool.root(""),
        )
        sequence.timings.arrived = float(self.made)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[WorkItem]:
        works = self.scheduler.schedule()
        assert sum(work.end - work.start for work in works) <= self.scheduler.max_tokens
        owned = [block for sequence in self.scheduler.running for block in sequence.blocks]
        assert len(set(owned)) == len(owned)  # prompts differ, so nothing is shared
        slots = {sequence.slot for sequence in self.scheduler.running}
        assert len(slots) == len(self.scheduler.running)
        assert slots <= set(range(self.scheduler.max_sequences))
        assert all(sequence.slot is None for sequence in self.scheduler.waiting)
        assert self.pool.free == self.pool.count - len(owned)
        for work in works:
            assert work.sequence.state is State.RUNNING
            assert work.start == work.sequence.computed < work.end <= 16 * len(work.sequence.blocks)
            self.scheduler.computed([work])
            if work.samples:
                work.sequence.tokens.append(0)
        return works


@pytest.fixture(scope="module")
def tokenizer(llama_folder: Path) -> Any:
    return load_tokenizer(llama_folder)


def spans(works: list[WorkItem]) -> list[tuple[str, int, int]]:
    return [(work.sequence.request_id, work.start, work.end) for work in works]


def test_a_long_prompt_comes_in_pieces_and_the_next_one_uses_what_is_left(tokenizer: Any) -> None:
    bench = Bench(tokenizer, 100)
    bench.add(100)
    bench.add(20)
    assert spans(bench.step()) == [("1", 0, 64)]
    assert spans(bench.step()) == [("1", 64, 100), ("2", 0, 20)]
    assert spans(bench.step()) == [("1", 100, 101), ("2", 20, 21)]


def test_beside_running_sequences_the_pieces_are_small(tokenizer: Any) -> None:
    bench = Bench(tokenizer, 100)
    bench.add(5)
    bench.step()
    bench.add(40)
    assert spans(bench.step()) == [("1", 5, 6), ("2", 0, 17)]
    assert spans(bench.step()) == [("1", 6, 7), ("2", 17, 34)]
    assert spans(bench.step()) == [("1", 7, 8), ("2", 34, 40)]
    assert spans(bench.step()) == [("1", 8, 9), ("2", 40, 41)]
    bench.add(40)
    assert spans(bench.step()) == [("1", 9, 10), ("2", 41, 42), ("3", 0, 18)]  # one more for each of the others


def test_only_so_many_run_and_the_others_follow_in_order(tokenizer: Any) -> None:
    bench = Bench(tokenizer, 100, max_sequences=2)
    sequences = [bench.add(4) for _ in range(4)]
    assert [name for name, _, _ in spans(bench.step())] == ["1", "2"]
    bench.scheduler.finish(sequences[0])
    assert [name for name, _, _ in spans(bench.step())] == ["2", "3"]
    bench.scheduler.finish(sequences[3])
    assert sequences[3].state is State.FINISHED
    assert not bench.scheduler.waiting


def test_the_youngest_gives_way_and_comes_back_before_those_that_wait(tokenizer: Any) -> None:
    bench = Bench(tokenizer, 4)
    bench.add(15)
    bench.add(15)
    bench.add(15)
    bench.step()  # a block each, and one to spare
    assert [sequence.request_id for sequence in bench.scheduler.running] == ["1", "2", "3"]
    bench.step()
    bench.step()
    assert bench.lost == ["3"]
    for _ in range(17):
        bench.step()
    assert bench.lost == ["3", "2"]
    assert [sequence.request_id for sequence in bench.scheduler.waiting] == ["2", "3"]
    assert bench.scheduler.running[0].request_id == "1"


@pytest.mark.parametrize(("seconds", "order"), [(10.0, ["3", "5", "1", "4", "2"]), (13.5, ["1", "2", "3", "5", "4"])])
def test_lower_priorities_are_next_but_overtake_none_that_waits_long(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, order: list[str]
) -> None:
    bench = Bench(tokenizer, 100, max_sequences=1)
    for priority in (0, 2, -1, 0, -1):
        bench.add(4, priority=priority)  # at 1, 2, ... seconds
    monkeypatch.setattr("minifloat.engine.scheduler.time.monotonic", lambda: seconds)
    ran = []
    for _ in range(5):
        bench.step()
        (sequence,) = bench.scheduler.running
        ran.append(sequence.request_id)
        bench.scheduler.finish(sequence)
    assert ran == order


def test_a_preempted_sequence_comes_back_before_all_priorities(tokenizer: Any) -> None:
    bench = Bench(tokenizer, 100, max_sequences=1)
    first = bench.add(4, priority=5)
    bench.step()
    bench.add(4, priority=-5)
    bench.scheduler._preempt(first)
    assert bench.step()[0].sequence is first


def test_a_sequence_that_comes_back_is_not_the_youngest(tokenizer: Any) -> None:
    bench = Bench(tokenizer, 100)
    first, second = bench.add(4), bench.add(4)
    bench.step()
    bench.scheduler._preempt(first)
    bench.step()
    assert bench.scheduler.running == [first, second]


@pytest.mark.parametrize("seed", range(6))
def test_everybody_finishes_whatever_comes(tokenizer: Any, seed: int) -> None:
    generator = random.Random(seed)
    bench = Bench(tokenizer, 12, max_sequences=5, max_tokens=generator.choice([7, 30]))
    wanted: dict[str, int] = {}
    waiting = 60
    for _ in range(20000):
        if waiting and generator.random() < 0.3:
            sequence = bench.add(generator.randint(1, 100))
            wanted[sequence.request_id] = generator.randint(1, 80)
            waiting -= 1
        for work in bench.step():
            sequence = work.sequence
            if sequence.state is State.RUNNING and sequence.output_length >= wanted[sequence.request_id]:
                bench.scheduler.finish(sequence)
                del wanted[sequence.request_id]
        if not waiting and not wanted:
            break
    assert not wanted
    assert bench.lost
    assert bench.pool.free == bench.pool.count
