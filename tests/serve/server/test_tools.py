"""Chats with tools and thinking, on sockets, with OpenAI's client and an engine that says what a test wants."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import INFO, FakeEngine
from pydantic import BaseModel
from serving import MODEL, Client, running

from minifloat.engine import Engine, EngineOptions, Thinking
from minifloat.errors import UsageError
from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.serve.client import ChatClient, chat
from minifloat.serve.dialog.prompt import Dialogs

#: A small form of Qwen3's template.
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{{ m.name }}{% for call in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}</s>{% endfor %}{% for d in documents or [] %}[{{ d.title }}]{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is defined and not enable_thinking %}<think>"
    "</think>{% endif %}{% endif %}{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
)
NO_THINKING = TEMPLATE.replace("think>", "thought>")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
NOTE = {"type": "function", "function": {"name": "note"}}
USER: Any = [{"role": "user", "content": "1 + 2?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "note", "arguments": {"text": "caf\u00e9 \\"</tool_call>\\""}}\n</tool_call>'


@contextmanager
def saying(
    tokenizer: Any, text: str, template: str = NO_THINKING, **settings: Any
) -> Iterator[tuple[openai.OpenAI, Client, FakeEngine]]:
    """OpenAI's client, and our own, of a server whose engine says a text."""
    said = tokenizer(text, add_special_tokens=False).input_ids
    engine = FakeEngine(tokenizer, says=lambda request: said)
    engine.info = replace(INFO, max_model_len=8192)
    with (
        running(engine, chat_template=template, **settings) as client,
        openai.OpenAI(base_url=f"{client.url}/v1", api_key="-", max_retries=0) as sdk,
    ):
        yield sdk, client, engine


def prompt(tokenizer: Any, engine: FakeEngine) -> str:
    return str(tokenizer.decode(engine.requests[-1].prompt))


# ------------------------------------------------------------------------------------------------- calls out


def test_a_call_comes_as_openais_do(tokenizer: Any) -> None:
    with saying(tokenizer, CALL) as (sdk, client, _):
        (choice,) = sdk.chat.completions.create(model=MODEL, messages=USER, tools=[ADD, NOTE]).choices
        raw = client.chat("1 + 2?", tools=[ADD]).json["choices"][0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1, "b": 2}')
    assert call.id.startswith("call_")
    assert set(raw["message"]) == {"role", "content", "refusal", "tool_calls"}
    assert set(raw["message"]["tool_calls"][0]) == {"id", "type", "function"}


