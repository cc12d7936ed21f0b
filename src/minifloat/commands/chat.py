"""The command `chat`. Nothing heavy is imported before it runs."""

from __future__ import annotations

from typing import Any

import click

from minifloat.commands.options import COUNT, env_option


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@env_option("--api-key", metavar="KEY", help="The server's key; better in the environment.")
@click.option("--system", metavar="TEXT", help="System message: instructions to the model.")
@click.option("--model", metavar="NAME", help="Its name on the server.  [default: the server's first]")
@click.option("--temperature", type=click.FloatRange(min=0), help="Of sampling; 0: greedy.  [default: the model's]")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the most probable tokens that have this probability together.  [default: the model's]",
)
@click.option("--max-tokens", "-n", type=COUNT, help="Tokens per answer.  [default: to the end of the context]")
@click.option("--seed", type=int, help="Seed of sampling.  [default: another one each time]")
@click.option("--stats", is_flag=True, help="Show tokens per second after each answer.")
def chat(url: str, api_key: str | None, system: str | None, model: str | None, stats: bool, **sampling: Any) -> None:
    """Talk to the server at URL, line by line.

    /quit ends, /reset forgets the conversation, /system TEXT begins a new one with these instructions. Ctrl-C stops an
    answer.
    """
    from minifloat.serve.client import ChatClient
    from minifloat.serve.client import chat as chat_with

    stated = {name: value for name, value in sampling.items() if value is not None}
    chat_with(ChatClient(url, api_key=api_key, model=model, sampling=stated), system=system, stats=stats)
