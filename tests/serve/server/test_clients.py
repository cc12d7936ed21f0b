"""The server with the clients that users have: the `openai` package, Prometheus, curl and `minifloat chat`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine
from serving import MODEL, PATIENCE, Client, running, wait_for

from minifloat.engine import Engine, EngineOptions, SamplingParams
from minifloat.serve.client import ChatClient, ServerError, chat
from minifloat.serve.server import read_api_keys

KEY = "a-key-for-tests"


@pytest.fixture(scope="module")
def real(tiny_folder: Path) -> Iterator[Client]:
    """A server of the real engine, with an API key."""
    engine = Engine(
        tiny_folder,
        EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=16, max_num_batched_tokens=128),
    )
    with running(engine, api_keys=read_api_keys([KEY])) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(real: Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


USER: Any = [{"role": "user", "content": "hello"}]


def test_openai_lists_the_model(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).id == MODEL


def test_openai_gets_the_completion_of_the_engine(sdk: openai.OpenAI, tiny: Engine) -> None:
    answer = sdk.completions.create(model=MODEL, prompt="hello", max_tokens=20, temperature=0, logprobs=2)
    (expected,) = tiny.generate("hello", SamplingParams(max_tokens=20, temperature=0, logprobs=2))
    assert answer.choices[0].text == expected.text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert answer.choices[0].logprobs is not None
    assert expected.logprobs is not None
    ours = [token.logprob for token in expected.logprobs]
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(ours, abs=1e-4)


@pytest.mark.parametrize("length", [0, 1])
def test_the_openai_client_gets_the_log_probabilities_of_a_prompt(
    sdk: openai.OpenAI, tiny: Engine, length: int
) -> None:
    tokens = list(tiny.encode("hello there"))
    params = SamplingParams(max_tokens=length, temperature=0, logprobs=1, prompt_logprobs=1)
    (expected,) = tiny.generate([tokens], params)
    assert expected.prompt_logprobs is not None
    answer = sdk.completions.create(
        model=MODEL, prompt=[tokens], max_tokens=length, temperature=0, logprobs=1, echo=True, seed=1234
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    tokens_with_logprobs = (*expected.prompt_logprobs[1:], *(expected.logprobs or ()))
    ours = [token.logprob for token in tokens_with_logprobs if token is not None]
    assert logprobs.token_logprobs[1:] == pytest.approx(ours, abs=1e-4)
    assert len(logprobs.token_logprobs) == len(tokens) + length
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


def test_openai_streams_the_same_chat_that_it_gets_without_streaming(sdk: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 25, "seed": 7, "temperature": 1.0}
    whole = sdk.chat.completions.create(**fields)
    stream = sdk.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_openai_reads_log_probabilities_of_a_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL, messages=USER, max_tokens=4, logprobs=True, top_logprobs=5)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [len(token.top_logprobs) for token in content] == [5] * len(content)
    assert all(token.logprob <= 0 for token in content)


def test_openai_gets_json_that_follows_a_schema(sdk: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = sdk.chat.completions.create(
            model=MODEL,
            messages=USER,
            seed=seed,
            max_tokens=300,
            response_format={"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}},
        )
        if answer.choices[0].finish_reason == "stop":  # a model with random weights may fill its context with blanks
            assert set(json.loads(answer.choices[0].message.content or "")) == {"ok", "size"}


@pytest.mark.parametrize(
    ("rules", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}c"}}, "[ab]{3}c"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "[12]"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/'}}, "x[0-9]"),
        ({"guided_grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"guided_regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"guided_choice": ["yes", "no"], "response_format": {"type": "text"}}, "yes|no"),
        ({"guided_json": '{"enum": [1, 2]}'}, "[12]"),
    ],
    ids=json.dumps,
)
def test_an_answer_follows_the_rules_that_vllm_names(sdk: openai.OpenAI, rules: Any, pattern: str) -> None:
    text = sdk.completions.create(model=MODEL, prompt="x", max_tokens=20, extra_body=rules).choices[0].text
    assert re.fullmatch(pattern, text)
    chat = sdk.chat.completions.create(model=MODEL, messages=USER, max_tokens=20, extra_body=rules)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("rules", "param"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": "(["}, "guided_regex"),
        ({"guided_grammar": "start: ["}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"type": 3}}, "guided_json"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<f"], "structures": []}}, "response_format"),
    ],
    ids=json.dumps,
)
def test_rules_that_cannot_be_followed_are_refused_by_name(sdk: openai.OpenAI, rules: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=20, extra_body=rules)
    assert str(refused.value.param).startswith(param)


def test_a_trigger_goes_on_as_a_structure(sdk: openai.OpenAI) -> None:
    tag = {"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}
    format: Any = {"type": "structural_tag", "structures": [tag], "triggers": ["<f"]}
    bias = {str(ord(letter) - 33): 100 for letter in "<f"}  # a token for each byte
    for seed in range(3):
        answer = sdk.completions.create(
            model=MODEL, prompt="x", max_tokens=60, seed=seed, logit_bias=bias, extra_body={"response_format": format}
        )
        text = answer.choices[0].text
        assert "<f" in text
        assert re.search(r"<f(?!>[12]</f>|$|>$|>[12]$|>[12]<|>[12]</)", text) is None


def test_openai_raises_its_own_errors(real: Client, sdk: openai.OpenAI) -> None:
    tools: Any = [{"type": "custom", "custom": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="describe the tool as a function") as refused:
        sdk.chat.completions.create(model=MODEL, messages=USER, tools=tools)
    assert str(refused.value.param).startswith("tools")
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="another", prompt="x")
    with (
        openai.OpenAI(base_url=f"{real.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_openai_raises_the_error_of_a_stream_that_fails(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, fails=lambda request: "exploded")
    with (
        running(engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
        pytest.raises(openai.APIError, match="exploded"),
    ):
        list(client.completions.create(model=MODEL, prompt="x", stream=True))


def test_openai_gets_the_same_answers_concurrently_and_one_by_one(real: Client, sdk: openai.OpenAI) -> None:
    prompts = [f"question {number}" for number in range(24)]
    fields: Any = {"model": MODEL, "max_tokens": 12, "temperature": 0}

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{real.url}/v1", api_key=KEY, max_retries=0) as client:

            async def ask(index: int, prompt: str) -> str:
                if index % 2:
                    stream = await client.completions.create(prompt=prompt, stream=True, **fields)
                    return "".join([chunk.choices[0].text async for chunk in stream])
                return str((await client.completions.create(prompt=prompt, **fields)).choices[0].text)

            return list(await asyncio.gather(*(ask(index, prompt) for index, prompt in enumerate(prompts))))

    together = asyncio.run(ask_all())
    assert together == [sdk.completions.create(prompt=prompt, **fields).choices[0].text for prompt in prompts]


def test_openai_cancels_by_closing_a_stream(real: Client, sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(
        model=MODEL, prompt="on and on", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert real.idle()


def test_curl_streams_a_completion(real: Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": True})
    command = ["curl", "-sN", f"{real.url}/v1/completions", "-H", f"Authorization: Bearer {KEY}"]
    try:
        done = subprocess.run([*command, "--json", body], capture_output=True, text=True, timeout=PATIENCE, check=True)
    except FileNotFoundError:
        pytest.skip("no curl here")
    assert done.stdout.endswith("data: [DONE]\n\n")


# ------------------------------------------------------------------------------------------------- load


def test_requests_beyond_the_queue_get_503_and_the_others_are_served(tokenizer: Any) -> None:
    answers: list[Any] = []
    engine = FakeEngine(tokenizer)
    engine.held = True  # until all requests have come
    with running(engine, max_queue=4) as client:

        def ask(index: int) -> None:
            answers.append(client.complete(f"{index:03}", max_tokens=30, stream=index % 2 == 0))

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(60)]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: len(answers) == 48)
        engine.held = False
        for thread in threads:
            thread.join()
        assert client.idle()
        metrics = client.get("/metrics").body.decode()
    refused = [answer for answer in answers if answer.status == 503]
    served = [answer for answer in answers if answer.status == 200]
    assert len(refused) == 48
    assert len(served) == 12, "8 run and 4 wait"
    assert all(answer.headers["retry-after"] == "1" and answer.error["code"] == "queue_full" for answer in refused)
    assert f'admission_rejections_total{{reason="queue_full"}} {len(refused)}.0' in metrics
    for answer in served:
        pieces = answer.events if "event-stream" in answer.headers["content-type"] else [answer.json]
        text = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert text == text[:3] * 10


def test_all_choices_of_an_answer_are_admitted_or_none(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, seconds=0.05)
    with running(engine, max_queue=4) as client:
        never = client.complete(["a", "b"], n=8, max_tokens=2)
        assert (never.status, never.error["param"]) == (400, "n")
        with client.open_stream(max_tokens=500, n=8):
            engine.held = True  # the stream does not end before the next request
            assert client.complete(n=8, max_tokens=2).status == 503
        assert client.idle()
        engine.held = False
        assert client.complete(n=8, max_tokens=2).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopping_server_finishes_admitted_requests_and_admits_no_more(tokenizer: Any, stream: bool) -> None:
    answers: list[Any] = []
    engine = FakeEngine(tokenizer)
    engine.held = True
    with running(engine, shutdown_timeout=PATIENCE) as client:
        threads = [
            threading.Thread(target=lambda: answers.append(client.complete("ab", max_tokens=60, stream=stream)))
            for _ in range(12)
        ]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: client.engine.running + client.engine.waiting == 12)
        client.server.should_exit = True
        assert wait_for(lambda: client.engine.draining)
        with pytest.raises(OSError, match="refused"):
            client.complete()
        engine.held = False
        for thread in threads:
            thread.join()
    assert [answer.status for answer in answers] == [200] * 12
    if stream:
        assert all(answer.events[-1]["choices"][0]["finish_reason"] == "length" for answer in answers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_unfinished_at_the_shutdown_timeout_gets_an_error(tokenizer: Any, stream: bool) -> None:
    answers: list[Any] = []
    engine = FakeEngine(tokenizer)
    engine.held = True  # it never finishes
    with running(engine, shutdown_timeout=0.3) as client:
        thread = threading.Thread(target=lambda: answers.append(client.complete(max_tokens=500, stream=stream)))
        thread.start()
        assert wait_for(lambda: client.engine.running == 1)
        client.server.should_exit = True
        thread.join(PATIENCE)
    (answer,) = answers
    error = answer.events[-1]["error"] if stream else answer.error
    assert error["code"] == "stopping"


def test_a_second_signal_ends_the_server_before_its_requests(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, seconds=0.05)
    with running(engine, shutdown_timeout=10 * PATIENCE) as client:
        stream = client.open_stream(max_tokens=500)
        engine.held = True  # the request does not end by itself
        client.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: client.engine.draining)
        client.server.handle_exit(signal.SIGTERM, None)
        assert wait_for(lambda: not client.engine.alive)
        stream.close()


# ------------------------------------------------------------------------------------------------- commands


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served(tiny_folder: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of `minifloat serve`, with options from its arguments and its environment."""
    port = free_port()
    environment = os.environ | {
        "MINIFLOAT_API_KEY": KEY,
        "MINIFLOAT_SERVED_MODEL_NAME": "from-the-environment",
        "MINIFLOAT_MAX_NUM_SEQS": "4",
        "MINIFLOAT_KV_CACHE_MEMORY": "8MiB",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "minifloat", "serve", str(tiny_folder), "--port", str(port), "--dtype", "float32"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_for(lambda: answers(port) or process.poll() is not None)
        assert process.poll() is None, process.communicate()
        yield process, port
    finally:
        process.kill()
        process.communicate()


def answers(port: int) -> bool:
    try:
        return Client(port, None, None).get("/health").status == 200  # type: ignore[arg-type]
    except OSError:
        return False


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP], ids=["sigterm", "sighup"])
def test_serve_drains_at_a_signal_and_ends_with_status_0(
    served: tuple[subprocess.Popen[str], int], stop: signal.Signals
) -> None:
    if signal.getsignal(stop) is signal.SIG_IGN:
        pytest.skip("started by nohup, whose processes ignore the signal")
    process, port = served
    client = Client(port, None, None)  # type: ignore[arg-type]
    results: list[Any] = []
    body = {"model": "from-the-environment", "prompt": "x", "max_tokens": 400, "ignore_eos": True}

    def ask() -> None:
        results.append(client.post("/v1/completions", body, Authorization=f"Bearer {KEY}"))

    threads = [threading.Thread(target=ask) for _ in range(10)]
    for thread in threads:
        thread.start()

    def admitted() -> int:
        finished = len(results)  # before the others are counted, so that no request counts twice
        now = client.get("/status", Authorization=f"Bearer {KEY}").json["now"]
        return finished + int(now["running"] + now["waiting"])

    assert wait_for(lambda: admitted() == 10)
    process.send_signal(stop)
    for thread in threads:
        thread.join()
    assert [answer.status for answer in results] == [200] * 10
    assert all(answer.json["usage"]["completion_tokens"] == 400 for answer in results)
    _, log = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, log
    assert "tool calls: in the format generic; thinking: not told apart" in log
    assert "stopping: finishing admitted requests" in log
    assert "Traceback" not in log