def test_a_streamed_call_has_id_and_name_once_and_then_its_arguments(tokenizer: Any) -> None:
    with saying(tokenizer, f"Well. {CALL}\n{SECOND}") as (sdk, _, _):
        chunks = list(sdk.chat.completions.create(model=MODEL, messages=USER, tools=[ADD, NOTE], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.index for call in calls] == sorted(call.index for call in calls)
    for index, name in enumerate(("add", "note")):
        first, *rest = [call for call in calls if call.index == index]
        assert (first.type, first.function and first.function.name) == ("function", name)
        assert first.id
        assert all(
            call.id is None and call.type is None and call.function and call.function.name is None for call in rest
        )
        assert len(rest) > 3, "arguments come in pieces"
    texts = [
        "".join(call.function.arguments or "" for call in calls if call.function and call.index == n) for n in (0, 1)
    ]
    assert [json.loads(text) for text in texts] == [{"a": 1, "b": 2}, {"text": 'caf\u00e9 "</tool_call>"'}]
    ends = [chunk.choices[0].finish_reason for chunk in chunks]
    assert ends == [None] * (len(ends) - 1) + ["tool_calls"]
    assert deltas[-1].model_dump(exclude_unset=True) == {}


@pytest.mark.parametrize("n", [1, 3])
def test_the_stream_helper_gets_what_is_not_streamed(tokenizer: Any, n: int) -> None:
    fields: Any = {"model": MODEL, "messages": USER, "tools": [ADD, NOTE], "n": n}
    with saying(tokenizer, f"Hm {CALL} then {SECOND} done") as (sdk, _, _):
        with sdk.chat.completions.stream(**fields) as stream:
            streamed = stream.get_final_completion()
        whole = sdk.chat.completions.create(**fields)
    for one, other in zip(streamed.choices, whole.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content == other.message.content == "Hm  then  done"
        calls, others = (
            [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]  # type: ignore[union-attr]
            for message in (one.message, other.message)
        )
        assert calls == others
        assert len(calls) == 2


def test_the_parse_helper_reads_the_arguments(tokenizer: Any) -> None:
    class Add(BaseModel):
        a: int
        b: int

    tool = openai.pydantic_function_tool(Add, name="add")
    with saying(tokenizer, CALL) as (sdk, _, engine):
        parsed = sdk.chat.completions.parse(model=MODEL, messages=USER, tools=[tool])
        assert engine.requests[-1].params.grammar is not None, "the helper makes tools strict"
    (call,) = parsed.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Add(a=1, b=2)


def test_an_answer_that_is_cut_off_is_length(tokenizer: Any) -> None:
    cut = len(tokenizer(CALL[:50], add_special_tokens=False).input_ids)
    with saying(tokenizer, CALL) as (sdk, _, _):
        for stream in (False, True):
            fields: Any = {"model": MODEL, "messages": USER, "tools": [ADD], "max_tokens": cut}
            if stream:
                with (
                    sdk.chat.completions.stream(**fields) as chunks,
                    pytest.raises(openai.LengthFinishReasonError) as cut_off,
                ):
                    chunks.get_final_completion()
                (choice,) = cut_off.value.completion.choices
            else:
                (choice,) = sdk.chat.completions.create(**fields).choices
            assert choice.finish_reason == "length"
            (call,) = choice.message.tool_calls or ()
            assert '{"a": 1, "b": 2}'.startswith(call.function.arguments)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": [ADD], "tool_choice": "none"}, {"tools": [NOTE]}],
    ids=["no tools", "none", "another tool"],
)
def test_what_is_no_call_is_text(tokenizer: Any, fields: Any) -> None:
    with saying(tokenizer, CALL) as (_, client, engine):
        (choice,) = client.chat("x", **fields).json["choices"]
        assert ("add" in prompt(tokenizer, engine)) == ("tool_choice" in fields)
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"


# ------------------------------------------------------------------------------------------------- thinking


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_told_apart_and_counted(tokenizer: Any, stream: bool) -> None:
    with saying(tokenizer, f"<think>\nOne and two.\n</think>\n\nI add. {CALL}", TEMPLATE) as (_, client, engine):
        answer = client.chat(
            "x", tools=[ADD], stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
        )
        params = engine.requests[-1].params
        hidden = client.chat("x", include_reasoning=False).json["choices"][0]["message"]
    if stream:
        deltas = [event["choices"][0]["delta"] for event in answer.events if event["choices"]]
        thought, again, said = (
            "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "reasoning", "content")
        )
        assert thought == again
        assert {"content": ""} not in deltas, "no chunk is empty"
        usage = answer.events[-1]["usage"]
    else:
        message = answer.json["choices"][0]["message"]
        thought, said, usage = message["reasoning_content"], message["content"], answer.json["usage"]
        assert message["reasoning"] == thought
    assert (thought, said) == ("One and two.", "I add.")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nOne and two.\n</think>")}
    assert params.thinking == Thinking("<think>", ("</think>",), closing=params.thinking.closing)
    assert "reasoning_content" not in hidden
    assert hidden["content"].startswith("I add.")


def test_a_prompt_may_begin_or_end_the_thinking(tokenizer: Any) -> None:
    opened = TEMPLATE.replace("assistant: {% if enable", "assistant: <think>{% if enable")
    with saying(tokenizer, "Hm.</think>Yes", opened) as (_, client, engine):
        message = client.chat("x", max_reasoning_tokens=7).json["choices"][0]["message"]
        thinking = engine.requests[-1].params.thinking
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")
    assert thinking is not None
    assert (thinking.begun, thinking.budget) == (True, 7)
    assert tokenizer.decode(thinking.closing) == "\n</think>"
    with saying(tokenizer, "Yes", TEMPLATE) as (_, client, engine):
        message = client.chat("x", reasoning_effort="none").json["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Yes", "refusal": None}
        assert prompt(tokenizer, engine).endswith("assistant: <think></think>")


def test_without_a_reasoning_format_thinking_is_text(tokenizer: Any) -> None:
    with saying(tokenizer, "<think>Hm.</think>Yes", TEMPLATE, reasoning_format="none") as (_, client, _):
        message = client.chat("x").json["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>Hm.</think>Yes", "refusal": None}


# ------------------------------------------------------------------------------------------------- messages in


def test_an_agent_loop_sends_back_what_it_got(tokenizer: Any) -> None:
    with saying(tokenizer, f"<think>Hm.</think>I add. {CALL}", TEMPLATE) as (sdk, _, engine):
        messages: Any = [{"role": "developer", "content": "Be brief."}, *USER]
        first = sdk.chat.completions.create(model=MODEL, messages=messages, tools=[ADD]).choices[0].message
        result = {
            "role": "tool",
            "tool_call_id": (first.tool_calls or [])[0].id,
            "content": [{"type": "text", "text": "3"}],
        }
        sdk.chat.completions.create(
            model=MODEL,
            messages=[
                *messages,
                first,
                result,
                {"role": "assistant", "content": None, "tool_calls": first.tool_calls},
                result,
            ],
            tools=[ADD],
            parallel_tool_calls=False,
            reasoning_effort="xhigh",
            extra_body={"documents": [{"title": "One"}], "chat_template_kwargs": {"unread": [{"deep": None}]}},
        )
        text = prompt(tokenizer, engine)
    tools = json.dumps(ADD)
    assert text == (
        f"<tools>{tools}</tools>system: Be brief.</s>user: 1 + 2?</s>assistant: <think>Hm.</think>I add.{CALL}</s>"
        f"tool: 3add</s>assistant: {CALL}</s>tool: 3add</s>[One]assistant: (high)"
    )


def test_an_answer_continues_the_last_message(tokenizer: Any) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    body = {"model": MODEL, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    with saying(tokenizer, "three") as (_, client, engine):
        assert client.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "three"
        assert prompt(tokenizer, engine).endswith("assistant: It is ")
        counted = client.post("/tokenize", {"messages": messages, "tools": [ADD], "add_generation_prompt": False})
        assert tokenizer.decode(counted.json["tokens"]).endswith("It is </s>")
        assert '"add"' in tokenizer.decode(counted.json["tokens"])


def test_a_template_without_tools_gets_them_in_the_system_message(tokenizer: Any) -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}assistant: "
    calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "I add.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "user", "content": "Really?"},
    ]
    with saying(tokenizer, CALL, plain) as (_, client, engine):
        answer = client.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [ADD, NOTE]})
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls"
        system, user, assistant, results, _ = prompt(tokenizer, engine).split("</s>")
        assert system.startswith("system: Be brief.\n\n")
        assert all(json.dumps(tool["function"]["name"]) in system for tool in (ADD, NOTE))  # type: ignore[index]
        assert "<tool_call>" in system
        assert (user, assistant) == ("user: 1 + 2?", f"assistant: I add.\n{CALL}")
        assert results == "user: <tool_response>\n3\n</tool_response>\nReally?"
        assert client.get("/v1/models").json["data"][0]["tool_format"] == "generic"
    refuses = plain.replace(
        "{% for m", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for m"
    )
    with saying(tokenizer, CALL, refuses) as (_, client, engine):
        assert client.chat("1 + 2?", tools=[ADD]).status == 200
        text = prompt(tokenizer, engine)
        assert text.startswith("user: You may call")
        assert text.endswith("\n\n1 + 2?</s>assistant: ")


