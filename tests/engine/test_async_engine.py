"""The engine in its thread: streams, cancelling, limits and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from minifloat.engine import AsyncEngine, Delivery, Engine, EngineOptions, Grammar, Request, SamplingParams
from minifloat.engine.grammar import Grammars
from minifloat.errors import ContextLengthError, EngineStopped, QueueFull, UsageError

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(llama_folder: Path) -> Engine:
    return Engine(llama_folder, EngineOptions(dtype="float32", max_num_seqs=4))


def run(engine: Engine, body: Callable[[AsyncEngine], Awaitable[None]], max_queue: int = 100) -> None:
    async def main() -> None:
        served = AsyncEngine(engine, max_queue)
        await served.start()
        try:
            await asyncio.wait_for(body(served), 60)
        finally:
            await served.close()

    asyncio.run(main())


async def whole(stream: Any) -> Delivery:
    total: Delivery | None = None
    async for delivery in stream:
        total = delivery if total is None else total + delivery
    assert total is not None
    return total


def test_streams_deliver_the_tokens_of_the_engine(engine: Engine) -> None:
    prompts = [tuple(range(index, index + 9)) for index in range(20)]
    expected = [completion.tokens for completion in engine.generate(prompts, PARAMS)]

    async def body(served: AsyncEngine) -> None:
        streams = [await served.submit(Request(str(index), prompt, PARAMS)) for index, prompt in enumerate(prompts)]
        deliveries = await asyncio.gather(*map(whole, streams))
        assert [delivery.tokens for delivery in deliveries] == expected
        assert {delivery.finish_reason for delivery in deliveries} == {"length"}
        assert (served.running, served.waiting) == (0, 0)

    run(engine, body)


def test_a_slow_reader_gets_everything_at_once(engine: Engine) -> None:
    async def body(served: AsyncEngine) -> None:
        stream = await served.submit(Request("a", (1, 2, 3), PARAMS))
        while not stream.finished:
            await asyncio.sleep(0.01)
        deliveries = [delivery async for delivery in stream]
        assert len(deliveries) == 1
        assert len(deliveries[0].tokens) == 12

    run(engine, body)


def test_cancelling_ends_one_request_and_frees_its_blocks(engine: Engine) -> None:
    async def body(served: AsyncEngine) -> None:
        doomed = await served.submit(Request("doomed", (1, 2), ENDLESS))
        other = await served.submit(Request("other", (1, 2, 3), PARAMS))
        async for delivery in doomed:
            doomed.cancel()
            if delivery.finish_reason is not None:
                assert delivery.finish_reason == "cancelled"
        assert (await whole(other)).finish_reason == "length"
        doomed.cancel()
        assert engine.kv_usage == 0.0

    run(engine, body)


def test_a_full_queue_and_bad_requests_are_refused_and_leave_nothing(engine: Engine) -> None:
    async def body(served: AsyncEngine) -> None:
        streams = [await served.submit(Request(str(index), (1, 2), ENDLESS)) for index in range(6)]
        with pytest.raises(QueueFull):
            await served.submit(Request("late", (1, 2), PARAMS))
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*map(whole, streams))
        with pytest.raises(ContextLengthError):
            await served.submit(Request("long", (1,) * 10**5, PARAMS))
        assert (await whole(await served.submit(Request("long", (1, 2), PARAMS)))).finish_reason == "length"
        assert served.waiting == 0

    run(engine, body, max_queue=2)


def test_closing_lets_work_finish_for_a_while_and_then_cancels(engine: Engine) -> None:
    async def body(served: AsyncEngine) -> None:
        short = await served.submit(Request("short", (1, 2), PARAMS))
        closing = asyncio.create_task(served.close(drain_seconds=30))
        await asyncio.sleep(0)
        with pytest.raises(EngineStopped):
            await served.submit(Request("late", (1, 2), PARAMS))
        assert (await whole(short)).finish_reason == "length"
        await closing
        assert not served.alive

    run(engine, body)

    async def impatient(served: AsyncEngine) -> None:
        endless = await served.submit(Request("endless", (1, 2), ENDLESS))
        await served.close(drain_seconds=0)
        assert (await whole(endless)).finish_reason in ("cancelled", "length")

    run(engine, impatient)


def test_an_engine_that_breaks_tells_everybody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[Delivery]:
        raise RuntimeError("broken")

    async def body(served: AsyncEngine) -> None:
        monkeypatch.setattr(engine, "step", broken)
        stream = await served.submit(Request("a", (1, 2), PARAMS))
        delivery = await whole(stream)
        assert (delivery.finish_reason, delivery.error) == ("error", "broken")
        while served.alive:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineStopped):
            await served.submit(Request("b", (1, 2), PARAMS))

    run(engine, body)


def test_generate_streams_and_closing_it_cancels(engine: Engine) -> None:
    expected = engine.generate("abc", PARAMS)[0]

    async def main() -> None:
        async with AsyncEngine(engine) as served:
            pieces = [piece async for piece in served.generate("abc", PARAMS)]
            assert "".join(piece.text for piece in pieces) == expected.text
            assert pieces[-1].finish_reason == "length"
            endless = served.generate([1, 2, 3], ENDLESS)
            await anext(endless)
            await endless.aclose()
            for _ in range(200):
                if not served.running:
                    break
                await asyncio.sleep(0.01)
            assert engine.kv_usage == 0.0

    asyncio.run(main())


@pytest.mark.parametrize("schema", [{"const": True}, {"$ref": "#"}], ids=["valid", "impossible"])
def test_a_prompt_is_computed_while_its_grammar_is_compiled(
    engine: Engine, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, compile, step, compiled = threading.Event(), Grammars._compile, engine.step, []

    def compile_late(grammars: Grammars, *arguments: Any) -> None:
        compiled.append(computed.wait(30))
        compile(grammars, *arguments)

    def step_and_tell() -> list[Delivery]:
        deliveries = step()
        computed.set()
        return deliveries

    monkeypatch.setattr(Grammars, "_compile", compile_late)
    monkeypatch.setattr(engine, "step", step_and_tell)
    params = SamplingParams(temperature=0.0, max_tokens=8, grammar=Grammar.json_schema(schema))

    async def body(served: AsyncEngine) -> None:
        for name in ("first turn", "second turn"):
            if "const" in schema:
                assert (await whole(await served.submit(Request(name, (1, 2, 3), params)))).text == "true"
            else:
                with pytest.raises(UsageError, match="no text follows this grammar"):
                    await served.submit(Request(name, (1, 2, 3), params))
        plain = await whole(await served.submit(Request("plain", (1, 2), PARAMS)))
        assert (plain.finish_reason, served.waiting, engine.kv_usage) == ("length", 0, 0.0)

    run(engine, body)
    assert compiled == [True] * (1 if "const" in schema else 2), "a grammar that was compiled is kept for the next turn"


def test_no_thread_is_left(engine: Engine) -> None:
    before = set(threading.enumerate())

    async def body(served: AsyncEngine) -> None:
        assert served.alive

    run(engine, body)
    deadline = time.monotonic() + 30
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
