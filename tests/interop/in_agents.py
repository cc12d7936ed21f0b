"""Run agents of several frameworks against a server, each to its end; runs in their environment.

Each run imports only the packages of its agent: all of them take ten seconds of a processor.

The model writes nothing of sense. That it calls tools, and that their arguments are valid, is by the grammar of the
server. A weak model calls the same tool again and again, so each tool is offered until it was called. A run has one
turn for each at most, and one in which the model answers or finishes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter

MOST_TURNS = 8
OPTIONS: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0}
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

    @property
    def left(self) -> list[Callable[..., str]]:
        """The tools that were not called."""
        return [function for function in self.functions if function.__name__ not in self.calls]

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
    from pydantic_ai import Agent, Tool, ToolOutput
    from pydantic_ai.usage import UsageLimits

    async def until_called(_: Any, definition: Any) -> Any:
        return None if definition.name in tools.calls else definition

    agent = Agent(
        model,
        tools=[Tool(function, strict=True, prepare=until_called) for function in tools.functions],
        output_type=ToolOutput(Word, name="finish", strict=True),
    )
    settings: Any = OPTIONS | {"parallel_tool_calls": False}
    result = agent.run_sync(TASK, model_settings=settings, usage_limits=UsageLimits(request_limit=MOST_TURNS))
    return Word(result.output).value


def of_pydantic_ai(kind: str) -> Callable[[str, str, Tools], str]:
    def run(url: str, model: str, tools: Tools) -> str:
        if kind == "messages":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            return pydantic_ai(AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="-")), tools)
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="-")
        made = OpenAIChatModel if kind == "chat" else OpenAIResponsesModel
        return pydantic_ai(made(model, provider=provider), tools)

    return run


def of_smolagents(url: str, model: str, tools: Tools) -> str:
    import smolagents

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

    def remove_called(_: Any, agent: Any) -> None:
        for name in tools.calls:
            agent.tools.pop(name, None)

    options: dict[str, Any] = OPTIONS | {"parallel_tool_calls": False}
    served = smolagents.OpenAIServerModel(model, api_base=f"{url}/v1", api_key="-", **options)
    agent = smolagents.ToolCallingAgent(
        [Add(), Weather(), Note(), Finish()], served, max_steps=MOST_TURNS, step_callbacks=[remove_called]
    )
    return str(agent.run(TASK))


def of_langchain(*, responses: bool) -> Callable[[str, str, Tools], str]:
    def run(url: str, model: str, tools: Tools) -> str:
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_openai import ChatOpenAI

        def finish(word: Word) -> str:
            """End.

            Args:
                word: The answer.
            """
            return Word(word).value

        served = ChatOpenAI(
            model=model,
            base_url=f"{url}/v1",
            api_key="-",
            **OPTIONS,
            use_responses_api=responses,
            output_version="responses/v1" if responses else None,
        )
        messages: list[Any] = [HumanMessage(TASK)]
        for _ in range(MOST_TURNS):
            functions = {function.__name__: function for function in (*tools.left, finish)}
            bound = served.bind_tools(
                list(functions.values()), tool_choice="required", strict=True, parallel_tool_calls=False
            )
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
    import llm
    from llm.default_plugins.openai_models import Chat

    class Served(Chat):
        """It has no way to ask for a call, so that this adds it."""

        def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
            found = super().build_kwargs(prompt, stream)
            left = {function.__name__ for function in tools.left}
            offered = [tool for tool in found["tools"] if not left or tool["function"]["name"] in left]
            choice = {"tool_choice": "required" if left else "none", "parallel_tool_calls": False}
            return found | {"tools": offered} | choice

    served = Served(model, key="-", model_name=model, api_base=f"{url}/v1", supports_tools=True)
    found = [llm.Tool(each.__name__, each.__doc__, schema_of(each), implementation=each) for each in tools.functions]
    chain = served.chain(TASK, tools=found, key="-", options=OPTIONS)
    chain.text()
    return "yes"


def schema_of(function: Callable[..., str]) -> dict[str, Any]:
    """Return the strict schema of a tool's arguments."""
    adapter: Any = TypeAdapter(function)
    schema = adapter.json_schema()
    return schema | {"additionalProperties": False}


def of_openai_chat(url: str, model: str, tools: Tools) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        functions = [
            {"name": each.__name__, "description": each.__doc__, "strict": True, "parameters": schema_of(each)}
            for each in tools.left or tools.functions
        ]
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            tools=[{"type": "function", "function": function} for function in functions],  # type: ignore[arg-type]
            tool_choice="required" if tools.left else "none",
            parallel_tool_calls=False,
            **OPTIONS,
        ).choices[0]
        messages.append(answer.message)
        if not answer.message.tool_calls:
            return "yes"
        for call in answer.message.tool_calls:
            result = getattr(tools, call.function.name)(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("it does not end")


def of_openai_responses(url: str, model: str, tools: Tools) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-")
    items: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        answer = client.responses.create(
            model=model,
            input=items,
            tools=[
                {"type": "function", "name": each.__name__, "strict": True, "parameters": schema_of(each)}
                for each in tools.left or tools.functions
            ],
            tool_choice="required" if tools.left else "none",
            parallel_tool_calls=False,
            max_output_tokens=200,
        )
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return "yes"
        for call in calls:
            result = getattr(tools, call.name)(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    raise AssertionError("it does not end")


def of_anthropic_messages(url: str, model: str, tools: Tools) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="-")
    messages: list[Any] = [{"role": "user", "content": TASK}]
    for _ in range(MOST_TURNS):
        choice: Any = {"type": "any", "disable_parallel_tool_use": True} if tools.left else {"type": "none"}
        offered: Any = [
            {"name": each.__name__, "description": each.__doc__, "strict": True, "input_schema": schema_of(each)}
            for each in tools.left or tools.functions
        ]
        answer = client.messages.create(
            model=model, messages=messages, tools=offered, tool_choice=choice, max_tokens=200
        )
        messages.append({"role": "assistant", "content": answer.content})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return "yes"
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": getattr(tools, call.name)(**call.input)}
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    raise AssertionError("it does not end")


def of_anthropic_runner(url: str, model: str, tools: Tools) -> str:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="-")
    runner: Any = client.beta.messages.tool_runner(
        model=model,
        messages=[{"role": "user", "content": TASK}],
        tools=[anthropic.beta_tool(function) for function in tools.functions],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=MOST_TURNS,
        max_tokens=200,
    )
    for number, _ in enumerate(runner, 1):
        if number == len(tools.functions):  # the runner executes the calls of this answer before it asks again
            runner.set_messages_params(lambda params: params | {"tool_choice": {"type": "none"}})
    assert len(tools.calls) == number - 1 == len(tools.functions), tools.calls
    return "yes"


AGENTS: dict[str, Callable[[str, str, Tools], str]] = {
    "openai, chat": of_openai_chat,
    "openai, responses": of_openai_responses,
    "anthropic, messages": of_anthropic_messages,
    "anthropic, tool runner": of_anthropic_runner,
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
