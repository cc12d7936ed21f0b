"""The command `serve`.

Every option is an environment variable too: ``--max-model-len`` is ``MINIFLOAT_MAX_MODEL_LEN``. Nothing heavy is
imported before the command runs.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import click
from click.core import ParameterSource

from minifloat.commands.options import (
    COUNT,
    MODEL,
    POSITIVE,
    SIZE,
    SpeculationParams,
    deterministic_option,
    engine_activations_option,
    env_option,
    lm_head_option,
    packed_cache_option,
    pass_params,
    speculation_options,
    stack,
)
from minifloat.errors import UsageError

_FILE = click.Path(path_type=Path, dir_okay=False)
_SECONDS = click.FloatRange(min=0)


@dataclass(frozen=True)
class _VllmParams:
    """Parameters of `serve` that only vLLM has; `minifloat.serve.vllm.VllmOptions` describes them."""

    vllm_bin: str | None
    vllm_python: str | None
    hardware: str | None
    tensor_parallel_size: int
    pipeline_parallel_size: int
    startup_timeout: float
    allow_unquantized: bool
    print_command: bool


_vllm_options = stack(
    env_option("--vllm-bin", metavar="PATH", help="The vllm command.  [default: vLLM beside minifloat, or on PATH]"),
    env_option("--vllm-python", metavar="PATH", help="Python of vLLM's environment, instead of the vllm command."),
    env_option("--hardware", metavar="NAME", help="As for `check`.  [default: detected]"),
    env_option("--tensor-parallel-size", default=1, type=COUNT, help="Devices that share every matrix."),
    env_option("--pipeline-parallel-size", default=1, type=COUNT, help="Groups of devices that share the layers."),
    env_option(
        "--startup-timeout", default=600.0, show_default=True, type=POSITIVE, help="Seconds until vLLM must answer."
    ),
    env_option("--allow-unquantized", is_flag=True, help="Serve even if vLLM runs quantized weights unquantized."),
    env_option("--print-command", is_flag=True, help="Print vLLM's command, and start nothing."),
)


@dataclass(frozen=True)
class ServeParams(_VllmParams, SpeculationParams):
    """The parameters of `serve`, under the names of its options."""

    model: str
    vllm_arguments: tuple[str, ...]
    engine: str
    revision: str | None
    host: str
    port: int
    served_model_name: str | None
    api_key: tuple[str, ...]
    api_key_file: Path | None
    allowed_host: tuple[str, ...]
    device: str
    dtype: str | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    max_num_queued_reqs: int
    kv_cache_memory: int | None
    kv_cache_dtype: str
    lm_head: str
    activations: str
    packed_cache: Path | None
    no_prefix_cache: bool
    deterministic: bool
    chat_template: Path | None
    max_body_size: int
    max_prompt_characters: int | None
    max_connections: int
    keep_alive_timeout: float
    read_timeout: float
    write_timeout: float
    request_timeout: float
    shutdown_timeout: float
    threads: int | None
    quiet: bool


@click.command()
@click.argument("model", type=MODEL)
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- VLLM_ARGUMENTS...]")
@env_option(
    "--engine",
    type=click.Choice(["minifloat", "vllm"]),
    default="minifloat",
    show_default=True,
    help="Engine that computes.",
)
@env_option("--revision", metavar="REV", help="Branch, tag or commit of MODEL on the hub; MODEL@REV is the same.")
@env_option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is every address.")
@env_option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@env_option("--served-model-name", metavar="NAME", help="Name of the model in requests.  [default: its name or id]")
@env_option("--api-key", multiple=True, metavar="KEY", help="Accept this key; repeatable. Other users see arguments!")
@env_option("--api-key-file", type=_FILE, help="Accept the keys in this file, one per line.")
@env_option("--allowed-host", multiple=True, metavar="NAME", help="Host name to answer to; repeatable.")
@env_option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@env_option("--dtype", metavar="NAME", help="bfloat16, float16 or float32, of activations.  [default: config.json's]")
@env_option("--max-model-len", type=COUNT, metavar="TOKENS", help="Longest prompt and answer.  [default: what fits]")
@env_option("--max-num-seqs", default=64, show_default=True, type=COUNT, help="Requests that run at a time.")
@env_option("--max-num-batched-tokens", type=COUNT, help="Tokens per step.  [default: 512; 4096 on a GPU]")
@env_option(
    "--max-num-queued-reqs",
    default=256,
    show_default=True,
    type=click.IntRange(min=0),
    help="Requests that may wait; more get 503.",
)
@env_option(
    "--kv-cache-memory",
    type=SIZE,
    metavar="SIZE",
    help="Memory of the KV cache and of states of sequences, e.g. 4GiB.  [default: up to 1GiB; most of a GPU]",
)
@env_option("--kv-cache-dtype", default="auto", show_default=True, help="auto, bfloat16, fp8 or float32.")
@lm_head_option(option=env_option)
@engine_activations_option(option=env_option)
@packed_cache_option()
@speculation_options
@env_option("--no-prefix-cache", is_flag=True, help="Do not share equal beginnings of prompts.")
@deterministic_option(env_option)
@env_option("--chat-template", type=_FILE, help="A Jinja file instead of the model's chat template.")
@env_option("--max-body-size", default="8MiB", show_default=True, type=SIZE, metavar="SIZE", help="Largest request.")
@env_option(
    "--max-prompt-characters", type=COUNT, help="Longest prompt to tokenize.  [default: 32 per token of context]"
)
@env_option(
    "--max-connections",
    default=2048,
    show_default=True,
    type=COUNT,
    help="Open connections; idle ones make room, then 503.",
)
@env_option(
    "--keep-alive-timeout",
    default=30.0,
    show_default=True,
    type=POSITIVE,
    help="Seconds until an idle connection is closed; more than a proxy keeps it.",
)
@env_option("--read-timeout", default=30.0, show_default=True, type=POSITIVE, help="Seconds for a head, for a body.")
@env_option(
    "--write-timeout", default=30.0, show_default=True, type=POSITIVE, help="Seconds to take 64 KiB of an answer."
)
@env_option("--request-timeout", default=600.0, show_default=True, type=POSITIVE, help="Seconds for one answer.")
@env_option("--shutdown-timeout", default=30.0, show_default=True, type=_SECONDS, help="Seconds to finish at SIGTERM.")
@env_option("--threads", type=COUNT, help="Threads to compute with.  [default: torch's]")
@env_option("--quiet", "-q", is_flag=True, help="Log warnings only, not every request.")
@_vllm_options
@pass_params(ServeParams)
def serve(params: ServeParams) -> None:
    """Serve the checkpoint MODEL behind OpenAI's API, with a status page at /.

    Every option is an environment variable too: --max-model-len is MINIFLOAT_MAX_MODEL_LEN. SIGTERM and Ctrl-C finish
    the admitted requests; a second one ends at once.

    With --engine vllm, vLLM serves it, from this environment or another: MODEL is checked, vLLM is started, watched and
    ended. The options from --vllm-bin on, and everything after --, are for vLLM.
    """
    if params.engine == "vllm":
        _serve_with_vllm(params)
    else:
        _refuse_vllm_options(params)
        _require_extra()
        _serve_here(params)


def _serve_with_vllm(params: ServeParams) -> None:
    from minifloat.serve.server.settings import collect_api_keys
    from minifloat.serve.vllm import command_of, serve_with_vllm
    from minifloat.serve.vllm.options import vllm_options

    ctx = click.get_current_context()
    defaults = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    stated = {name for name in ctx.params if ctx.get_parameter_source(name) not in defaults}
    values = {
        name: value for name, value in asdict(params).items() if name not in ("model", "vllm_arguments", "engine")
    }
    keys = collect_api_keys(params.api_key, params.api_key_file)
    options = vllm_options(params.model, values, stated, keys, params.vllm_arguments)
    if params.print_command:
        click.echo(command_of(options))
    else:
        sys.exit(serve_with_vllm(options))


def _refuse_vllm_options(params: ServeParams) -> None:
    """Refuse options that minifloat's own engine does not have.

    Environment variables of vLLM's options are ignored, since they may be set for other runs.
    """
    ctx = click.get_current_context()
    names = [field.name for field in fields(_VllmParams)]
    stated = [name for name in names if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if stated or params.vllm_arguments:
        from minifloat.serve.vllm.options import flag

        raise UsageError(f"{' '.join([*map(flag, stated), *params.vllm_arguments])}: only with --engine vllm")


def _serve_here(params: ServeParams) -> None:
    """Serve with minifloat's own engine."""
    from minifloat.checkpoint.hub import model_name
    from minifloat.serve.server.settings import ServerSettings, read_api_keys, read_template
    from minifloat.serve.server.start import serve_checkpoint

    settings = ServerSettings(
        model_name=params.served_model_name or model_name(params.model),
        host=params.host,
        port=params.port,
        api_keys=read_api_keys(params.api_key, params.api_key_file),
        allowed_hosts=params.allowed_host,
        chat_template=None if params.chat_template is None else read_template(params.chat_template),
        max_body_bytes=params.max_body_size,
        max_prompt_characters=params.max_prompt_characters,
        max_connections=params.max_connections,
        keep_alive_timeout=params.keep_alive_timeout,
        read_timeout=params.read_timeout,
        write_timeout=params.write_timeout,
        request_timeout=params.request_timeout,
        shutdown_timeout=params.shutdown_timeout,
    )
    serve_checkpoint(
        params.model,
        settings,
        max_queue=params.max_num_queued_reqs,
        threads=params.threads,
        quiet=params.quiet,
        prefix_cache=not params.no_prefix_cache,
        revision=params.revision,
        device=params.device,
        dtype=params.dtype,
        max_model_len=params.max_model_len,
        max_num_seqs=params.max_num_seqs,
        max_num_batched_tokens=params.max_num_batched_tokens,
        kv_cache_memory=params.kv_cache_memory,
        kv_cache_dtype=params.kv_cache_dtype,
        lm_head=params.lm_head,
        activations=params.activations,
        packed_cache=params.packed_cache,
        speculate=params.speculate,
        draft=params.draft,
        draft_tokens=params.draft_tokens,
        deterministic=params.deterministic,
    )


def _require_extra() -> None:
    """Check that the packages of the extra `serve` are installed, before a model is loaded."""
    import importlib.util

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}; pip install 'minifloat[serve]'")
