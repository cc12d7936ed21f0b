"""Reading answers: for every format the calls of dialog_goldens, in every split, and what is broken or hostile."""

from __future__ import annotations

import json
import time

import pytest
from dialog_goldens import CALLS, OPTIONS, TEXTS, conversation, format_of, joined, read
from hypothesis import assume, given
from hypothesis import strategies as st

from minifloat.serve.dialog.conversation import Thinking, ToolChoice
from minifloat.serve.dialog.events import CallArguments, CallBegins
from minifloat.serve.dialog.formats import NAMES
from minifloat.serve.dialog.parser import AnswerParser

_DSML = '<*tool_calls>\n<*invoke name="get_time"/>\n</*tool_calls>'
_ALL = [(name, kind) for name in NAMES for kind in CALLS]


def with_thinking(name: str, text: str) -> str:
    if name == "harmony":
        return f"<|channel|>analysis<|message|>I see.<|end|><|start|>assistant{text}"
    return f"<think>\nI see.\n</think>\n\n{text}"


@pytest.mark.parametrize(("name", "kind"), _ALL)
def test_calls_are_read(name: str, kind: str) -> None:
    answer = read(format_of(name), conversation(), [TEXTS[name][kind]])
    assert answer.decoded == CALLS[kind]
    assert all(ended for _, _, ended in answer.calls)
    assert (answer.text, answer.thinking) == ("", "")


@pytest.mark.parametrize(("name", "kind"), _ALL)
def test_every_split_gives_the_same_answer(name: str, kind: str) -> None:
    text = with_thinking(name, TEXTS[name][kind])
    whole = read(format_of(name), conversation(), [text])
    assert (whole.thinking, whole.decoded) == ("I see.", CALLS[kind])
    assert read(format_of(name), conversation(), list(text)) == whole
    for place in range(1, len(text)):
        assert read(format_of(name), conversation(), [text[:place], text[place:]]) == whole


def test_every_format_has_its_dialogs() -> None:
    assert set(TEXTS) == set(NAMES)
    assert len(NAMES) >= 14


@pytest.mark.parametrize("name", [name for name in NAMES if format_of(name).begin])
def test_text_around_calls_is_kept(name: str) -> None:
    form = format_of(name)
    begin = "" if form.begin[0] in TEXTS[name]["two"] else form.begin[0]
    answer = read(form, conversation(), [f"Let me see.\n\n{begin}{TEXTS[name]['two']}\n And then? "])
    assert (answer.text, answer.decoded) == ("Let me see.\n\n\n And then?", CALLS["two"])


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_off_is_what_was_said(name: str) -> None:
    text = TEXTS[name]["rich"]
    whole = read(format_of(name), conversation(), [text])
    lengths = []
    for place in range(len(text)):
        answer = read(format_of(name), conversation(), [text[:place]])
        if answer.calls:
            tool, arguments, _ = answer.calls[0]
            assert tool == "write_file"
            assert whole.calls[0][1].startswith(arguments)
            assert answer.text == ""
            lengths.append(len(arguments))
        else:
            assert name == "harmony" or answer.text == text[:place]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 30, "arguments come in pieces"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", CALLS)
def test_calls_of_unknown_tools_are_text(name: str, kind: str) -> None:
    form, text = format_of(name), TEXTS[name][kind]
    answer = read(
        form, conversation(tools=conversation().tools[2:] if kind != "rich" else conversation().tools[:2]), [text]
    )
    assert answer.calls == ()
    if not form.channels:
        assert answer.text == text


@pytest.mark.parametrize("name", NAMES)
def test_no_tool_is_called_if_none_may_be(name: str) -> None:
    asked = conversation(choice=ToolChoice("none"))
    answer = read(format_of(name), asked, [with_thinking(name, TEXTS[name]["one"])])
    assert (answer.thinking, answer.calls) == ("I see.", ())
    assert "São Paulo" in answer.text


def test_without_tools_and_thinking_pieces_pass_as_they_are() -> None:
    parser = AnswerParser(format_of("hermes", None), conversation(tools=()), "")
    pieces = ["  <tool", "_call>\n", " <think>"]
    assert [event for piece in pieces for event in parser.add(piece)] == [*map(_text, pieces)]
    assert parser.add("") == parser.finish() == []


def _text(piece: str) -> object:
    from minifloat.serve.dialog.events import AnswerText

    return AnswerText(piece)


@pytest.mark.parametrize(
    ("prompt_end", "text", "thinking", "answer"),
    [
        ("<|im_start|>assistant\n", "\n<think>\nWhy\n\n</think>\n\nBecause \n", "Why", "Because \n"),
        ("assistant\n<think>\n", "Why</think>Because", "Why", "Because"),
        ("assistant\n<think>", "Why", "Why", ""),
        ("<think>\n\n</think>\n\n", " Because", "", " Because"),
        ("<think> in a question\nassistant\n", "Because", "", "Because"),
        ("", "The tag <think> opens</think>", "", "The tag <think> opens</think>"),
        ("", "<thin</think>", "", "<thin</think>"),
        ("", "<think>a</think><think>b</think>c", "a\nb", "c"),
        ("", "<think></thin </thinking></think>", "</thin </thinking>", ""),
    ],
)
@pytest.mark.parametrize("tools", [True, False])
def test_thinking_is_told_apart(prompt_end: str, text: str, thinking: str, answer: str, tools: bool) -> None:
    form, asked = format_of("hermes"), conversation() if tools else conversation(tools=())
    for pieces in ([text], list(text)):
        read_answer = read(form, asked, pieces, prompt_end)
        assert (read_answer.thinking, read_answer.text) == (thinking, answer)


