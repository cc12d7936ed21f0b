"""Conversations put together from items, as the newer APIs send them."""

from __future__ import annotations

import pytest

from minifloat.serve.dialog.history import History, UnknownCall


def call(id: str) -> dict[str, object]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": {}}}


def test_what_an_assistant_does_between_results_is_one_message() -> None:
    history = History()
    history.user("a")
    history.user("b")
    history.think("hm")
    history.say("I call")
    history.call("1", "f", {})
    history.say("twice")
    history.call("2", "f", {})
    history.result("1", "x")
    history.result("2", "y")
    history.say("done")
    assert history.messages() == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I call\ntwice",
            "reasoning_content": "hm",
            "tool_calls": [call("1"), call("2")],
        },
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "name": "f", "content": "y"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ("s1 s2 u", ["system: s1\ns2", "user: u"]),
        ("s1 u s2 a", ["system: s1", "user: u\ns2", "assistant: a"]),
        ("u a s1 u2", ["user: u", "assistant: a", "user: s1\nu2"]),
        ("u a s1 s2", ["user: u", "assistant: a", "user: s1\ns2"]),
        ("u a s1 a2", ["user: u", "assistant: a", "user: s1", "assistant: a2"]),
        ("u c s1 r", ["user: u", "assistant: ", "tool: r\ns1"]),
        ("u c r s1 a", ["user: u", "assistant: ", "tool: r\ns1", "assistant: a"]),
    ],
)
def test_a_later_system_message_joins_a_neighbour(steps: str, expected: list[str]) -> None:
    history = History()
    for step in steps.split():
        add = {"s": history.system, "u": history.user, "a": history.say}
        if step == "c":
            history.call("1", "f", {})
        elif step == "r":
            history.result("1", "r")
        else:
            add[step[0]](step)
    assert [f"{message['role']}: {message['content']}" for message in history.messages()] == expected


def test_the_prompt_of_a_turn_begins_with_that_of_the_turn_before() -> None:
    history = History()
    for number in range(3):
        history.user(f"u{number}")
        history.system(f"s{number}")
        before = history.messages()
        history.say(f"a{number}")
        assert history.messages()[: len(before)] == before


def test_a_result_needs_its_call() -> None:
    with pytest.raises(UnknownCall):
        History().result("1", "x")