def test_serve_refuses_an_address_in_use(tiny_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "minifloat", "serve", str(tiny_folder), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "cannot listen there: Address already in use" in done.stderr
    assert "choose another one with --port" in done.stderr
    assert done.stderr.count("\n") == 1


class Terminal:
    """A terminal that types the given lines and keeps the text shown."""

    def __init__(self, *lines: str) -> None:
        self.lines, self.shown = list(lines), ""

    def read(self, prompt: str) -> str:
        self.shown += prompt
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)

    def write(self, text: str) -> None:
        self.shown += text


def test_chat_keeps_the_conversation_and_obeys_reset_and_system(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer)
    terminal = Terminal("one", "two", "/reset", "three", "/system be brief", "four", "/nonsense", "", "/quit", "five")
    with running(engine) as server:
        client = ChatClient(server.url, sampling={"max_tokens": 4})
        chat(client, system="first", stats=True, read=terminal.read, write=terminal.write)
    prompts = [tokenizer.decode(request.prompt) for request in engine.requests]
    assert len(prompts) == 4
    assert prompts[0] == "<s>system: first</s>user: one</s>assistant: "
    assert prompts[1].count("user: ") == 2
    assert prompts[2] == "<s>system: first</s>user: three</s>assistant: "
    assert prompts[3] == "<s>system: be brief</s>user: four</s>assistant: "
    assert "unknown command /nonsense" in terminal.shown
    assert "to the first token" in terminal.shown