def test_thinking_that_is_not_told_apart_is_text_with_its_markers() -> None:
    asked = conversation(thinking=Thinking(separate=False))
    call = TEXTS["hermes"]["one"]
    answer = read(format_of("hermes"), asked, [f"<think>\n{call}</think>\n{call}"])
    assert answer.text == f"<think>\n{call}</think>"
    assert answer.decoded == CALLS["one"]


def test_an_answer_that_continues_may_go_on_with_its_thinking() -> None:
    answer = read(format_of("hermes"), conversation(continues=True), ["so.</think>Yes"], "<think>\nI think ")
    assert (answer.thinking, answer.text) == ("so.", "Yes")


@pytest.mark.parametrize(
    ("name", "text", "calls", "answer"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "get_time"}</tool_call>', 1, ""),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "{\\"a\\": [1]}"}</tool_call>', 1, ""),
        ("hermes", '<tool_call>{"id": 7, "name": "get_time", "arguments": null}</tool_call>', 1, ""),
        ("hermes", '<tool_call>{"name": "get_time"}', 1, ""),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": [1]}</tool_call>', 0, None),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": "no"}</tool_call>', 0, None),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>', 0, None),
        ("hermes", "<tool_call>get_time()</tool_call>", 0, None),
        ("hermes", '<tool_call>{"name": "get_time", }', 0, None),
        ("hermes", "<tool_call><tool_call>" + '{"name": "get_time"}</tool_call>', 1, "<tool_call>"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": 01}}', 1, "01}}"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": NaN}}', 1, "NaN}}"),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": "\\d"}}', 1, '\\d"}}'),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": {"a": 1,}}', 1, "}}"),
        ("llama3", '{"name": "get_time"}', 0, None),
        ("llama3", '{"name": "Bob", "parameters": {}}', 0, None),
        ("llama3", '{"answer": [1, 2]}', 0, None),
        ("llama3", '<|python_tag|>get_time.call(zone="a\\u0041")', 1, ""),
        ("llama3", "<|python_tag|>print(1)", 0, None),
        ("llama4", "[1, 2]", 0, None),
        ("llama4", '{"name": "get_time", "parameters": {}}', 1, ""),
        ("llama4", "[get_time(1)]", 0, None),
        ("llama4", "[get_time(), nothing()] so", 1, "nothing()] so"),
        ("mistral", '[TOOL_CALLS]get_time[CALL_ID]abc[ARGS]{"a": 1}', 1, ""),
        ("mistral", '[TOOL_CALLS]get_time{"a": 1}', 1, ""),
        ("kimi-k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>So", 0, "So"),
        ("deepseek-v4", _DSML.replace("*", "｜DSML｜"), 1, ""),  # noqa: RUF001
        ("glm", "<tool_call>get_time</tool_call>", 1, ""),
        ("glm", "<tool_call>get_time<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", 1, ""),
        ("qwen3-coder", "<function=get_time>\n</function>", 1, ""),
        ("qwen3-coder", "<function=get_time>\n</functions>", 0, None),
        ("harmony", "Just text", 0, "Just text"),
        ("harmony", "<|channel|>final<|message|>Yes.<|return|>", 0, "Yes."),
        ("harmony", "<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|message|> x", 0, "So: x"),
        ("harmony", "<|channel|>commentary to=python<|message|>1+1<|call|>", 0, "1+1"),
        ("harmony", "<|channel|>commentary to=functions.get_time<|message|>none<|call|>", 0, "none"),
    ],
)  # fmt: skip
def test_forms_that_models_also_write_and_what_only_looks_like_a_call(
    name: str, text: str, calls: int, answer: str | None
) -> None:
    for pieces in ([text], list(text)):
        found = read(format_of(name), conversation(), pieces)
        assert len(found.calls) == calls
        assert found.text == (text if answer is None else answer)
        assert all(name == "get_time" for name, _, _ in found.calls)


def test_the_id_that_a_model_writes_is_kept() -> None:
    texts = {"kimi-k2": TEXTS["kimi-k2"]["one"], "mistral": "[TOOL_CALLS]get_time[CALL_ID]abcdefghi[ARGS]{}"}
    found = {}
    for name, text in texts.items():
        events = AnswerParser(format_of(name), conversation(), "").add(text)
        found[name] = next(event.id for event in events if isinstance(event, CallBegins))
    assert found == {"kimi-k2": "functions.get_weather:0", "mistral": "abcdefghi"}