@pytest.mark.parametrize(
    ("arguments", "id", "written"),
    [
        ("{{ f.arguments }}", "{{ c.id }}", '{"a": 1} call_1'),
        (
            "{{ f.arguments | tojson }}",
            "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c.id }}",
            None,
        ),
        ("{{ 'x' + f.arguments }}", "{{ c.id }}", 'x{"a": 1} call_1'),
        ("{% for k, v in f.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "{{ c.id }}", "a=1 call_1"),
    ],
    ids=["printed", "short ids", "text", "items"],
)
def test_templates_get_calls_in_the_form_that_they_read(tokenizer: Any, arguments: str, id: str, written: Any) -> None:
    template = (
        "{{ tools | length if tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
        f"{{% set f = c.function %}}{arguments} {id}{{% endfor %}}{{% endfor %}}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    with saying(tokenizer, "x", template) as (_, client, engine):
        assert client.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "tools": [ADD]}).status == 200
        text = prompt(tokenizer, engine)
    found = text.removeprefix("11 + 2?").removesuffix("3")
    assert found == written if written else len(found.removeprefix('{"a": 1} ')) == 9


# ------------------------------------------------------------------------------------------------- refused


def _call(**fields: Any) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}} | fields
    return [*USER, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"tools": [NOTE] * 129}, "tools", "128"),
        ({"tools": [ADD, ADD]}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "expected one of function"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "required"),
        ({"functions": []}, "functions", "tools"),
        ({"function_call": "auto"}, "function_call", "tool_choice"),
        ({"messages": [{"role": "tool", "content": "3"}]}, "messages[0]", "tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]", "content"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0]", "reasoning"),
        ({"messages": _call(function={"name": "add", "arguments": "[1"})}, "messages", "JSON text"),
        ({"messages": _call(function={"name": "add", "arguments": "[" * 9999})}, "messages", "JSON text"),
        ({"messages": _call(type="custom")}, "messages[1].tool_calls[0].type", "function"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role", "tool"),
        ({"continue_final_message": True}, "messages", "no text of an assistant"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "false"),
        ({"chat_template_kwargs": {"_x": 1}}, "chat_template_kwargs", "letters"),
        ({"chat_template_kwargs": {"x": [[[]] * 20_000]}}, "chat_template_kwargs", "20000 values"),
        ({"documents": [{"text": "x"}] * 65}, "documents", "64"),
        ({"documents": ["x"]}, "documents[0]", "dict"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens", "greater"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "low"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_by_name(tools_client: Client, fields: Any, param: str, word: str) -> None:
    answer = tools_client.post("/v1/chat/completions", {"model": MODEL, "messages": USER} | fields)
    assert answer.status == 400, answer.body
    assert str(answer.error["param"]).startswith(param)
    assert word in answer.error["message"]


@pytest.fixture(scope="module")
def tools_client(tokenizer: Any) -> Iterator[Client]:
    with saying(tokenizer, "x") as (_, client, _):
        yield client


def test_tools_can_be_switched_off_and_named(tokenizer: Any) -> None:
    with saying(tokenizer, CALL, tool_format="none") as (_, client, _):
        refused = client.chat("x", tools=[ADD])
        assert (refused.status, refused.error["param"]) == (400, "tools")
        assert client.get("/v1/models").json["data"][0]["tool_format"] is None
    with saying(
        tokenizer, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", tool_format="glm"
    ) as (
        _,
        client,
        _,
    ):
        (choice,) = client.chat("x", tools=[ADD]).json["choices"]
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
        assert client.get("/v1/models").json["data"][0]["tool_format"] == "glm"


def test_a_format_that_the_model_is_not_told_is_refused_at_the_start(tokenizer: Any) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(UsageError, match="--tool-format glm: the chat template has no tools"):
        Dialogs(tokenizer, plain, "glm").tool_format  # noqa: B018
    assert Dialogs(tokenizer, plain, "generic").tool_format == "generic"


def test_minifloat_chat_shows_thinking_and_does_not_send_it_back(tokenizer: Any) -> None:
    lines, shown = iter(["one", "two", "/quit"]), []
    with saying(tokenizer, "<think>Hm.</think>Yes.", TEMPLATE) as (_, client, engine):
        chat(ChatClient(client.url), read=lambda _: next(lines), write=shown.append)
        assert "".join(ChatClient(client.url).stream(USER)) == "Yes."
        second = str(tokenizer.decode(engine.requests[1].prompt))
    assert "".join(shown).count("(Hm.)\nYes.\n") == 2
    assert second == "user: one</s>assistant: Yes.</s>user: two</s>assistant: "


# ------------------------------------------------------------------------------------------------- a real engine


def test_an_agent_of_ten_turns_computes_only_new_tokens(make_llama: Any, tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "m", max_position_embeddings=8192)
    engine = Engine(folder, EngineOptions(dtype="float32", kv_cache_memory=32 << 20, max_num_seqs=4))
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": STRICT}}
    messages: Any = [{"role": "system", "content": "Add numbers. " * 20}, *USER]
    computed = 0
    with (
        running(engine, chat_template=NO_THINKING) as client,
        openai.OpenAI(base_url=f"{client.url}/v1", api_key="-", max_retries=0) as sdk,
    ):
        for choice in (*["required"] * 10, "none"):
            answer = sdk.chat.completions.create(
                model=MODEL,
                messages=messages,
                tools=[tool],
                tool_choice=choice,
                parallel_tool_calls=False,
                max_tokens=99,
            )  # type: ignore[call-overload]
            message, usage = answer.choices[0].message, answer.usage
            cached = usage.prompt_tokens_details.cached_tokens
            assert cached >= (computed - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            computed = usage.prompt_tokens + usage.completion_tokens
            assert bool(message.tool_calls) == (choice == "required")
            for call in message.tool_calls or ():
                numbers = json.loads(call.function.arguments)
                result = f"Result {len(messages)}: {numbers['a'] + numbers['b']}"
                messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    assert cached / usage.prompt_tokens > 0.95


HARMONY = (
    "<|start|>system<|message|>{{ tools | length if tools }}<|end|>{% for m in messages %}<|start|>{{ m.role }}"
    "<|message|>{{ m.content }}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# the assistant writes <|channel|> #}"
)
DIGITS = {"type": "integer", "enum": list(range(10))}
STRICT = {"type": "object", "properties": {"a": DIGITS, "b": DIGITS}, "required": ["a", "b"]}
STRICT |= {"additionalProperties": False}


@pytest.fixture
def harmony(tokenizer: Any) -> Any:
    """The tokenizer with gpt-oss's special tokens, within the vocabulary of the test's models."""
    marked = copy.deepcopy(tokenizer)
    names = ("start", "channel", "message", "constrain", "end", "call", "return")
    marked.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in names]})
    return marked


