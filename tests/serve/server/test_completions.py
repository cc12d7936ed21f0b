"""The two routes that generate, through a real socket, with an engine that repeats its prompt."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine
from serving import MODEL, Client, running

from minifloat.engine import TokenLogprob
from minifloat.serve.api.completions import EchoedPrompt, completion_logprobs, prompt_logprobs


def test_a_completion_has_the_fields_of_openais_api(client: Client) -> None:
    answer = client.complete("abc", max_tokens=5)
    assert answer.status == 200
    body = answer.json
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert body["choices"] == [
        {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "xyz"], ["aba", "xyz"]),
        ([0, 1], None),
        ([[0, 1, 2], [3]], None),
    ],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
def test_a_prompt_is_a_text_or_tokens_or_a_list_of_either(client: Client, prompt: Any, texts: list[str] | None) -> None:
    if texts is None:
        lists = prompt if isinstance(prompt[0], list) else [prompt]
        texts = [
            client.post("/detokenize", {"tokens": [tokens[i % len(tokens)] for i in range(3)]}).json["prompt"]
            for tokens in lists
        ]
    body = client.complete(prompt, max_tokens=3).json
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))


def test_n_answers_to_each_prompt_share_its_tokens_in_the_usage(client: Client) -> None:
    body = client.complete(["ab", "wxyz"], n=3, max_tokens=2, seed=5).json
    assert [choice["text"] for choice in body["choices"]] == ["ab"] * 3 + ["wx"] * 3
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 12)


def test_each_choice_of_a_prompt_has_its_own_reproducible_seed(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer)
    with running(engine) as client:
        for _ in range(2):
            assert client.complete(n=3, seed=2**63 - 1, max_tokens=1).status == 200
        assert client.complete(n=2, max_tokens=1).status == 200
    seeds = [request.params.seed for request in engine.requests]
    assert len(set(seeds[:3])) == 3
    assert seeds[:3] == seeds[3:6]
    assert seeds[6:] == [None, None]


def test_echo_begins_with_the_prompt_streamed_or_not(client: Client) -> None:
    assert client.complete("abc", echo=True, max_tokens=2).json["choices"][0]["text"] == "abcab"
    events = client.complete("abc", echo=True, max_tokens=2, stream=True).events
    assert "".join(event["choices"][0]["text"] for event in events) == "abcab"


def test_a_stream_has_the_same_text_and_ends_with_the_usage_if_requested(client: Client) -> None:
    answer = client.complete("abc", max_tokens=7, stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, last = answer.events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcabca"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 7
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1


def test_a_stream_without_usage_does_not_mention_it(client: Client) -> None:
    assert all("usage" not in event for event in client.complete(max_tokens=2, stream=True).events)


def test_streamed_choices_are_told_apart_by_their_index(client: Client) -> None:
    texts = dict.fromkeys(range(4), "")
    for event in client.complete(["ab", "xy"], n=2, max_tokens=5, stream=True).events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "ababa", 1: "ababa", 2: "xyxyx", 3: "xyxyx"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it_and_is_named(client: Client, stream: bool) -> None:
    answer = client.complete("hello world. ", stop=["rld", "xx"], max_tokens=50, stream=stream)
    pieces = answer.events if stream else [answer.json]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "hello wo"
    assert (pieces[-1]["choices"][0]["finish_reason"], pieces[-1]["choices"][0]["stop_reason"]) == ("stop", "rld")


def test_log_probabilities_are_parallel_lists_with_offsets(client: Client) -> None:
    logprobs = client.complete("abc", max_tokens=3, logprobs=2).json["choices"][0]["logprobs"]
    assert {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")} == {3}
    assert logprobs["text_offset"] == [0, 1, 2]
    streamed = client.complete("abc", max_tokens=3, logprobs=2, stream=True).events
    offsets = [offset for event in streamed for offset in event["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == [0, 1, 2]


def test_log_probabilities_begin_with_those_of_the_prompt_where_it_is_echoed(client: Client) -> None:
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 2}
    (choice,) = client.complete("abc", **fields).json["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abcab"
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert [list(top.values()) for top in logprobs["top_logprobs"][1:]] == [[-0.5]] * 4
    assert len(logprobs["tokens"]) == 5
    assert logprobs["tokens"][0] == "a"
    streamed = client.complete("abc", **fields, stream=True).events
    texts = [event["choices"][0]["text"] for event in streamed]
    assert texts[0].startswith("abca")  # a slow reader gets the next token with it
    assert "".join(texts) == "abcab"
    for name, whole in logprobs.items():
        assert [value for event in streamed for value in event["choices"][0]["logprobs"][name]] == whole


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_max_tokens_0_returns_the_prompt_alone(client: Client, stream: bool) -> None:
    fields = {"echo": True, "max_tokens": 0, "stream": stream}
    answer = client.complete(["abc", "x"], logprobs=1, **fields)
    choices = [choice for piece in (answer.events if stream else [answer.json]) for choice in piece["choices"]]
    assert sorted((choice["index"], choice["text"], choice["finish_reason"]) for choice in choices) == [
        (0, "abc", "length"),
        (1, "x", "length"),
    ]
    assert sorted(len(choice["logprobs"]["tokens"]) for choice in choices) == [1, 3]
    plain = client.complete("abc", **fields)
    pieces = plain.events if stream else [plain.json]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == "abc"
    assert pieces[-1]["choices"][0]["finish_reason"] == "length"
    if not stream:
        assert answer.json["usage"]["completion_tokens"] == plain.json["usage"]["completion_tokens"] == 0


def test_every_choice_of_a_prompt_has_the_log_probabilities_of_the_prompt(client: Client) -> None:
    choices = client.complete([[1, 2, 3], [4]], n=2, echo=True, logprobs=0, max_tokens=1).json["choices"]
    assert [len(choice["logprobs"]["token_logprobs"]) for choice in choices] == [4, 4, 2, 2]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in choices] == [None] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_may_name_tokens_by_their_ids(client: Client, stream: bool) -> None:
    fields = {"echo": True, "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True, "stream": stream}
    answer = client.complete([7, 8, 9], **fields)
    pieces = answer.events if stream else [answer.json]
    found = [piece["choices"][0]["logprobs"] for piece in pieces if piece["choices"]]
    names = [name for logprobs in found if logprobs for name in logprobs["tokens"]]
    assert names[:3] == ["token_id:7", "token_id:8", "token_id:9"]
    assert len(names) == 5
    tops = [top for logprobs in found if logprobs for top in logprobs["top_logprobs"]]
    assert tops[0] is None
    assert all(name in top for name, top in zip(names[1:], tops[1:], strict=True))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens_of_prompts_and_answers_are_returned_as_in_vllm(tokenizer: Any, stream: bool) -> None:
    def join(choices: list[Any], index: int) -> tuple[Any, list[int]]:
        own = [choice for choice in choices if choice["index"] == index]
        prompts = [choice["prompt_token_ids"] for choice in own if "prompt_token_ids" in choice]
        return prompts, [token for choice in own for token in choice.get("token_ids", ())]

    fields = {"max_tokens": 2, "n": 2, "return_token_ids": True, "stream": stream}
    engine = FakeEngine(tokenizer, says=lambda request: tokenizer("<think>xy</think>z").input_ids)
    engine.tokenizer.chat_template, template = "{{ '<think>' }}", engine.tokenizer.chat_template
    try:
        with running(engine) as client:
            answer = client.chat(**fields | {"max_tokens": 17}, include_reasoning=False)
            bodies = answer.events if stream else [answer.json]
            prompts = [body["prompt_token_ids"] for body in bodies if "prompt_token_ids" in body]
            assert prompts == [tokenizer("<think>").input_ids] * (2 if stream else 1)
            choices = [choice for body in bodies for choice in body["choices"]]
            for index in range(2):
                assert join(choices, index)[1] == tokenizer("<think>xy</think>z").input_ids[:17]
            engine.says = lambda request: None
            for echo in (False, True):
                answer = client.complete(["ab", "xyz"], **fields, echo=echo)
                choices = [c for body in (answer.events if stream else [answer.json]) for c in body["choices"]]
                for index, prompt in enumerate(["ab", "ab", "xyz", "xyz"]):
                    tokens = tokenizer(prompt).input_ids
                    assert join(choices, index) == ([tokens], tokens[:2])
    finally:
        tokenizer.chat_template = template


def test_max_tokens_0_without_echo_is_refused(client: Client) -> None:
    answer = client.complete("abc", max_tokens=0)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens")
    assert "echo" in answer.error["message"]
    assert client.chat("abc", max_tokens=0).status == 400


def test_the_largest_top_logprob_of_a_text_is_that_of_its_most_probable_token() -> None:
    """Parts of characters have the same text; lm-evaluation-harness compares a token's value with the largest."""
    likely, other = (TokenLogprob(token, "\ufffd", b"\x80", logprob) for token, logprob in ((1, -0.1), (2, -3.0)))
    (top,) = completion_logprobs([replace(other, top=(likely,))], 0).top_logprobs
    assert top == {"\ufffd": -0.1}
    (top,) = completion_logprobs([replace(likely, top=(likely,))], 0).top_logprobs
    assert top == {"\ufffd": -0.1}


