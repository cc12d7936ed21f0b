"""The one internal form of a chat: what every API is translated into, and what chat templates and grammars read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from minifloat.engine import Grammar


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: As the model writes it.
        description: What it does, for the model.
        parameters: JSON schema of its arguments, an object.
        strict: Whether arguments that violate the schema must be impossible.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it, in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer calls.

    Attributes:
        mode: `none`: no call; `auto`: as the model likes; `required`: at least one call and nothing else.
        names: The tools that may be called; empty: all.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thinking:
    """How the model thinks before its answer.

    Attributes:
        enabled: Whether it does; None: as the chat template does by default.
        effort: For templates with the variable `reasoning_effort`; None: the template's default.
        budget: Tokens after which the end of the thinking is forced; None: no limit.
        separate: Whether the thinking is told apart from the answer.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    separate: bool = True


@dataclass(frozen=True)
class Conversation:
    """What a model is to answer.

    Attributes:
        messages: As chat templates read them: `role` (system, user, assistant, tool) and `content`, a text; of an
            assistant also `reasoning_content` and `tool_calls` (`id`, `type`: function, `function`: `name`, and
            `arguments` as an object); of a tool also `tool_call_id` and `name`.
        tools: That the request names.
        choice: Which of them an answer calls.
        parallel: Whether an answer may have several calls.
        thinking: Of the answer.
        variables: Of the chat template, beside the ones that it always gets.
        documents: For templates that read them.
        grammar: That the answer follows, after its thinking; None: any text.
        continues: Whether the last message is the beginning of the answer.
        opens: Whether the prompt ends where an answer begins, if none is continued.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice()
    parallel: bool = True
    thinking: Thinking = Thinking()
    variables: Mapping[str, Any] = field(default_factory=dict)
    documents: Sequence[Mapping[str, Any]] | None = None
    grammar: Grammar | None = None
    continues: bool = False
    opens: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that an answer may call."""
        if self.choice.mode == "none":
            return ()
        return tuple(tool for tool in self.tools if not self.choice.names or tool.name in self.choice.names)
