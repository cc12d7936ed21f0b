"""Grammars of answers: every format's calls are accepted, arguments that violate a schema are not."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from dialog_goldens import CALLS, TEXTS, TOOLS, conversation, format_of, read
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from minifloat.engine import Grammar
from minifloat.engine.grammar import GrammarLimits
from minifloat.errors import UsageError
from minifloat.serve.dialog.conversation import Conversation, Thinking, Tool, ToolChoice
from minifloat.serve.dialog.formats import NAMES, DialogFormat, find_format
from minifloat.serve.dialog.grammar import call_grammar

REQUIRED, NONE = ToolChoice("required"), ToolChoice("none")
#: As the engine computes them.
LIMITS = llguidance.LLParserLimits(verbose_errors=False, **GrammarLimits().parser)
STRICT = tuple(replace(tool, strict=True) for tool in TOOLS)
#: A tool with what schemas of real tools have.
PLAN = Tool(
    "plan",
    strict=True,
    parameters={
        "$defs": {
            "Step": {
                "type": "object",
                "properties": {"unit": {"enum": ["c", "f", None]}, "size": {"type": "number", "minimum": 0}},
                "required": ["unit"],
                "additionalProperties": False,
            },
            "Name": {"type": "string", "minLength": 1, "maxLength": 4},
        },
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "minItems": 1, "maxItems": 2},
            "name": {"allOf": [{"$ref": "#/$defs/Name"}], "description": "short"},
            "note": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "either": {"type": ["string", "null"], "maxLength": 2},
            "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
            "flag": {"type": "boolean"},
        },
        "required": ["steps", "name", "note", "counts", "flag"],
        "additionalProperties": False,
    },
)


class Tokens:
    """A tokenizer with one token per byte, and some texts that are single tokens."""

    def __init__(self, *single: str) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        self.backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", *single)])
        self.added = {text: self.backend.token_to_id(text) for text in single}
        self.end = self.backend.token_to_id("<eos>")
        self.closers = {self.end, *self.added.values(), *(self.backend.encode("\"'<}])", add_special_tokens=False).ids)}
        self.of_llguidance = llguidance.LLTokenizer(self.backend.to_str(), eos_token=self.end)

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Return whether a whole text follows a grammar."""
        tokens = self.backend.encode(text, add_special_tokens=False).ids
        return self.taken(grammar, tokens) == len(tokens) + 1

    def taken(self, grammar: Grammar, tokens: list[int]) -> int:
        """Return how many tokens follow a grammar, the end of the text included."""
        matcher = llguidance.LLMatcher(self.of_llguidance, grammar.source, log_level=0, limits=LIMITS)
        assert not matcher.is_error(), matcher.get_error()
        taken = matcher.try_consume_tokens(tokens)
        assert not matcher.is_error(), matcher.get_error()
        return int(taken) + int(taken == len(tokens) and matcher.is_accepting())

    def written(self, grammar: Grammar, random: Random) -> str:
        """Return a random text that follows a grammar."""
        matcher = llguidance.LLMatcher(self.of_llguidance, grammar.source, log_level=0, limits=LIMITS)
        tokens: list[int] = []
        while not matcher.is_stopped():
            assert len(tokens) < 5000
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            likely = [token for token in allowed if token in self.closers]
            token = random.choice(likely if likely and random.random() < 0.3 else allowed)
            assert matcher.try_consume_tokens([token]) == 1
            tokens.append(token)
        return str(self.backend.decode(tokens, skip_special_tokens=False)).removesuffix("<eos>")


BYTES = Tokens()


def grammar_of(form: DialogFormat, asked: Conversation, prompt_end: str = "") -> Grammar:
    grammar = call_grammar(form, asked, prompt_end)
    assert grammar is not None
    return grammar


def canonical(name: str, kind: str) -> str:
    """Return calls in the form that a grammar asks for."""
    text = TEXTS[name][kind].replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
    if name == "harmony":  # a token that ends the answer
        return text.removesuffix("<|call|>")
    return text.removeprefix("```tool_code\n").removesuffix("\n```") if name == "gemma3" else text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", CALLS)
