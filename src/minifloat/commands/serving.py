"""The commands `serve` and `chat`.

Options of `serve` are environment variables too: ``--max-model-len`` is ``MINIFLOAT_MAX_MODEL_LEN``. Nothing heavy is
imported before a command runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from minifloat.commands.options import MODEL
from minifloat.errors import UsageError

_Command = TypeVar("_Command", bound=Callable[..., Any])

_SIZE_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

_FILE = click.Path(path_type=Path, dir_okay=False)
_COUNT = click.IntRange(min=1)
_SECONDS = click.FloatRange(min=0)
_POSITIVE = click.FloatRange(min=0, min_open=True)


def parse_size(text: str) -> int:
    """Bytes from ``8GiB``, ``500 MB`` or a plain number.

    Raises:
        UsageError: It is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)?", text.strip())
    if match is None:
        raise UsageError(f"expected a size such as 8GiB or 500MB, got {text!r}")
    return int(float(match[1]) * _SIZE_UNITS[match[2] or ""])


def _option(name: str, *names: str, **settings: Any) -> Callable[[_Command], _Command]:
    """An option with its environment variable."""
    variable = "MINIFLOAT_" + name.removeprefix("--").replace("-", "_").upper()
    return click.option(name, *names, envvar=variable, **settings)


def _of_vllm(command: _Command) -> _Command:
    """The options that only vLLM has."""
    options = (
        _option("--vllm-bin", default="vllm", metavar="PATH", help="vLLM's command.  [default: that on PATH]"),
        _option("--vllm-python", metavar="PATH", help="The Python of vLLM's environment, in place of its command."),
        _option("--hardware", metavar="NAME", help="As for `check`.  [default: found out]"),
        _option("--tensor-parallel-size", default=1, type=_COUNT, help="Devices that share every matrix."),
        _option("--pipeline-parallel-size", default=1, type=_COUNT, help="Groups of devices that share the layers."),
        _option("--nodes", default=1, type=_COUNT, help="Machines that share the model."),
        _option("--node-rank", default=0, type=click.IntRange(min=0), help="Which of them this is; 0 has the API."),
        _option("--master-addr", metavar="HOST", help="The address of node 0."),
        _option("--multi-node", type=click.Choice(["vllm", "ray"]), default="vllm", help="How nodes find each other."),
        _option(
            "--startup-timeout", default=600.0, show_default=True, type=_POSITIVE, help="Seconds until it answers."
        ),
        _option("--allow-unquantized", is_flag=True, help="Serve even if vLLM runs quantized weights unquantized."),
        _option("--print-command", is_flag=True, help="Print what would run on each node, and start nothing."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("model", type=MODEL)
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENTS...]")
@_option(
    "--engine", type=click.Choice(["minifloat", "vllm"]), default="minifloat", show_default=True, help="Who computes."
)
@_option("--revision", metavar="REV", help="Branch, tag or commit of MODEL on the hub; MODEL@REV is the same.")
@_option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every address.")
@_option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@_option("--served-model-name", metavar="NAME", help="What requests call the model.  [default: its name or id]")
@_option("--api-key", multiple=True, metavar="KEY", help="Ask for one of these keys; repeatable. Others see arguments!")
@_option("--api-key-file", type=_FILE, help="Ask for one of the keys in this file, one per line.")
@_option("--allowed-host", multiple=True, metavar="NAME", help="Host name to answer to; repeatable.")
@_option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@_option("--dtype", metavar="NAME", help="bfloat16, float16 or float32, of activations.  [default: config.json's]")
@_option("--max-model-len", type=_COUNT, metavar="TOKENS", help="Longest prompt and answer.  [default: what fits]")
@_option("--max-num-seqs", default=64, show_default=True, type=_COUNT, help="Requests that run at a time.")
@_option("--max-num-batched-tokens", type=_COUNT, help="Tokens of one step.  [default: 512; 4096 on a GPU]")
@_option("--max-num-queued-reqs", default=256, show_default=True, type=click.IntRange(min=0), help="Then 503.")
@_option(
    "--kv-cache-memory", metavar="SIZE", help="Memory of the KV cache, e.g. 4GiB.  [default: up to 1GiB; most of a GPU]"
)
@_option("--kv-cache-dtype", default="auto", show_default=True, help="auto, bfloat16, fp8 or float32.")
@_option("--lm-head", default="auto", show_default=True, help="auto, or fp8: quantize the output layer.")
@_option("--no-prefix-cache", is_flag=True, help="Do not share equal beginnings of prompts.")
@_option("--chat-template", type=_FILE, help="A Jinja file in place of the model's chat template.")
@_option("--max-body-size", default="8MiB", show_default=True, metavar="SIZE", help="Largest request.")
@_option("--max-prompt-characters", type=_COUNT, help="Longest prompt to tokenize.  [default: 32 per token of context]")
@_option("--max-connections", default=2048, show_default=True, type=_COUNT, help="Open connections; then 503.")
@_option(
    "--request-timeout",
    default=600.0,
    show_default=True,
    type=_POSITIVE,
    help="Seconds for one answer.",
)
@_option("--shutdown-timeout", default=30.0, show_default=True, type=_SECONDS, help="Seconds to finish at SIGTERM.")
@_option("--threads", type=_COUNT, help="Threads to compute with.  [default: torch's]")
@_option("--quiet", "-q", is_flag=True, help="Log warnings only, not every request.")
@_of_vllm
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    model: str,
    vllm_arguments: tuple[str, ...],
    engine: str,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    **options: Any,
) -> None:
    """Serve the checkpoint MODEL behind OpenAI's API, with a status page at /.

    Every option is an environment variable too: --max-model-len is MINIFLOAT_MAX_MODEL_LEN. SIGTERM and Ctrl-C finish
    what was admitted; a second one ends at once.

    With --engine vllm, a vLLM that is installed elsewhere serves it: MODEL is checked, vLLM is started, watched and
    ended. The options from --vllm-bin on are for it, and so is what follows --.
    """
    from minifloat.serve.server.settings import collect_api_keys, read_api_keys

    given = _given(ctx)
    if options["kv_cache_memory"] is not None:
        options["kv_cache_memory"] = parse_size(options["kv_cache_memory"])
    if engine == "vllm":
        _serve_with_vllm(model, options, given, collect_api_keys(api_key, api_key_file), vllm_arguments)
        return
    options = _without_vllm(ctx, options, vllm_arguments)
    _require_extra()
    _serve_here(model, read_api_keys(api_key, api_key_file), **options)


