"""From a conversation to its prompt, by the chat template, and to how the answer is sampled and read.

Templates differ in what they read. What one does with calls is found by rendering an example. Where it does not read
tools, their definitions and how to call them are told in the system message; calls and results become text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from minifloat.engine import Thinking
from minifloat.errors import ChatTemplateError, UsageError
from minifloat.model.runtime.templates import apply_chat_template, chat_prompt, constants, names, template_of
from minifloat.serve.dialog.conversation import Conversation
from minifloat.serve.dialog.formats import DialogFormat, find_format, opens_thinking
from minifloat.serve.dialog.grammar import call_grammar
from minifloat.serve.dialog.parser import AnswerParser

if TYPE_CHECKING:
    from minifloat.model.runtime.tokenizer import TextTokenizer

_Message = dict[str, Any]
#: Ids of calls as we make them, and as the templates of Mistral want them.
_LONG_ID, _SHORT_ID = "call_0123456789abcdef", "abcdefghi"
_TOOL = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
_GENERIC = "generic"


@dataclass(frozen=True)
class TemplateTraits:
    """What a chat template does with the parts of a conversation.

    Attributes:
        tools: Where it reads them: in its variable, in the system message as JSON, or nowhere.
        calls: Whether it writes the calls of earlier messages.
        text_arguments: Whether it wants the arguments of calls as JSON text, not as objects.
        short_ids: Whether it accepts only ids of calls with nine characters.
        system: Whether it accepts a system message.
    """

    tools: Literal["variable", "system message", "nowhere"]
    calls: bool
    text_arguments: bool
    short_ids: bool
    system: bool

    @classmethod
    def of(cls, tokenizer: TextTokenizer, template: str) -> TemplateTraits:
        """Return what is found by rendering examples."""

        def render(messages: Sequence[_Message], **variables: Any) -> str:
            try:
                return apply_chat_template(tokenizer, messages, chat_template=template, **variables)
            except ChatTemplateError:
                return ""

        def writes(arguments: Any, id: str) -> bool:
            call = {"id": id, "type": "function", "function": {"name": "probe", "arguments": arguments}}
            result = {"role": "tool", "content": "result", "tool_call_id": id, "name": "probe"}
            messages: list[_Message] = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
            text = render(messages, tools=[{"type": "function", "function": _TOOL}])
            return "probe_value" in text and "'probe_key'" not in text and '\\"probe_key' not in text

        try:
            reads = names(template), constants(template)
        except Exception as error:  # jinja2 raises several kinds
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error
        user: _Message = {"role": "user", "content": "question"}
        ways = [(text, short) for short in (False, True) for text in (False, True)]
        way = next((way for way in ways if writes(*_example(*way))), None)
        return cls(
            tools="variable" if "tools" in reads[0] else "system message" if "tools" in reads[1] else "nowhere",
            calls=way is not None,
            text_arguments=way is not None and way[0],
            short_ids=way is not None and way[1],
            system="rules" in render([{"role": "system", "content": "rules"}, user]),
        )


def _example(as_text: bool, short_id: bool) -> tuple[Any, str]:
    arguments = {"probe_key": "probe_value"}
    return _json(arguments) if as_text else arguments, _SHORT_ID if short_id else _LONG_ID


@dataclass(frozen=True)
class Dialog:
    """A conversation with its prompt.

    Attributes:
        conversation: What is answered.
        prompt: Its tokens.
        end: The end of its text.
        format: How the model writes calls and thinking.
        closing: Tokens that end the thinking.
    """

    conversation: Conversation
    prompt: tuple[int, ...]
    end: str
    format: DialogFormat
    closing: tuple[int, ...] = ()

    def parser(self) -> AnswerParser:
        return AnswerParser(self.format, self.conversation, self.end)

    @property
    def is_parsed(self) -> bool:
        """Whether an answer may be more than text."""
        return bool(self.conversation.callable_tools or self.format.thinking or self.format.channels)

    def sampling(self) -> dict[str, Any]:
        """Return how an answer is sampled, by the names of `SamplingParams`.

        Raises:
            UsageError: If a schema of a tool cannot be used; the message begins with the field's name.
        """
        grammar = call_grammar(self.format, self.conversation, self.end)
        if not self.is_parsed:
            return {"grammar": grammar}
        return {
            "grammar": grammar,
            "visible": frozenset(self.format.tokens.values()),
            "thinking": self._thinking(),
        }

    def _thinking(self) -> Thinking | None:
        pair = _thinking_pair(self.format)
        if pair is None:
            return None
        return Thinking(
            pair[0],
            (pair[1], *(self.format.begin if self.format.ends_thinking else ())),
            begun=opens_thinking(self.format, self.end, self.conversation.continues),
            budget=self.conversation.thinking.budget,
            closing=self.closing,
        )


def _thinking_pair(format: DialogFormat) -> tuple[str, str] | None:
    """Return what stands before and after the thinking; None: the model does not think."""
    return ("<|channel|>analysis<|message|>", "<|end|>") if format.channels else format.thinking


class Dialogs:
    """Makes prompts of conversations, with one tokenizer and one chat template.

    Args:
        tokenizer: Of the model.
        template: Jinja template instead of the tokenizer's own.
        tool_format: Of `formats.NAMES`, or `auto`: as the template says, or `none`: tools are refused.
        separate_thinking: Whether thinking is told apart from answers.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str | None = None,
        tool_format: str = "auto",
        *,
        separate_thinking: bool = True,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._tool_format, self._separate = tool_format, separate_thinking

    @property
    def has_template(self) -> bool:
        return bool(self._template or self._tokenizer.chat_template)

    @property
    def has_pairs(self) -> bool:
        """Whether the template writes a query and a document, as those of rerankers do, by the roles of messages."""
        template = template_of(self._tokenizer, self._template, tools=False) if self.has_template else ""
        return all(re.search(f"['\"]{role}['\"]", template) for role in ("query", "document"))

    @cached_property
    def traits(self) -> TemplateTraits:
        """What the template for tools does."""
        return TemplateTraits.of(self._tokenizer, self._tool_template)

    @cached_property
    def format(self) -> DialogFormat:
        """How the model writes calls and thinking; the generic form if the template has no tools."""
        added = {token.content: number for number, token in self._tokenizer.added_tokens_decoder.items()}
        name = None if self._tool_format in ("auto", "none") else self._tool_format
        if self.traits.tools == "nowhere":
            if name not in (None, _GENERIC):
                raise UsageError(
                    f"--tool-format {name}: the chat template has no tools, so the model is told to write calls in the "
                    "generic form; leave the option out, or give a template with tools (--chat-template FILE)"
                )
            name = _GENERIC
        return find_format(self._tool_template, added, name)

    @property
    def tool_format(self) -> str | None:
        """Name of the format of calls; None: tools are refused."""
        found = self._found
        return None if found is None or self._tool_format == "none" else found.name

    @property
    def thinks(self) -> bool:
        """Whether thinking is told apart from answers."""
        return self._separate and self._found is not None and _thinking_pair(self._found) is not None

    @property
    def _found(self) -> DialogFormat | None:
        try:
            return self.format
        except ChatTemplateError:
            return None

    @property
    def _tool_template(self) -> str:
        return template_of(self._tokenizer, self._template, tools=True)

    @cached_property
    def _closing(self) -> tuple[int, ...]:
        """Tokens that end the thinking."""
        pair = _thinking_pair(self.format)
        if pair is None:
            return ()
        text = "<|end|><|start|>assistant" if self.format.channels else f"\n{pair[1]}"
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def read(self, conversation: Conversation, max_characters: int) -> Dialog:
        """Return a conversation with its prompt."""
        if not self.has_template:
            raise UsageError(
                "messages: this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE"
            )
        if conversation.tools and self._tool_format == "none":
            raise UsageError("tools: this server was started with --tool-format none")
        separate = conversation.thinking.separate and self._separate
        conversation = replace(conversation, thinking=replace(conversation.thinking, separate=separate))
        try:
            found = chat_prompt(
                self._tokenizer,
                chat_template=self._template,
                max_characters=max_characters,
                add_generation_prompt=conversation.opens and not conversation.continues,
                continue_final_message=conversation.continues,
                **self._variables(conversation),
            )
            return Dialog(conversation, tuple(found.tokens), found.end, self.format, self._closing)
        except ChatTemplateError as error:
            raise UsageError(f"messages: {error}") from error

    def _variables(self, conversation: Conversation) -> dict[str, Any]:
        thinking = conversation.thinking
        variables: dict[str, Any] = {}
        if thinking.enabled is not None:
            variables |= {"enable_thinking": thinking.enabled, "thinking": thinking.enabled}
        if thinking.effort is not None:
            variables["reasoning_effort"] = thinking.effort
        if conversation.documents is not None:
            variables["documents"] = list(conversation.documents)
        tools = [tool.for_template() for tool in conversation.tools]
        messages = self._messages(conversation.messages, tools)
        if tools and self.traits.tools == "variable":
            variables["tools"] = tools
        return variables | dict(conversation.variables) | {"messages": messages}

    def _messages(self, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]) -> list[_Message]:
        has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if not tools and not has_calls:
            return list(map(dict, messages))
        traits = self.traits
        found = [self._call_as_told(message) for message in messages]
        if not traits.calls or traits.tools == "nowhere":
            found = _as_text(found)
        if tools and traits.tools == "nowhere":
            _tell(found, _instructions(tools), system=traits.system)
        if tools and traits.tools == "system message":
            if not found or found[0]["role"] != "system":
                found.insert(0, {"role": "system", "content": ""})
            found[0]["tools"] = _json(tools)
        return found

    def _call_as_told(self, message: Mapping[str, Any]) -> _Message:
        message = dict(message)
        if self.traits.short_ids and "tool_call_id" in message:
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [
                call
                | ({"id": _short_id(call["id"])} if self.traits.short_ids else {})
                | {"function": dict(call["function"], arguments=self._arguments(call["function"]["arguments"]))}
                for call in map(dict, message["tool_calls"])
            ]
        return message

    def _arguments(self, arguments: Any) -> Any:
        return _json(arguments) if self.traits.text_arguments else arguments