def test_required_calls_of_every_format_are_accepted(name: str, kind: str) -> None:
    if (name, kind) == ("harmony", "two"):
        return  # a call ends an answer of gpt-oss
    grammar = grammar_of(format_of(name, None), conversation(choice=REQUIRED))
    text = canonical(name, kind)
    assert BYTES.accepts(grammar, text)
    assert read(format_of(name, None), conversation(), [text]).decoded == CALLS[kind]
    assert not BYTES.accepts(grammar, text + " and")
    assert not BYTES.accepts(grammar, "I will")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", ["three", "3.5"])
def test_an_argument_of_a_wrong_type_is_refused(name: str, wrong: str) -> None:
    grammar = grammar_of(format_of(name, None), conversation(choice=REQUIRED))
    text = canonical(name, "one")
    before, found, after = text.rpartition("3")
    assert BYTES.accepts(grammar, before + "12" + after)
    assert found
    assert not BYTES.accepts(grammar, before + wrong + after)
    assert not BYTES.accepts(grammar, text.replace("get_weather", "get_whether"))


@pytest.mark.parametrize("name", NAMES)
def test_whatever_follows_the_grammar_is_a_valid_call(name: str) -> None:
    form, random = format_of(name, None), Random(name)
    tokens = Tokens(*(text for text in form.literals() if len(text) > 4))
    form = replace(form, tokens=tokens.added)
    tools = (*STRICT, PLAN)
    grammar = grammar_of(form, conversation(choice=REQUIRED, tools=tools))
    for _ in range(16):
        text = tokens.written(grammar, random)
        answer = read(form, conversation(tools=tools), [text])
        assert answer.text == ""
        assert answer.calls
        for (tool, arguments), (_, _, ended) in zip(answer.decoded, answer.calls, strict=True):
            assert ended
            parameters = next(each.parameters for each in tools if each.name == tool)
            jsonschema_rs.validate(parameters, arguments)


def test_of_calls_that_may_not_be_parallel_there_is_one() -> None:
    for name in NAMES:
        grammar = grammar_of(format_of(name, None), conversation(choice=REQUIRED, parallel=False))
        one, two = (canonical(name, kind) for kind in ("one", "two"))
        assert BYTES.accepts(grammar, one)
        assert not BYTES.accepts(grammar, two)


def test_only_the_tools_that_may_be_called_are_in_the_grammar() -> None:
    grammar = grammar_of(format_of("hermes", None), conversation(choice=ToolChoice("required", ("get_time",))))
    assert BYTES.accepts(grammar, TEXTS["hermes"]["empty"])
    assert not BYTES.accepts(grammar, TEXTS["hermes"]["one"])


def test_no_grammar_is_made_where_any_text_may_follow() -> None:
    schema = Grammar.json_object()
    assert call_grammar(format_of("hermes"), conversation(), "") is None
    assert call_grammar(format_of("hermes"), conversation(tools=(), choice=REQUIRED), "") is None
    assert call_grammar(format_of("hermes"), conversation(choice=NONE, tools=()), "") is None
    assert call_grammar(format_of("hermes", None), conversation(choice=NONE, grammar=schema), "") is schema
    assert call_grammar(format_of("hermes", None), conversation(tools=(), grammar=schema), "") is schema


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("single", [True, False])
def test_an_answer_that_may_not_call_begins_no_call(name: str, single: bool) -> None:
    form = format_of(name, None)
    tokens = Tokens(*form.begin[:1]) if single else BYTES
    form = replace(form, tokens=tokens.added)
    grammar = grammar_of(form, conversation(choice=NONE))
    begin, channel = ("", "<|channel|>final<|message|>") if form.channels else (form.begin[0], "")
    assert tokens.accepts(grammar, f"{channel}Any text, {begin[:-1]},\n\nand more.{begin[:1]}")
    call = begin or "<|channel|>commentary to=functions."
    assert not tokens.accepts(grammar, call)
    assert form.channels or not tokens.accepts(grammar, f"Any text. {call} and more")