def test_chat_shows_an_error_and_continues(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, fails=lambda request: "no" if "bad" in tokenizer.decode(request.prompt) else None)
    terminal = Terminal("bad", "good")
    with running(engine, api_keys=read_api_keys([KEY])) as server:
        client = ChatClient(f"{server.url}/v1/", api_key=KEY, sampling={"max_tokens": 6})
        chat(client, read=terminal.read, write=terminal.write)
        with pytest.raises(ServerError, match="401"):
            chat(ChatClient(server.url), read=terminal.read, write=terminal.write)
    assert "engine failed on this request: no" in terminal.shown
    assert "bad" not in tokenizer.decode(engine.requests[-1].prompt)
    with pytest.raises(ServerError, match="minifloat serve"):
        ChatClient(f"http://127.0.0.1:{free_port()}").find_model()


def test_chat_stops_an_answer_at_ctrl_c(tokenizer: Any) -> None:
    terminal = Terminal("go on")

    def write(text: str) -> None:
        terminal.write(text)
        if "assistant" in terminal.shown:
            engine.held = True  # the answer does not end by itself
            raise KeyboardInterrupt

    engine = FakeEngine(tokenizer, seconds=0.05)
    with running(engine) as server:
        with pytest.raises(KeyboardInterrupt):
            chat(ChatClient(server.url), read=terminal.read, write=write)
        assert server.idle()