def _short_id(id: str) -> str:
    length = len(_SHORT_ID)
    return id if len(id) == length and id.isalnum() else hashlib.sha256(id.encode()).hexdigest()[:length]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    return find_format("", {}, _GENERIC).instructions.replace("{tools}", "\n".join(map(_json, tools)))


def _as_text(messages: Sequence[_Message]) -> list[_Message]:
    """Return messages with their calls and results as text; consecutive messages of a user become one."""
    generic = find_format("", {}, _GENERIC)
    found: list[_Message] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
        if "tool_calls" in message:
            functions = [call["function"] for call in message.pop("tool_calls")]
            calls = [
                f"{generic.begin[0]}\n{_json({key: function[key] for key in ('name', 'arguments')})}\n{generic.end}"
                for function in functions
            ]
            message["content"] = "\n".join(filter(None, (content, *calls)))
        if found and found[-1]["role"] == message["role"] == "user":
            found[-1]["content"] += "\n" + message["content"]
        else:
            found.append(message)
    return found


def _tell(messages: list[_Message], text: str, *, system: bool) -> None:
    """Add a text to the system message, or to the first message of the user if there is no system message."""
    role = "system" if system else "user"
    index = next((index for index, message in enumerate(messages) if message["role"] == role), None)
    if index is None:
        messages.insert(0, {"role": role, "content": text})
    else:
        content = messages[index]["content"]
        messages[index]["content"] = "\n\n".join(filter(None, (content, text) if system else (text, content)))
