# ruff: noqa: RUF001 - DeepSeek's markers have such characters
"""How families of models write calls and thinking: one row of a table each, found from the chat template.

A call is written as ``[begin] [open] NAME [name_end] ARGUMENTS [close] [end]``; `begin` and `end` may hold several
calls. Arguments are a JSON object, elements typed by the schema, keyword arguments of Python, or Gemma's objects.

Sources: the published chat templates of the families, and where a template only reads calls, what vLLM, SGLang and
llama.cpp accept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from minifloat.errors import UsageError

#: How arguments are written; `object`: with the name, in one JSON object.
Arguments = Literal["object", "json", "elements", "python", "gemma"]


@dataclass(frozen=True)
class Elements:
    """Arguments as elements: ``[open] KEY [middle] VALUE [close]``.

    Attributes:
        open: Before a key.
        middle: Between the key and the value.
        close: After the value.
        typed: Whether the element says if the value is a string: ``string="true">`` follows `middle`.
        lines: Whether a value stands in lines of its own.
        gap: White space that the model writes after an element.
    """

    open: str
    middle: str
    close: str
    typed: bool = False
    lines: bool = False
    gap: str = "\n"


@dataclass(frozen=True)
class DialogFormat:
    """How a model writes calls and thinking.

    Attributes:
        name: For `serve --tool-format`.
        models: Families that write so.
        template: Texts that a chat template, or the tokenizer's added tokens, must contain.
        begin: Before a call, or several; the first is the one that a grammar asks for.
        end: After a call, or several; empty: nothing.
        list: Whether the calls between `begin` and `end` are a list in brackets.
        separator: Between calls in one `begin` and `end`; None: each has its own.
        gap: White space that the model writes after `begin` and before `end`.
        open: Before the name of a call; the first is the one that a grammar asks for.
        numbered: Whether the name has a number after it, such as `:0`, which is the id of the call.
        name_end: After the name; the first is the one that a grammar asks for.
        arguments: How they are written.
        key: Of the arguments in a call of the form `object`.
        close: After the arguments.
        elements: For arguments of that form.
        quote: Around strings in arguments of the form `gemma`.
        bare: Whether an answer may begin with a call without `begin`.
        channels: Whether the answer is made of messages in channels, as gpt-oss writes.
        thinking: Before and after the thinking; None: the model does not think.
        ends_thinking: Whether `begin` ends the thinking too.
        instructions: For a chat template that has no tools; ``{tools}`` is the place of their definitions.
        tokens: Markers that are single tokens of this tokenizer -> token.
    """

    name: str
    models: str
    template: tuple[str, ...]
    begin: tuple[str, ...] = ()
    end: str = ""
    list: bool = False
    separator: str | None = None
    gap: str = ""
    open: tuple[str, ...] = ("",)
    numbered: bool = False
    name_end: tuple[str, ...] = ()
    arguments: Arguments = "object"
    key: str = "arguments"
    close: str = ""
    elements: Elements | None = None
    quote: str = ""
    bare: bool = False
    channels: bool = False
    thinking: tuple[str, str] | None = None
    ends_thinking: bool = False
    instructions: str = ""
    tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of tokens that a parser must see."""
        return tuple(self.tokens)

    def literals(self) -> tuple[str, ...]:
        """Return all texts of the frame."""
        elements = self.elements
        inner = () if elements is None else (elements.open, elements.middle, elements.close)
        outer = (*self.begin, self.end, *self.open, *self.name_end, self.close, self.quote)
        channels = _CHANNELS if self.channels else ()
        return tuple(text for text in (*outer, *inner, *(self.thinking or ()), *channels) if text)


_CHANNELS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
#: Before and after the thinking of models whose chat template, or tokenizer, has the second.
_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<reasoning>", "</reasoning>"),
    ("Here is my thought process:", "Here is my response:"),
)

_GENERIC = """\
You may call functions to answer the user. Their definitions, one JSON object in each line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as a JSON object between the tags, and nothing after them:
<tool_call>
{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>
The result comes in the next message between <tool_response> and </tool_response>."""

