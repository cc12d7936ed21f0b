"""Measure what agents cost `minifloat serve`: tools, strict schemas, a large schema beside a stream, and turns.

    python benchmarks/agents.py /tmp/models/smollm2-135m-fp8 --threads 1 --json agents.json

The checkpoint needs a chat template; one without tools gets the generic form. "Overhead" compares chats with 20 tools
with completions of the same prompt as text, of as many clients, in turns. "Pause" is the longest time between two
tokens of a stream while a schema is compiled. "Valid" counts answers that hold calls of their tools, by another
validator. "Turns" compares the tokens of an agent's prompts that were computed with those that are new.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import instruction_sets
import jsonschema_rs
from serve import verdict
from serve_process import HOST, Answer, Server

from minifloat.kernels.decoder import BLOCK_TOKENS
from minifloat.kernels.processors import bound_spin

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLIENTS = 8
MAX_OVERHEAD, MAX_FIRST_MS, MAX_PAUSE_MS = 1.03, 10.0, 100.0


def tools(count: int, *, strict: bool, first: int = 0) -> list[dict[str, Any]]:
    """Return tools whose arguments have enums, numbers, texts, lists and objects, numbered from `first` on."""
    found = []
    for number in range(first, first + count):
        place = {"lat": {"type": "number", "minimum": -90, "maximum": 90}, "name": {"type": "string", "maxLength": 12}}
        properties: dict[str, Any] = {
            "kind": {"type": "string", "enum": ["fast", "slow", f"number {number}"], "description": "How to do it."},
            "count": {"type": "integer", "minimum": 0, "maximum": 99, "description": "How often."},
            "place": {"type": "object", "properties": place, "required": [*place], "additionalProperties": False},
            "words": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
            "sure": {"type": "boolean"},
        }
        kept = [name for index, name in enumerate(properties) if (number + index) % 3 or name == "kind"]
        parameters = {
            "type": "object",
            "properties": {name: properties[name] for name in kept},
            "required": kept,
            "additionalProperties": False,
        }
        function = {"name": f"do_{number}", "description": f"Does the thing number {number}.", "strict": strict}
        found.append({"type": "function", "function": function | {"parameters": parameters}})
    return found


def post(server: Server, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request; an error of the server is one too."""
    body = json.dumps({"model": server.model["name"]} | fields).encode()
    request = urllib.request.Request(f"http://{HOST}:{server.port}{path}", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: dict[str, Any] = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        found = json.loads(error.read())
    return found


def median_itl(answers: list[Answer]) -> float:
    """Return the median of the milliseconds between tokens."""
    return 1e3 * statistics.median(itl for answer in answers for itl in answer.itls)


def overhead(server: Server, rounds: int, output_len: int) -> dict[str, dict[str, float]]:
    """Compare chats with tools with completions of the same prompt: time of a step, time to the first token."""
    ways: dict[str, tuple[bool, dict[str, Any]]] = {
        "auto": (False, {}),
        "auto, strict": (True, {}),
        "required, strict": (True, {"tool_choice": "required"}),
        "none": (False, {"tool_choice": "none"}),
    }
    # tokens of the frame of a call have no text
    common = {"max_tokens": output_len, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def asked(strict: bool, way: dict[str, Any], first: int = 0) -> tuple[dict[str, Any], int]:
        read = {
            "messages": [{"role": "user", "content": "Tell me a story of a king."}],
            "tools": tools(20, strict=strict, first=first),
        }
        tokens = post(server, "/tokenize", read)["tokens"]
        text = {"prompt": post(server, "/detokenize", {"tokens": tokens})["prompt"], "add_special_tokens": False}
        return {TEXT: text, CHAT: read | way}, len(tokens)

    async def several(path: str, fields: dict[str, Any], clients: int) -> list[Answer]:
        return list(await asyncio.gather(*(server.stream(path, fields | common) for _ in range(clients))))

    results: dict[str, dict[str, float]] = {}
    for name, way in ways.items():
        fields, tokens = asked(*way)
        for path in fields:
            asyncio.run(several(path, fields[path], 1))
        steps, firsts, news, base = [], [], [], []
        for number in range(rounds):
            order = (TEXT, CHAT)[:: 1 if number % 2 else -1]
            batch = {path: median_itl(asyncio.run(several(path, fields[path], CLIENTS))) for path in order}
            alone = {path: asyncio.run(several(path, fields[path], 1))[0].ttft for path in order * 2}
            fresh, _ = asked(*way, first=20 * (1 + number))
            new = {path: asyncio.run(several(path, fresh[path] | {"cache_salt": path}, 1))[0].ttft for path in order}
            base.append(batch[TEXT])
            steps.append(batch[CHAT] / batch[TEXT])
            firsts.append(1e3 * (alone[CHAT] - alone[TEXT]))
            news.append(1e3 * (new[CHAT] - new[TEXT]))
        row = results[name] = {
            "step_ratio": statistics.median(steps),
            "step_ms": statistics.median(base),
            "first_token_ms": statistics.median(firsts),
            "first_token_of_new_tools_ms": statistics.median(news),
            "prompt_tokens": tokens,
        }
        click.echo(
            f"20 tools, {name:<17} {row['prompt_tokens']:>5.0f} tokens; a step of {CLIENTS} {row['step_ms']:6.2f} ms, "
            f"with tools x{row['step_ratio']:.3f} ({verdict(row['step_ratio'] <= MAX_OVERHEAD)}); first token "
            f"{row['first_token_ms']:+6.1f} ms ({verdict(row['first_token_ms'] <= MAX_FIRST_MS)}), of tools that the "
            f"server has not seen {row['first_token_of_new_tools_ms']:+6.1f} ms"
        )
    return results


def large_schema(size: int) -> dict[str, Any]:
    """Return a schema of about `size` bytes."""
    properties: dict[str, Any] = {}
    generator = random.Random(size)
    while size > 0:
        name = f"property_{len(properties)}"
        properties[name] = {"type": "string", "enum": [f"{generator.random()}" for _ in range(10)]}
        size -= len(json.dumps({name: properties[name]}))
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def pauses(server: Server, sizes: list[int]) -> dict[str, float]:
    """Return the longest milliseconds between two tokens of a stream beside schemas of some sizes; 0: beside none."""
    results = {}
    for size in (0, *sizes):
        schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": large_schema(size)}}
        request = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 8, "response_format": schema}

        async def run(request: dict[str, Any] = request, size: int = size) -> tuple[Answer, str, float]:
            stream = asyncio.create_task(
                server.stream(TEXT, {"prompt": "A story:", "max_tokens": 400, "temperature": 0, "ignore_eos": True})
            )
            await asyncio.sleep(0.5)
            started, said = time.perf_counter(), ""
            if size:
                answer = await asyncio.to_thread(post, server, CHAT, request)
                said = answer["error"]["message"][:60] if "error" in answer else answer["choices"][0]["finish_reason"]
            seconds = time.perf_counter() - started
            return await stream, said, seconds

        answer, said, seconds = asyncio.run(run())
        longest = results[f"{size}"] = 1e3 * max(answer.itls)
        more = longest - results["0"]  # a busy machine has pauses of its own
        click.echo(
            f"schema of {size:>9,} bytes: longest pause {longest:6.1f} ms, {more:+.1f} against none "
            f"({verdict(more <= MAX_PAUSE_MS)}); answered in {seconds:.2f} s: {said}"
        )
    return results


def valid(server: Server, answers: int) -> dict[str, float]:
    """Ask for calls with `required` and strict schemas; return how many answers hold nothing but valid ones."""
    offered = tools(20, strict=True)
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in offered}
    reasons: dict[str, int] = {}

    def check(number: int) -> None:
        # a few tools at a time, so that many grammars are used
        few = random.Random(number // CLIENTS).sample(offered, 3)
        names = [tool["function"]["name"] for tool in few]
        answer = post(
            server,
            CHAT,
            {
                "messages": [{"role": "user", "content": f"Do the thing number {number}."}],
                "tools": few,
                "tool_choice": "required",
                "parallel_tool_calls": False,
                "max_tokens": 400,
                "temperature": 1.0,
                "seed": number,
            },
        )
        reason = "valid"
        try:
            assert "choices" in answer, answer
            choice = answer["choices"][0]
            if choice["finish_reason"] != "tool_calls" or choice["message"]["content"]:
                reason = f"{choice['finish_reason']}, {len(choice['message'].get('tool_calls') or ())} calls"
            for call in choice["message"]["tool_calls"]:
                assert call["function"]["name"] in names
                jsonschema_rs.validate(schemas[call["function"]["name"]], json.loads(call["function"]["arguments"]))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:200]
        reasons[reason] = reasons.get(reason, 0) + 1

    async def run() -> None:
        numbers = iter(range(answers))

        async def client() -> None:
            for number in numbers:
                await asyncio.to_thread(check, number)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    started = time.perf_counter()
    asyncio.run(run())
    seconds = time.perf_counter() - started
    good = reasons.get("valid", 0)
    word = verdict(good == answers)
    click.echo(f"required, strict: {good} of {answers} valid in {seconds:.0f} s ({word}); {reasons}")
    return {"valid": good, "answers": answers, "seconds": seconds}