def test_a_first_token_added_by_the_tokenizer_takes_no_characters_of_the_text() -> None:
    following = [TokenLogprob(token, text, text.encode(), -1.0) for token, text in ((1, "ab"), (2, "c"))]
    logprobs = prompt_logprobs(EchoedPrompt("abc", "<s>"), [None, *following])
    assert (logprobs.tokens, logprobs.text_offset) == (["<s>", "ab", "c"], [0, 0, 2])
    logprobs = prompt_logprobs(EchoedPrompt("<s>abc", "<s>"), [None, *following])
    assert (logprobs.tokens, logprobs.text_offset) == (["<s>", "ab", "c"], [0, 3, 5])


def test_a_chat_answer_has_the_fields_of_openais_api(client: Client) -> None:
    body = client.chat("hi", max_tokens=5).json
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "user", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)


def test_a_chat_stream_begins_with_the_role_and_ends_with_a_reason(client: Client) -> None:
    first, *rest = client.chat("hi", max_tokens=5, stream=True).events
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in rest) == "user"
    assert [event["choices"][0]["finish_reason"] for event in rest][-1] == "length"


def test_chat_log_probabilities_name_bytes_and_alternatives(client: Client) -> None:
    logprobs = client.chat("hi", max_tokens=2, logprobs=True, top_logprobs=3).json["choices"][0]["logprobs"]
    assert len(logprobs["content"]) == 2
    one = logprobs["content"][0]
    assert set(one) == {"token", "logprob", "bytes", "top_logprobs"}
    assert len(one["top_logprobs"]) == 3
    assert bytes(one["bytes"]).decode() == one["token"]