#: The generic form is the last: it is taken where no other is found.
FORMATS: tuple[DialogFormat, ...] = (
    DialogFormat(
        "harmony",
        "gpt-oss",
        ("<|channel|>", "<|message|>"),
        arguments="json",
        channels=True,
    ),
    DialogFormat(
        "deepseek-v3",
        "DeepSeek V3, R1",
        ("<｜tool▁sep｜>", "```json"),
        begin=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        separator="\n",
        open=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
        name_end=("\n```json\n",),
        arguments="json",
        close="\n```<｜tool▁call▁end｜>",
    ),
    DialogFormat(
        "deepseek-v3.1",
        "DeepSeek V3.1",
        ("<｜tool▁sep｜>",),
        begin=("<｜tool▁calls▁begin｜>",),
        end="<｜tool▁calls▁end｜>",
        separator="",
        open=("<｜tool▁call▁begin｜>",),
        name_end=("<｜tool▁sep｜>",),
        arguments="json",
        close="<｜tool▁call▁end｜>",
    ),
    *(
        DialogFormat(
            name,
            models,
            (f"｜DSML｜{space}{calls}",),
            begin=(f"<｜DSML｜{space}{calls}>",),
            end=f"</｜DSML｜{space}{calls}>",
            separator="\n",
            gap="\n",
            open=(f'<｜DSML｜{space}invoke name="',),
            name_end=('">', '"/>'),
            arguments="elements",
            close=f"</｜DSML｜{space}invoke>",
            elements=Elements(
                f'<｜DSML｜{space}parameter name="', '" string=', f"</｜DSML｜{space}parameter>", typed=True
            ),
        )
        for name, models, space, calls in (
            ("deepseek-v3.2", "DeepSeek V3.2", "", "function_calls"),
            ("deepseek-v4", "DeepSeek V4", "", "tool_calls"),
            ("deepseek-v4.1", "DeepSeek V4.1", " ", "calls"),
        )
    ),
    DialogFormat(
        "kimi-k2",
        "Kimi K2",
        ("<|tool_call_argument_begin|>",),
        begin=("<|tool_calls_section_begin|>",),
        end="<|tool_calls_section_end|>",
        separator="",
        open=("<|tool_call_begin|>functions.", "<|tool_call_begin|>"),
        numbered=True,
        name_end=("<|tool_call_argument_begin|>",),
        arguments="json",
        close="<|tool_call_end|>",
        ends_thinking=True,
    ),
    DialogFormat(
        "minimax-m2",
        "MiniMax M2",
        ("<minimax:tool_call>",),
        begin=("<minimax:tool_call>",),
        end="</minimax:tool_call>",
        separator="\n",
        gap="\n",
        open=('<invoke name="',),
        name_end=('">',),
        arguments="elements",
        close="</invoke>",
        elements=Elements('<parameter name="', '">', "</parameter>"),
    ),
    DialogFormat(
        "glm-4.7",
        "GLM 4.7, 5",
        ("{function-name}<arg_key>",),
        begin=("<tool_call>",),
        end="</tool_call>",
        name_end=("<arg_key>", "</tool_call>", "\n"),
        arguments="elements",
        elements=Elements("<arg_key>", "</arg_key><arg_value>", "</arg_value>", gap=""),
    ),
    DialogFormat(
        "glm",
        "GLM 4.5, 4.6",
        ("<arg_key>",),
        begin=("<tool_call>",),
        end="</tool_call>",
        name_end=("\n", "<arg_key>", "</tool_call>"),
        arguments="elements",
        elements=Elements("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    DialogFormat(
        "seed-oss",
        "Seed-OSS",
        ("<seed:tool_call>",),
        begin=("<seed:tool_call>",),
        end="</seed:tool_call>",
        gap="\n",
        open=("<function=",),
        name_end=(">",),
        arguments="elements",
        close="</function>",
        elements=Elements("<parameter=", ">", "</parameter>"),
    ),
    DialogFormat(
        "qwen3-coder",
        "Qwen3-Coder, Qwen3.5",
        ("<function=", "<parameter="),
        begin=("<tool_call>", "<function="),
        end="</tool_call>",
        gap="\n",
        open=("<function=",),
        name_end=(">",),
        arguments="elements",
        close="</function>",
        elements=Elements("<parameter=", ">", "</parameter>", lines=True),
        ends_thinking=True,
    ),
    DialogFormat(
        "gemma4",
        "Gemma 4",
        ("<|tool_call>",),
        begin=("<|tool_call>",),
        end="<tool_call|>",
        open=("call:",),
        name_end=("{",),
        arguments="gemma",
        quote='<|"|>',
    ),
    DialogFormat(
        "functiongemma",
        "FunctionGemma",
        ("<start_function_call>",),
        begin=("<start_function_call>",),
        end="<end_function_call>",
        open=("call:",),
        name_end=("{",),
        arguments="gemma",
        quote="<escape>",
    ),
    DialogFormat(
        "mistral",
        "Mistral from its tokenizer v11 on, Magistral, Devstral",
        ("[TOOL_CALLS]", "[ARGS]"),
        begin=("[TOOL_CALLS]",),
        name_end=("[ARGS]", "{"),
        arguments="json",
    ),
    DialogFormat(
        "mistral-list",
        "Mistral before its tokenizer v11",
        ("[TOOL_CALLS]",),
        begin=("[TOOL_CALLS]",),
        list=True,
        separator=", ",
    ),
    DialogFormat(
        "olmo3",
        "OLMo 3",
        ("<function_calls>",),
        begin=("<function_calls>",),
        end="</function_calls>",
        separator="\n",
        gap="\n",
        name_end=("(",),
        arguments="python",
    ),
    DialogFormat(
        "lfm2",
        "LFM2",
        ("<|tool_call_start|>",),
        begin=("<|tool_call_start|>",),
        end="<|tool_call_end|>",
        list=True,
        separator=", ",
        name_end=("(",),
        arguments="python",
    ),
    DialogFormat(
        "nemotron",
        "Nemotron Nano v2",
        ("<TOOLCALL>",),
        begin=("<TOOLCALL>",),
        end="</TOOLCALL>",
        list=True,
        separator=", ",
    ),
    DialogFormat(
        "phi4-mini",
        "Phi-4-mini",
        ("<|tool|>",),
        begin=("<|tool_call|>", "functools"),
        end="<|/tool_call|>",
        list=True,
        separator=", ",
    ),
    DialogFormat(
        "granite",
        "Granite 3",
        ("<|start_of_role|>", "<|tool_call|>"),
        begin=("<|tool_call|>", "<tool_call>"),
        list=True,
        separator=", ",
    ),
    DialogFormat(
        "granite4",
        "Granite 4",
        ("<|start_of_role|>", "<tool_call>"),
        begin=("<tool_call>",),
        end="</tool_call>",
        gap="\n",
    ),
    DialogFormat(
        "hermes",
        "Hermes, Qwen2.5, Qwen3, SmolLM3",
        ("<tool_call>",),
        begin=("<tool_call>",),
        end="</tool_call>",
        gap="\n",
    ),
    DialogFormat(
        "llama4",
        "Llama 4",
        ("<|python_start|>",),
        begin=("<|python_start|>",),
        end="<|python_end|>",
        list=True,
        separator=", ",
        name_end=("(",),
        arguments="python",
        bare=True,
    ),
    DialogFormat(
        "llama3",
        "Llama 3.1, 3.2, 3.3",
        ("dictionary of argument name and its value",),
        begin=("<|python_tag|>",),
        separator="; ",
        name_end=("(",),
        key="parameters",
        bare=True,
    ),
    DialogFormat(
        "gemma3",
        "Gemma 3, as its documentation asks for calls",
        ("<start_of_turn>", "tool_code"),
        begin=("```tool_code\n",),
        end="\n```",
        list=True,
        separator=", ",
        name_end=("(",),
        arguments="python",
        bare=True,
    ),
    DialogFormat(
        "generic",
        "all others",
        (),
        begin=("<tool_call>",),
        end="</tool_call>",
        gap="\n",
        instructions=_GENERIC,
    ),
)

NAMES = tuple(each.name for each in FORMATS)


def find_format(template: str, added: Mapping[str, int], name: str | None = None) -> DialogFormat:
    """Return how a model writes calls and thinking.

    Args:
        template: The chat template; empty if there is none.
        added: The tokenizer's added tokens, special or not: text -> token.
        name: Of `NAMES`: the format; None: the first one whose texts the template has, or the template and the added
            tokens together.
    """
    if name is not None and name not in NAMES:
        raise UsageError(f"--tool-format {name}: expected one of {', '.join(NAMES)}")
    everything = "\0".join((template, *added))
    found = next(
        row
        for text in (template, everything)
        for row in FORMATS
        if (row.name == name if name else all(each in text for each in row.template))
        and (row.template or name or text is everything)
    )
    thinking = next((pair for pair in _THINKING if pair[1] in template), None)
    thinking = None if found.channels else thinking or next((pair for pair in _THINKING if pair[1] in added), None)
    found = replace(found, thinking=thinking)
    text = "\0".join(found.literals())
    return replace(
        found, tokens={marker: token for marker, token in added.items() if marker.strip() and marker in text}
    )


def opens_thinking(format: DialogFormat, prompt_end: str, continues: bool = False) -> bool:
    """Return whether the end of a prompt opens the thinking; if the answer continues, text of it may follow."""
    if format.thinking is None:
        return False
    _, opened, after = prompt_end.rpartition(format.thinking[0])
    return bool(opened) and format.thinking[1] not in after and (continues or not after.strip())