@pytest.mark.parametrize("name", [name for name in NAMES if not format_of(name).bare and name != "harmony"])
@pytest.mark.parametrize("single", [True, False])
def test_strict_tools_bind_from_the_beginning_of_a_call_on(name: str, single: bool) -> None:
    form = format_of(name, None)
    tokens = Tokens(*form.begin[:1]) if single else BYTES
    form = replace(form, tokens=tokens.added)
    strict = tuple(replace(tool, strict=tool.name == "get_weather") for tool in TOOLS)
    grammar = grammar_of(form, conversation(tools=strict))
    one = canonical(name, "one")
    assert tokens.accepts(grammar, "Any text.")
    assert tokens.accepts(grammar, "")
    assert tokens.accepts(grammar, f"So:\n\n{one}\nand {one} then")
    assert not tokens.accepts(grammar, f"So:\n\n{one.replace('3', 'x')}")
    assert not any(tokens.accepts(grammar, f"{begin} and more") for begin in form.begin)
    alone = grammar_of(form, conversation(tools=strict, parallel=False))
    assert tokens.accepts(alone, f"So: {one}")
    assert not tokens.accepts(alone, f"So: {one} {one}")


@pytest.mark.parametrize("name", ["llama3", "llama4", "gemma3"])
def test_strict_tools_bind_answers_that_begin_like_a_call(name: str) -> None:
    grammar = grammar_of(format_of(name, None), conversation(tools=STRICT[:1]))
    one = canonical(name, "one")
    assert BYTES.accepts(grammar, "Any text with [ and {.")
    assert BYTES.accepts(grammar, "")
    assert BYTES.accepts(grammar, one)
    assert not BYTES.accepts(grammar, one.replace("3", "x"))


_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")


@pytest.mark.parametrize("single", [True, False])
def test_thinking_comes_before_the_calls_and_the_answer(single: bool) -> None:
    tokens = Tokens("<think>", "</think>", "<tool_call>", "</tool_call>", *_CHANNELS) if single else BYTES
    hermes = find_format("</think> <tool_call>", tokens.added, "hermes")
    call, answer = TEXTS["hermes"]["one"], '{"a": 1}'
    required = grammar_of(hermes, conversation(choice=REQUIRED))
    assert tokens.accepts(required, f"<think>\nHm <b>\n</think>\n\n{call}")
    assert tokens.accepts(required, call)
    assert not tokens.accepts(required, f"<think>\nHm\n</think>\n\n{answer}")
    opened = grammar_of(hermes, conversation(choice=REQUIRED), "<think>\n")
    assert tokens.accepts(opened, f"Hm</think>{call}")
    assert not tokens.accepts(opened, call)
    off = grammar_of(hermes, conversation(choice=REQUIRED, thinking=Thinking(enabled=False)), "")
    assert not tokens.accepts(off, f"<think>\nHm\n</think>\n\n{call}")
    formatted = grammar_of(hermes, conversation(tools=(), grammar=Grammar.json_object()), "<think>")
    assert tokens.accepts(formatted, f"Hm</think>\n\n{answer}")
    assert not tokens.accepts(formatted, "Hm</think>\n\nYes")
    both = grammar_of(hermes, conversation(grammar=Grammar.json_object()), "<think>")
    assert tokens.accepts(both, f"Hm</think>\n\n{answer}")
    assert tokens.accepts(both, f"Hm</think>\n\n{call}")
    assert not tokens.accepts(both, "Hm</think>\n\nYes")