def _given(ctx: click.Context) -> frozenset[str]:
    """The options that the user gave, as arguments or in the environment."""
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) not in defaults)


def _serve_with_vllm(
    model: str, options: dict[str, Any], given: frozenset[str], keys: tuple[str, ...], arguments: tuple[str, ...]
) -> None:
    from minifloat.serve.vllm import nodes, render, serve_with_vllm
    from minifloat.serve.vllm.options import vllm_options

    wanted = vllm_options(model, options, given, keys, arguments)
    if options["print_command"]:
        click.echo(render(nodes(wanted)))
    else:
        sys.exit(serve_with_vllm(wanted))


def _without_vllm(ctx: click.Context, options: dict[str, Any], arguments: tuple[str, ...]) -> dict[str, Any]:
    """The options of our engine.

    Raises:
        UsageError: One was given that only vLLM has. In the environment it is no mistake: there it may be for others.
    """
    from minifloat.serve.vllm.options import ONLY_VLLM, flag

    foreign = [name for name in ONLY_VLLM if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if foreign or arguments:
        named = [*map(flag, foreign), *arguments]
        raise UsageError(f"{' '.join(named)}: only with --engine vllm")
    return {name: value for name, value in options.items() if name not in ONLY_VLLM}


def _serve_here(
    model: str,
    api_keys: frozenset[bytes],
    *,
    host: str,
    port: int,
    served_model_name: str | None,
    allowed_host: tuple[str, ...],
    max_num_queued_reqs: int,
    no_prefix_cache: bool,
    chat_template: Path | None,
    max_body_size: str,
    max_prompt_characters: int | None,
    max_connections: int,
    request_timeout: float,
    shutdown_timeout: float,
    threads: int | None,
    quiet: bool,
    **engine: Any,
) -> None:
    from minifloat.hub import model_name
    from minifloat.serve.server.settings import ServerSettings, read_template
    from minifloat.serve.server.start import serve_checkpoint

    settings = ServerSettings(
        model_name=served_model_name or model_name(model),
        host=host,
        port=port,
        api_keys=api_keys,
        allowed_hosts=allowed_host,
        chat_template=None if chat_template is None else read_template(chat_template),
        max_body_bytes=parse_size(max_body_size),
        max_prompt_characters=max_prompt_characters,
        max_connections=max_connections,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
    )
    serve_checkpoint(
        model,
        settings,
        max_queue=max_num_queued_reqs,
        threads=threads,
        quiet=quiet,
        prefix_cache=not no_prefix_cache,
        **engine,
    )


def _require_extra() -> None:
    """Say what is missing before a model is loaded.

    Raises:
        UsageError: The packages of the extra `serve` are not installed.
    """
    import importlib.util

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}; pip install 'minifloat[serve]'")


@click.command()
@click.argument("url", default="http://127.0.0.1:8000")
@_option("--api-key", metavar="KEY", help="The server's key; better in the environment.")
@click.option("--system", metavar="TEXT", help="What the model is told first.")
@click.option("--model", metavar="NAME", help="Its name on the server.  [default: the server's first]")
@click.option("--temperature", type=click.FloatRange(min=0), help="0: greedy.  [default: the model's]")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True))
@click.option("--max-tokens", "-n", type=_COUNT, help="Tokens of an answer.  [default: to the end of the context]")
@click.option("--seed", type=int)
@click.option("--stats", is_flag=True, help="Show tokens per second after each answer.")
def chat(
    url: str,
    api_key: str | None,
    system: str | None,
    model: str | None,
    stats: bool,
    **sampling: Any,
) -> None:
    """Talk to the server at URL, line by line.

    /quit ends, /reset forgets the conversation, /system TEXT begins a new one with these instructions. Ctrl-C stops an
    answer.
    """
    from minifloat.serve.client import ChatClient, converse

    chosen = {name: value for name, value in sampling.items() if value is not None}
    converse(ChatClient(url, api_key=api_key, model=model, sampling=chosen), system=system, stats=stats)