def test_channels_of_gpt_oss_are_thinking_text_and_calls(harmony: Any) -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = f"{thought}<|channel|>final<|message|>Three."
    call = f'{thought}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1, "b": 2}}'
    for said, content, calls in ((final, "Three.", 0), (call, None, 1)):
        with saying(harmony, said, HARMONY) as (_, client, engine):
            card = client.get("/v1/models").json["data"][0]
            assert (card["tool_format"], card["thinks"]) == ("harmony", True)
            answer = client.chat("x", tools=[ADD]).json
            visible = {harmony.decode([token]) for token in engine.requests[-1].params.visible}
        message = answer["choices"][0]["message"]
        assert {"<|channel|>", "<|message|>", "<|start|>", "<|end|>"} <= visible
        assert (message["reasoning_content"], message["content"]) == ("Hm.", content)
        assert len(message.get("tool_calls", ())) == calls
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3 + len("analysisHm.")}


@pytest.mark.parametrize("name", ["think", "harmony"])
@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_ends_thinking_and_a_call_by_the_schema_follows(
    tiny_folder: Path, tokenizer: Any, harmony: Any, name: str, budget: int
) -> None:
    template = TEMPLATE.replace("assistant: {% if enable", "assistant: <think>{% if enable")
    template = HARMONY if name == "harmony" else template
    engine = Engine(
        tiny_folder,
        EngineOptions(dtype="float32", kv_cache_memory=8 << 20, max_num_seqs=16),
        tokenizer=harmony if name == "harmony" else tokenizer,
    )
    tool = {"type": "function", "function": {"name": "add", "strict": True, "parameters": STRICT}}
    with running(engine, chat_template=template, max_prompt_characters=1 << 20) as client:
        for seed in range(3):
            fields = {"max_reasoning_tokens": budget, "tool_choice": "required", "parallel_tool_calls": False}
            answer = client.chat("x", tools=[tool], seed=seed, **fields).json
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "tool_calls", answer
            (call,) = choice["message"]["tool_calls"]
            assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
            spent = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert spent == budget + len("\n</think>") if name == "think" else spent <= budget + len("analysis") + 5