def turns(server: Server, count: int) -> dict[str, float]:
    """Run an agent for some turns; return tokens of its prompts, those that were computed, and those that are new."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do all the things."}]
    offered = tools(3, strict=True)
    prompt = new = computed = before = 0
    for turn in range(count + 1):
        answer = post(
            server,
            CHAT,
            {
                "messages": messages,
                "tools": offered,
                "tool_choice": "required" if turn < count else "none",
                "parallel_tool_calls": False,
                "max_tokens": 300,
                "temperature": 0.7,
                "seed": turn,
            },
        )
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        fresh = usage["prompt_tokens"] - before
        click.echo(
            f"turn {turn + 1:>2}: {usage['prompt_tokens']:>5} tokens of the prompt, {fresh:>5} new, "
            f"{usage['prompt_tokens'] - cached:>5} computed"
        )
        if turn:
            prompt, new, computed = (
                prompt + usage["prompt_tokens"],
                new + fresh,
                computed + usage["prompt_tokens"] - cached,
            )
        before = usage["prompt_tokens"] + usage["completion_tokens"]
        message = answer["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls") or ():
            result = f"done: {random.Random(turn).random()}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    bound = new + count * BLOCK_TOKENS
    click.echo(
        f"{count} turns after the first: {computed} of {prompt} tokens computed ({1 - computed / prompt:.1%} from the "
        f"cache), {new} are new ({verdict(computed <= bound)}, at most a block of {BLOCK_TOKENS} more in each turn)"
    )
    return {"prompt": prompt, "computed": computed, "new": new, "hit_rate": 1 - computed / prompt}


@click.command(help=__doc__.split("\n")[0])
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads of the server.")
@click.option("--rounds", default=5, show_default=True, help="Comparisons of each kind of request.")
@click.option("--output-len", default=96, show_default=True)
@click.option("--answers", default=1000, show_default=True, help="Answers that must be valid.")
@click.option("--turns", "num_turns", default=10, show_default=True)
@click.option("--schema", "sizes", multiple=True, type=int, default=(60_000, 1_000_000), show_default=True)
@click.option("--option", "options", multiple=True, help="Option of `minifloat serve`.")
@click.option("--only", default="overhead,pause,valid,turns", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(model: Path, threads: int, only: str, json_path: Path | None, **settings: Any) -> None:
    """Measure a server for the checkpoint MODEL."""
    bound_spin()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    facts = instruction_sets.machine(threads)
    click.echo(instruction_sets.describe(facts))
    chosen = only.split(",")
    results: dict[str, Any] = {}
    with Server(model, threads, ("--max-num-seqs", "16", *settings["options"])) as server:
        if "turns" in chosen:
            results["turns"] = turns(server, settings["num_turns"])
        if "overhead" in chosen:
            results["overhead"] = overhead(server, settings["rounds"], settings["output_len"])
        if "pause" in chosen:
            results["pause"] = pauses(server, list(settings["sizes"]))
        if "valid" in chosen:
            results["valid"] = valid(server, settings["answers"])
    if json_path:
        json_path.write_text(json.dumps({"machine": facts, "settings": settings, "results": results}, indent=1))


if __name__ == "__main__":
    main()
