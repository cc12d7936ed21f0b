"""No request holds up the next token of another: the longest pause of a stream is measured beside attacks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import MODEL, PATIENCE, Client, running, wait_for

from minifloat.engine import Engine, EngineOptions

#: Seconds by which a request may delay the next token of another.
MOST = 0.1
#: Measurements, of which the best counts: a machine that computes other things has pauses of its own.
ATTEMPTS = 6


@pytest.fixture(scope="module")
def served(make_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder: Path = make_llama(tmp_path_factory.mktemp("fair") / "m", max_position_embeddings=4096)
    (folder / "chat_template.jinja").write_text(
        "{{ tools | length if tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    engine = Engine(folder, EngineOptions(dtype="float32", kv_cache_memory=32 << 20, max_num_seqs=16))
    with running(engine, max_prompt_characters=4 << 20) as client:
        client.complete("x", max_tokens=1, response_format={"type": "json_object"})
        yield client


class Listener:
    """Reads a stream in a thread, and notes the pauses between its events."""

    def __init__(self, client: Client) -> None:
        self._connection = client.open_stream(max_tokens=4000, temperature=1.0)
        self.pauses: list[float] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        last = time.perf_counter()
        try:
            while self._connection.recv(65536):
                now = time.perf_counter()
                self.pauses.append(now - last)
                last = now
        except OSError:
            pass

    def close(self) -> None:
        self._connection.shutdown(2)
        self._thread.join(PATIENCE)
        self._connection.close()


def at_once(count: int, request: Callable[[int], Any]) -> list[Any]:
    """Send requests at once, and return their answers."""
    answers: list[Any] = [None] * count

    def send(index: int) -> None:
        answers[index] = request(index)

    threads = [threading.Thread(target=send, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return answers


def grammar(letter: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{letter}{{1000000000}}$"}
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def hostile(letter: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{letter}{{1000000000}}$"}}}


def tool(number: int, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def calls(count: int, size: int) -> bytes:
    """Return a body with old calls whose arguments are long lists."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": [1] * size})}}
    messages = [{"role": "user", "content": "x"}, *({"role": "assistant", "tool_calls": [call]} for _ in range(count))]
    return json.dumps({"model": MODEL, "messages": messages}).encode()


#: A body of two million token ids; written beforehand, because that holds up the threads of this process too.
MANY_IDS = json.dumps({"model": MODEL, "prompt": [1] * 2_000_000}).encode()
OLD_CALLS = calls(500, 1000)
#: Schemas of half a megabyte together, and of a megabyte in one.
WORDS = {"enum": [f"word {n} " + "and " * 12 for n in range(55)]}
TOOLS = [tool(number, {"type": "object", "properties": {"a": WORDS}}) for number in range(128)]
LARGE = tool(0, {"type": "object", "properties": {f"p{n}": {"const": f"{n} " + "word " * 60} for n in range(3000)}})
ATTACKS: dict[str, Callable[[Client], list[Any]]] = {
    "grammar": lambda client: [client.complete(["a", "b"], n=4, max_tokens=3, response_format=grammar("a"))],
    "tokenizing": lambda client: at_once(2, lambda _: client.complete("word and " * 14_000, max_tokens=1)),
    "token ids": lambda client: [client.post("/v1/completions", MANY_IDS)],
    "template": lambda client: at_once(2, lambda _: client.chat("word and " * 14_000, max_tokens=1)),
    "tools": lambda client: at_once(
        2, lambda n: client.chat("x", tools=TOOLS[n:], tool_choice="required", max_tokens=1)
    ),
    "a large schema": lambda client: [client.chat("x", tools=[LARGE], tool_choice="required", max_tokens=3)],
    "a hostile schema": lambda client: [
        client.chat("x", tools=[tool(0, hostile("a")), tool(1, hostile("b"))], tool_choice="required", max_tokens=3)
    ],
    "old calls": lambda client: [client.post("/v1/chat/completions", OLD_CALLS)],
    "echo with logprobs": lambda client: [client.complete([[5] * 300] * 2, echo=True, logprobs=20, max_tokens=1)],
    "stop strings": lambda client: at_once(
        2, lambda _: client.complete(n=2, max_tokens=60, ignore_eos=True, stop=["x" * 255 + str(i) for i in range(16)])
    ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_no_request_delays_the_next_token_of_another(served: Client, name: str) -> None:
    delays = []
    for _ in range(ATTEMPTS):
        listener = Listener(served)
        time.sleep(0.3)  # the longest pause without an attack
        alone, listener.pauses = max(listener.pauses, default=MOST), []
        answers = ATTACKS[name](served)
        listener.close()
        assert all(answer.status in (200, 400, 413) for answer in answers), [answer.body[:200] for answer in answers]
        delays.append(max(listener.pauses, default=0.0) - alone)
        if delays[-1] < MOST:
            return
        assert wait_for(lambda: served.engine.running == 0)
    pytest.fail(f"the next token came later by {[round(delay, 3) for delay in delays]} s")


def test_log_probabilities_of_prompts_are_bounded_in_sum(served: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minifloat.serve.server.service.MAX_PROMPT_LOGPROBS", 3 * 21 * 200)
    body = {"echo": True, "logprobs": 20, "max_tokens": 0}
    service = served.server.config.app.state.service  # type: ignore[union-attr]
    service._hold(2 * 21 * 200)  # what other requests hold
    refused = served.complete([5] * 300, **body)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert "other requests hold 8400 numbers" in refused.error["message"]
    assert served.complete([5] * 200, **body).status == 200
    service._hold(-2 * 21 * 200)
    answers = [served.complete([5] * 300, **body | {"stream": stream}) for stream in (False, True)]
    assert [answer.status for answer in answers] == [200, 200]
    assert len(answers[0].json["choices"][0]["logprobs"]["tokens"]) == 300
    assert wait_for(lambda: service._held_logprobs == 0)
    assert served.post("/v1/completions", {"model": MODEL, "prompt": [5] * 700} | body).status == 400


def test_the_usage_of_the_cache_is_not_stale_after_an_abort(served: Client) -> None:
    def usage() -> float:
        lines = served.get("/metrics").body.decode().splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("minifloat_kv_cache_usage_perc ")))

    stream = served.open_stream(max_tokens=4000)
    assert wait_for(lambda: usage() > 0)
    stream.close()
    assert wait_for(lambda: served.engine.running == 0)
    assert usage() == 0.0
    assert served.get("/status").json["now"]["kv_usage"] == 0.0


def test_json_that_cannot_be_finished_is_an_error_of_the_request(served: Client) -> None:
    schema = {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    whole = served.complete(max_tokens=8, response_format=response_format)
    assert (whole.status, whole.error["param"]) == (400, "response_format")
    events = served.complete(max_tokens=8, response_format=response_format, stream=True).body.decode()
    last = json.loads(events.split("\n\n")[-3].removeprefix("data: "))
    assert last["error"]["param"] == "response_format"
    assert '"stop"' not in events