@pytest.mark.parametrize("name", ["qwen3-coder", "kimi-k2"])
def test_a_call_ends_thinking_that_was_not_closed(name: str) -> None:
    answer = read(format_of(name), conversation(), ["Hm\n" + TEXTS[name]["two"]], "<think>")
    assert (answer.thinking, answer.decoded) == ("Hm", CALLS["two"])
    begin = format_of(name).begin[0]
    answer = read(format_of(name), conversation(), [f"Not {begin} yet</think>Yes"], "<think>")
    assert (answer.thinking, answer.text) == (f"Not {begin} yet", "Yes")


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "glm-4.7", "minimax-m2", "seed-oss"])
@pytest.mark.parametrize(
    "value", ["</parameter>", "a</arg_value>b", "<parameter=x>", " </parameter> and\n\n", "</tool_call>", ""]
)
def test_values_may_hold_markers(name: str, value: str) -> None:
    text = TEXTS[name]["rich"].replace(CALLS["rich"][0][1]["content"], value)
    answer = read(format_of(name), conversation(), list(text))
    assert answer.decoded[0][1]["content"] == value


def test_values_take_the_types_of_the_schema() -> None:
    from minifloat.serve.dialog.conversation import Tool

    properties = {
        "zip": {"type": "string"}, "either": {"type": ["string", "null"]}, "number": {"type": "number"},
        "choice": {"enum": ["1", "2"]}, "named": {"$ref": "#/$defs/Text"}, "loop": {"$ref": "#/properties/loop"},
        "any": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "flag": {"type": "boolean"}, "odd": 7,
    }  # fmt: skip
    tool = Tool("f", parameters={"properties": properties, "$defs": {"Text": {"type": "string"}}})
    given = {
        "zip": "02139", "either": "null", "number": "1e3", "choice": "1", "named": "true", "loop": "{}", "any": "12",
        "flag": "True", "odd": "x", "new": "[1]", "huge": "1" * 5000, "nan": "NaN",
    }  # fmt: skip
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    text = f"<tool_call>\n<function=f>\n{lines}</function>\n</tool_call>"
    expected: dict[str, object] = given | {
        "either": None,
        "number": 1000,
        "loop": {},
        "any": 12,
        "flag": True,
        "new": [1],
    }
    assert read(format_of("qwen3-coder"), conversation(tools=(tool,)), [text]).decoded == [("f", expected)]


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), _JSON, max_size=4), st.booleans(), st.integers(1, 9))
def test_argument_pieces_parse_to_the_whole(arguments: dict[str, object], ascii_only: bool, step: int) -> None:
    text = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>{{"name": "get_time", "arguments": {text}}}</tool_call>'
    parser = AnswerParser(format_of("hermes"), conversation(), "")
    events = [event for at in range(0, len(text), step) for event in parser.add(text[at : at + step])]
    answer = joined(events + parser.finish())
    assert answer.decoded == [("get_time", arguments)]
    assert all(event.text for event in events if isinstance(event, CallArguments))


@given(st.sampled_from(NAMES), st.data())
def test_mixtures_of_markers_read_the_same_in_every_split(name: str, data: st.DataObject) -> None:
    form = format_of(name)
    parts = [
        *form.literals(),
        *(TEXTS[name].values()),
        "get_time",
        '"',
        "{",
        "}",
        "[",
        "]",
        "\\",
        ":",
        "=",
        ",",
        " ",
        "\n",
        "1",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read(form, conversation(), [text])
    assert read(form, conversation(), pieces) == whole
    for _, arguments, ended in whole.calls:
        assert not ended or isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_hostile_text_takes_linear_time(name: str, size: int) -> None:
    form, length = format_of(name), 1 << (11 if size == 1 else 17)
    begin = (form.begin or ("<|start|>",))[0]
    start = TEXTS[name]["rich"].partition("content")[0]
    parts = ["{", "[1,", begin[:-1], begin, start, '\\"', "\\n", " ", "<", "</", "1", "\x01", "'"]
    for part in parts:
        for prefix in ("", start + 'content": "' if form.arguments != "elements" else start):
            text = prefix + part * (length // len(part))
            began = time.process_time()
            read(form, conversation(), [text[at : at + size] for at in range(0, len(text), size)])
            assert time.process_time() - began < 1, (prefix, part)


@given(st.sampled_from(NAMES), st.text(), st.integers(1, 7))
def test_any_text_is_read_as_it_was_written(name: str, content: str, step: int) -> None:
    form = format_of(name)
    ends = (form.elements.close if form.elements else "", form.quote)
    assume(not any(end and end in f"\n{content}\n" for end in ends))
    before, after = TEXTS[name]["rich"].split("print", 1)[0], TEXTS[name]["rich"].rsplit("</b>", 1)[1]
    if form.arguments in ("python", "object", "json"):
        before, after = before[: before.rfind("content") + len("content")], after[1:]
        before += "=" if form.arguments == "python" else '": '
        text = before + (repr(content) if form.arguments == "python" else json.dumps(content)) + after
    else:
        text = before + content + after
    answer = read(form, conversation(), [text[at : at + step] for at in range(0, len(text), step)])
    assert answer.decoded == [("write_file", {"content": content, "options": OPTIONS})]
    assert answer.calls[0][2]
