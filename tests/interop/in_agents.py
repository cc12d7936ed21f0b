"""Run agents of several frameworks against a server, each to its end; runs in their environment.

The model writes nothing of sense. That it calls tools, and that their arguments are valid, is by the grammar of the
server. An agent ends when the model calls the tool that finishes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import llm
import smolagents
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from llm.default_plugins.openai_models import Chat
from pydantic_ai import Agent, Tool, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

MOST_TURNS = 60
TASK = "Add numbers, look at the weather, take notes, then finish."


class City(StrEnum):
    """Where there is weather."""

    OSLO = "oslo"
    ROME = "rome"


class Word(StrEnum):
    """What can be written down."""

    YES = "yes"
    NO = "no"


class Tools:
    """The three tools, which count their calls and check their arguments."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def add(self, first: bool, second: bool) -> str:
        """Add two bits.

        Args:
            first: A bit.
            second: Another bit.
        """
        assert type(first) is type(second) is bool
        self.calls.append("add")
        return str(first + second)

    def weather(self, city: City) -> str:
        """Say the weather of a city.

        Args:
            city: Where.
        """
        self.calls.append("weather")
        return f"rain in {City(city).value}"

    def note(self, word: Word) -> str:
        """Take a note.

        Args:
            word: What to write down.
        """
        self.calls.append("note")
        return f"written: {Word(word).value}"

    @property
    def functions(self) -> list[Callable[..., str]]:
        return [self.add, self.weather, self.note]


def pydantic_ai(model: Any, tools: Tools) -> str:
    agent = Agent(
        model,
        tools=[Tool(function, strict=True) for function in tools.functions],
        output_type=ToolOutput(Word, name="finish", strict=True),
    )
    settings: Any = {"max_tokens": 200, "temperature": 1.0, "parallel_tool_calls": False}
    result = agent.run_sync(TASK, model_settings=settings, usage_limits=UsageLimits(request_limit=MOST_TURNS))
    return Word(result.output).value


def of_pydantic_ai(kind: str) -> Callable[[str, str, Tools], str]:
    def run(url: str, model: str, tools: Tools) -> str:
        if kind == "messages":
            return pydantic_ai(AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="-")), tools)
        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="-")
        made = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
        return pydantic_ai(made(model, provider=provider), tools)

    return run


def of_smolagents(url: str, model: str, tools: Tools) -> str:
    def parameter(name: str, kind: str, values: list[str] | None = None) -> dict[str, Any]:
        return {name: {"type": kind, "description": name} | ({"enum": values} if values else {})}

    class Add(smolagents.Tool):
        name, description, output_type = "add", "Add two bits.", "string"
        inputs = parameter("first", "boolean") | parameter("second", "boolean")
        forward = staticmethod(lambda first, second: tools.add(first, second))
        skip_forward_signature_validation = True

    class Weather(smolagents.Tool):
        name, description, output_type = "weather", "Say the weather of a city.", "string"
        inputs = parameter("city", "string", ["oslo", "rome"])
        forward = staticmethod(lambda city: tools.weather(city))
        skip_forward_signature_validation = True

    class Note(smolagents.Tool):
        name, description, output_type = "note", "Take a note.", "string"
        inputs = parameter("word", "string", ["yes", "no"])
        forward = staticmethod(lambda word: tools.note(word))
        skip_forward_signature_validation = True

    class Finish(smolagents.Tool):
        name, description, output_type = "final_answer", "End.", "string"
        inputs = parameter("answer", "string", ["yes", "no"])
        forward = staticmethod(lambda answer: Word(answer).value)
        skip_forward_signature_validation = True

    options: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "parallel_tool_calls": False}
    served = smolagents.OpenAIServerModel(model, api_base=f"{url}/v1", api_key="-", **options)
    agent = smolagents.ToolCallingAgent([Add(), Weather(), Note(), Finish()], served, max_steps=MOST_TURNS)
    return str(agent.run(TASK))


def of_langchain(*, responses: bool) -> Callable[[str, str, Tools], str]:
    def run(url: str, model: str, tools: Tools) -> str:
        def finish(word: Word) -> str:
            """End.

            Args:
                word: The answer.
            """
            return Word(word).value

        functions = {function.__name__: function for function in (*tools.functions, finish)}
        served = ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="-",
            temperature=1.0,
            max_tokens=200,
            use_responses_api=responses,
            output_version="responses/v1" if responses else None,
        )
        bound = served.bind_tools(
            list(functions.values()), tool_choice="required", strict=True, parallel_tool_calls=False
        )
        messages: list[Any] = [HumanMessage(TASK)]
        for _ in range(MOST_TURNS):
            answer = bound.invoke(messages)
            messages.append(answer)
            assert answer.tool_calls, answer
            assert not answer.invalid_tool_calls, answer
            for call in answer.tool_calls:
                result = functions[call["name"]](**call["args"])
                if call["name"] == "finish":
                    return result
                messages.append(ToolMessage(result, tool_call_id=call["id"]))
        raise AssertionError("it does not end")

    return run


def of_llm(url: str, model: str, tools: Tools) -> str:
    class Served(Chat):
        """It has no way to ask for a call, so that this adds it, until there were three."""

        def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
            choice = {"tool_choice": "required" if len(tools.calls) < 3 else "none"}
            return super().build_kwargs(prompt, stream) | choice

    served = Served(model, key="-", model_name=model, api_base=f"{url}/v1", supports_tools=True)
    found = [llm.Tool.function(function) for function in tools.functions]
    chain = served.chain(TASK, tools=found, key="-", options={"max_tokens": 1000, "temperature": 1.0})
    chain.text()
    return "yes"


AGENTS: dict[str, Callable[[str, str, Tools], str]] = {
    "pydantic-ai, chat": of_pydantic_ai("chat"),
    "pydantic-ai, responses": of_pydantic_ai("responses"),
    "pydantic-ai, messages": of_pydantic_ai("messages"),
    "smolagents": of_smolagents,
    "langchain, chat": of_langchain(responses=False),
    "langchain, responses": of_langchain(responses=True),
    "llm": of_llm,
}


def main() -> None:
    """Run the request file's agent, and write its answer, its calls or its error as one line."""
    with open(sys.argv[1]) as file:
        request = json.load(file)
    tools = Tools()
    line: dict[str, Any] = {"error": None, "answer": None}
    try:
        line["answer"] = AGENTS[request["agent"]](request["url"], request["model"], tools)
    except Exception:
        line["error"] = traceback.format_exc()
    with open(sys.argv[2], "a") as file:
        print(json.dumps(line | {"calls": tools.calls}), file=file)


if __name__ == "__main__":
    main()