@pytest.mark.parametrize("single", [True, False])
def test_messages_of_gpt_oss(single: bool) -> None:
    tokens = Tokens(*_CHANNELS) if single else BYTES
    form = find_format("", tokens.added, "harmony")
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = TEXTS["harmony"]["one"].removesuffix("<|call|>")
    required = grammar_of(form, conversation(choice=REQUIRED))
    assert tokens.accepts(required, thought + call)
    assert not tokens.accepts(required, thought + call.replace("3", '"3"'))
    assert not tokens.accepts(required, thought + "<|channel|>final<|message|>Yes")
    strict = grammar_of(form, conversation(tools=STRICT[:1]))
    assert tokens.accepts(strict, thought + "<|channel|>final<|message|>Yes")
    assert tokens.accepts(strict, "<|channel|>commentary<|message|>So:<|end|><|start|>assistant" + call)
    assert not tokens.accepts(strict, call.replace("3", '"3"'))
    formatted = grammar_of(form, conversation(tools=(), grammar=Grammar.json_object()))
    assert tokens.accepts(formatted, thought + '<|channel|>final<|message|>{"a": 1}')
    assert not tokens.accepts(formatted, thought + "<|channel|>final<|message|>Yes")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array"}, 'expected "type": "object"'),
        ({"properties": {"a": {"type": "string", "pattern": "(?=x)"}}}, "look-ahead"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"properties": {"a": {"$ref": "#/$defs/missing"}}}, "missing"),
        ({"properties": {"a": {"type": "string", "description": "x" * 70_000}}}, "at most 65536 bytes"),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3-coder", "olmo3", "gemma4"])
def test_a_schema_of_which_no_grammar_can_be_made_names_its_tool(
    name: str, schema: dict[str, Any], reason: str
) -> None:
    tools = (*TOOLS, Tool("the_one", parameters=schema))
    with pytest.raises(UsageError, match=rf"^tools: the_one: parameters: .*{reason}"):
        call_grammar(format_of(name), conversation(tools=tools, choice=REQUIRED), "")


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_that_refers_to_itself_is_used_or_refused(name: str) -> None:
    tree = {"type": "object", "properties": {"a": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}}
    tool = Tool(
        "f", parameters={"$defs": {"tree": tree}, "type": "object", "properties": {"t": {"$ref": "#/$defs/tree"}}}
    )
    asked = conversation(tools=(tool,), choice=REQUIRED)
    if format_of(name).arguments == "gemma":
        with pytest.raises(UsageError, match=r"f: parameters: .*circle"):
            call_grammar(format_of(name), asked, "")
    else:
        assert not llguidance.LLMatcher(BYTES.of_llguidance, grammar_of(format_of(name), asked).source).is_error()


def test_tools_that_are_too_many_are_refused() -> None:
    tools = tuple(replace(TOOLS[0], name=f"tool_{number}") for number in range(10_000))
    with pytest.raises(UsageError, match=r"^tools: their grammar has .* offer fewer"):
        call_grammar(format_of("hermes"), conversation(tools=tools, choice=REQUIRED), "")


@pytest.mark.parametrize("name", ["qwen3-coder", "glm", "gemma4", "deepseek-v3.2"])
def test_texts_without_quotes_follow_their_bounds(name: str) -> None:
    form = format_of(name, None)
    properties = {
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]+$"},
        "short": {"type": "string", "maxLength": 3},
        "unit": {"enum": ["c", "f"]},
    }
    schema = {"properties": properties, "required": ["code", "short", "unit"], "additionalProperties": False}
    grammar = grammar_of(form, conversation(tools=(Tool("f", parameters=schema),), choice=REQUIRED))

    def written(code: str, short: str, unit: str) -> str:
        values = {"code": code, "short": short, "unit": unit}
        if form.elements is None:
            inner = ",".join(f"{key}:{form.quote}{value}{form.quote}" for key, value in values.items())
            return f"<|tool_call>call:f{{{inner}}}<tool_call|>"
        lines, typed = "\n" * form.elements.lines, '"true">' if form.elements.typed else ""
        inner = "".join(
            f"{form.elements.open}{key}{form.elements.middle}{typed}{lines}{value}{lines}{form.elements.close}\n"
            for key, value in values.items()
        )
        begin = f"{form.begin[0]}{form.gap}{form.open[0]}f{form.name_end[0].rstrip()}\n"
        after = f"{form.close}{form.gap}" if form.close else ""
        return begin + inner + after + form.end

    assert BYTES.accepts(grammar, written("ab/12", "", "f"))
    assert BYTES.accepts(grammar, written("ab/1", "x<y", "c"))
    assert not BYTES.accepts(grammar, written("ab12", "", "f"))
    assert not BYTES.accepts(grammar, written("ab/12", "four", "f"))
    assert not BYTES.accepts(grammar, written("ab/12", "", "k"))