def test_messages_go_through_the_template_with_parts_and_developers(client: Client) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    tokens = client.post("/tokenize", {"messages": messages}).json["tokens"]
    text = client.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert text == "<s>system: be brief</s>user: ab</s>assistant: "


def test_control_tokens_in_a_message_are_plain_text(client: Client) -> None:
    def tokens(content: str) -> list[int]:
        answer = client.post("/tokenize", {"messages": [{"role": "user", "content": content}]})
        return list(answer.json["tokens"])

    end = client.post("/tokenize", {"prompt": "</s>"}).json["tokens"]
    assert len(end) == 1
    assert tokens("a</s>b").count(end[0]) == tokens("ab").count(end[0]) == 1


def test_max_completion_tokens_is_max_tokens(client: Client) -> None:
    assert client.chat(max_completion_tokens=3).json["usage"]["completion_tokens"] == 3
    refused = client.chat(max_completion_tokens=3, max_tokens=4)
    assert (refused.status, refused.error["param"]) == (400, "max_completion_tokens")


def test_enable_thinking_reaches_the_template(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer)
    with running(engine) as client:
        assert client.chat("x", max_tokens=1, chat_template_kwargs={"enable_thinking": False}).status == 200
    assert "[thinking False]" in tokenizer.decode(engine.requests[0].prompt)


def test_sampling_defaults_come_from_the_generation_config(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer, defaults={"temperature": 0.6, "top_k": 20})
    with running(engine) as client:
        assert client.complete(max_tokens=1).status == 200
        assert client.complete(max_tokens=1, temperature=0, top_k=-1, min_p=0.1).status == 200
    defaults, stated = (request.params for request in engine.requests)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 20, 1.0)
    assert (stated.temperature, stated.top_k, stated.min_p) == (0.0, 0, 0.1)


def test_every_sampling_field_reaches_the_engine(tokenizer: Any) -> None:
    engine = FakeEngine(tokenizer)
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "logprobs": 3,
    }
    with running(engine) as client:
        other = {"stop": "zz", "include_stop_str_in_output": True, "logit_bias": {"5": -1.5}, "cache_salt": "s"}
        other |= {"priority": -3, "bad_words": ["ab", " c"]}
        assert client.complete(**fields, **other).status == 200
    (request,) = engine.requests
    for name, value in fields.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(request.params, name) == expected, name
    assert (request.params.stop, request.params.include_stop) == (("zz",), True)
    assert dict(request.params.logit_bias) == {5: -1.5}
    assert request.priority == -3
    assert request.params.forbidden == tuple(tuple(tokenizer(word).input_ids) for word in ("ab", "c"))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"best_of": 2}, "best_of", "not supported"),
        ({"functions": []}, "functions", "tools"),
        ({"colour": "red"}, "colour", "unknown field"),
        ({"n": 0}, "n", "greater"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"stream": True, "stream_options": {"when": 1}}, "stream_options.when", "unknown field"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "287"),
        ({"stop": [""]}, "stop", "characters"),
        ({"bad_words": [""]}, "bad_words", "characters"),
        ({"bad_words": [" "]}, "bad_words", "no tokens"),
        ({"priority": 0.5}, "priority", "integer"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens", "max_tokens"),
        ({"model": 3}, "model", "string"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_an_invalid_field_is_a_400_that_names_the_field(
    client: Client, route: str, fields: dict[str, Any], param: str, word: str
) -> None:
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in route else {"prompt": "x"}
    answer = client.post(route, {"model": MODEL} | prompt | fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert answer.error["type"] == "invalid_request_error"
    assert word in answer.error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000])
def test_a_body_that_is_no_json_object_is_a_400(client: Client, body: bytes) -> None:
    answer = client.post("/v1/completions", body)
    assert answer.status == 400, answer.body
    assert answer.error["type"] == "invalid_request_error"


def test_a_missing_field_is_named(client: Client) -> None:
    assert client.post("/v1/completions", {"model": MODEL}).error["param"] == "prompt"
    assert client.post("/v1/chat/completions", {"messages": []}).error["param"] == "model"


def test_a_prompt_longer_than_the_context_is_refused(client: Client) -> None:
    answer = client.complete("x" * 512)
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert client.complete("x" * 511, max_tokens=1).status == 200


def test_an_answer_longer_than_the_context_is_refused_with_what_is_left(client: Client) -> None:
    for answer in (client.complete("x" * 500, max_tokens=13), client.chat("x" * 400, max_completion_tokens=500)):
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == "max_tokens"
    refused = client.complete("x" * 500, max_tokens=13).error["message"]
    assert "500 tokens of the prompt and 13 of the answer do not fit the context of 512; ask for at most 12" in refused
    assert client.complete("x" * 500, max_tokens=12, ignore_eos=True).json["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("of_chat", [False, True])
def test_log_probabilities_of_all_answers_together_are_bounded(
    client: Client, monkeypatch: pytest.MonkeyPatch, of_chat: bool, stream: bool
) -> None:
    monkeypatch.setattr("minifloat.serve.api.sampling.MAX_LOGPROBS", 24)
    of_each: dict[str, Any] = {"logprobs": True, "top_logprobs": 1} if of_chat else {"logprobs": 1}
    ask = functools.partial(client.chat if of_chat else client.complete, n=2, ignore_eos=True, stream=stream, **of_each)
    answer = ask(max_tokens=None)
    pieces = answer.events if stream else [answer.json]
    choices = [choice for piece in pieces for choice in piece["choices"] if choice["logprobs"]]
    assert sum(len(choice["logprobs"]["content" if of_chat else "tokens"]) for choice in choices) == 12
    refused = ask(max_tokens=7)
    assert (refused.status, refused.error["param"]) == (400, "max_tokens")
    assert "2 answers may have 6 tokens each" in refused.error["message"]
    assert ask(max_tokens=6).status == 200


def test_an_answer_with_log_probabilities_or_tokens_has_no_other_field_more(client: Client) -> None:
    (plain,), (scored,), (with_ids,) = (
        client.chat("hi", max_tokens=2, **fields).json["choices"]
        for fields in ({}, {"logprobs": True}, {"return_token_ids": True})
    )
    assert scored.keys() == plain.keys() == with_ids.keys() - {"token_ids"}
    assert scored["message"] == plain["message"] == with_ids["message"]


def test_a_completion_without_max_tokens_has_16_and_a_chat_goes_to_the_end_of_the_context(client: Client) -> None:
    assert client.complete("abc", ignore_eos=True).json["usage"]["completion_tokens"] == 16
    assert client.complete("x" * 505, ignore_eos=True).json["usage"]["completion_tokens"] == 7
    assert client.complete("x" * 480, max_tokens=None, ignore_eos=True).json["usage"]["completion_tokens"] == 32
    usage = client.chat("abc", ignore_eos=True).json["usage"]
    assert usage["total_tokens"] == 512


def test_a_chat_without_a_template_is_refused_with_the_option_to_use(llama_folder: Any) -> None:
    from minifloat.model.runtime.tokenizer import load_tokenizer

    with running(FakeEngine(load_tokenizer(llama_folder))) as client:
        answer = client.chat("x")
        assert (answer.status, answer.error["param"]) == (400, "messages")
        assert "--chat-template" in answer.error["message"]
    with running(FakeEngine(load_tokenizer(llama_folder)), chat_template="{{ messages[0].content }}") as client:
        assert client.chat("x", max_tokens=2).json["choices"][0]["message"]["content"] == "xx"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_beyond_the_time_limit_ends_with_a_timeout_error(tokenizer: Any, stream: bool) -> None:
    with running(FakeEngine(tokenizer, seconds=0.01), request_timeout=0.2) as client:
        answer = client.complete(max_tokens=500, stream=stream)
        if stream:
            assert answer.status == 200
            assert answer.events[-1]["error"]["code"] == "timeout"
        else:
            assert (answer.status, answer.error["code"]) == (504, "timeout")
        assert client.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_fails_on_is_a_500(tokenizer: Any, stream: bool) -> None:
    engine = FakeEngine(tokenizer, fails=lambda request: "kernel exploded" if request.params.seed == 13 else None)
    with running(engine) as client:
        answer = client.complete(n=1, seed=13, stream=stream)
        error = answer.events[-1]["error"] if stream else answer.error
        assert answer.status == (200 if stream else 500)
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
        assert client.complete(n=4, seed=10, max_tokens=3, stream=stream).status == (200 if stream else 500)
        assert client.complete(n=3, seed=10, max_tokens=3).status == 200
        assert client.idle()
