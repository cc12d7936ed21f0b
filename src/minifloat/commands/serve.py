"""The command `serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from minifloat.commands.options import MODEL, SPECULATE, env_option
from minifloat.commands.options_from import GroupedCommand, build, options_from
from minifloat.engine.options import EngineOptions
from minifloat.errors import UsageError
from minifloat.kernels.processors import TeamOptions
from minifloat.serve import vllm_options as vllm
from minifloat.serve.server.settings import ServerSettings

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(cls=GroupedCommand)
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
@env_option("--served-model-name", metavar="NAME", help="Name of the model in requests.  [default: its name or id]")
@env_option("--api-key", multiple=True, metavar="KEY", help="Accept this key; repeatable. Other users see arguments!")
@env_option("--api-key-file", type=_FILE, help="Accept the keys in this file, one per line.")
@env_option("--chat-template", type=_FILE, help="A Jinja file instead of the model's chat template.")
@options_from(
    ServerSettings,
    without=("model_name", "api_keys", "chat_template", "max_header_bytes", "threads", "numa"),
    group="Server",
    environment=True,
    allowed_hosts={"flags": ("--allowed-host",), "metavar": "NAME"},
    max_body_bytes={"flags": ("--max-body-size",)},
    quiet={"flags": ("--quiet", "-q")},
)
@options_from(TeamOptions, group="Engine", environment=True)
@options_from(EngineOptions, without=("runner", "impl"), group="Engine", environment=True, speculate=SPECULATE)
@options_from(vllm.VllmOptions, only=vllm.ONLY_VLLM, group="vLLM", environment=True)
@env_option("--print-command", is_flag=True, help="Print vLLM's command, and start nothing.")
def serve(model: str, vllm_arguments: tuple[str, ...], engine: str, **values: Any) -> None:
    """Serve the checkpoint MODEL behind OpenAI's and Anthropic's APIs, with a status page at /.

    Every option is an environment variable too: --max-model-len is MINIFLOAT_MAX_MODEL_LEN. SIGTERM and Ctrl-C finish
    the admitted requests; a second one ends at once.

    With --engine vllm, MODEL is checked, vLLM's command is printed, and this process becomes vLLM, from this
    environment or another. Everything after -- is for vLLM.
    """
    if engine == "vllm":
        _serve_with_vllm(model, vllm_arguments, values)
    else:
        _refuse_vllm_options(vllm_arguments)
        _require_extra()
        _serve_here(model, values)


def _stated(*sources: ParameterSource) -> dict[str, str]:
    """Return the options whose values come from `sources`: the name of the parameter -> its flag."""
    ctx = click.get_current_context()
    options = (parameter for parameter in ctx.command.params if isinstance(parameter, click.Option))
    return {
        str(option.name): option.opts[0] for option in options if ctx.get_parameter_source(str(option.name)) in sources
    }


def _serve_with_vllm(model: str, arguments: tuple[str, ...], values: dict[str, Any]) -> None:
    from minifloat.serve.server.settings import collect_api_keys
    from minifloat.serve.vllm import command_text, serve_with_vllm

    stated = _stated(ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    if foreign := [flag for name, flag in stated.items() if name not in {*vllm.ACCEPTED, "print_command"}]:
        raise UsageError(
            f"{', '.join(foreign)}: not with --engine vllm, which lacks this option or defines it differently; "
            "give vLLM's own options after --"
        )
    keys = collect_api_keys(values["api_key"], values["api_key_file"])
    if len(keys) > 1:
        raise UsageError(f"vLLM accepts one API key, got {len(keys)}")
    options = build(
        vllm.VllmOptions,
        values,
        model=model,
        api_key=keys[0] if keys else None,
        settings=vllm.translate({name: values[name] for name in values if name in stated}),
        arguments=arguments,
    )
    if values["print_command"]:
        click.echo(command_text(options))
    else:
        serve_with_vllm(options)


def _refuse_vllm_options(vllm_arguments: tuple[str, ...]) -> None:
    """Refuse options that minifloat's own engine does not have."""
    stated = _stated(ParameterSource.COMMANDLINE)
    flags = [flag for name, flag in stated.items() if name in {*vllm.ONLY_VLLM, "print_command"}]
    if flags or vllm_arguments:
        raise UsageError(f"{' '.join([*flags, *vllm_arguments])}: only with --engine vllm")


def _serve_here(model: str, values: dict[str, Any]) -> None:
    """Serve with minifloat's own engine."""
    from minifloat.checkpoint.hub import model_name
    from minifloat.serve.server.settings import read_api_keys, read_template
    from minifloat.serve.server.start import serve_checkpoint

    template = values.pop("chat_template")
    settings = build(
        ServerSettings,
        values,
        model_name=values["served_model_name"] or model_name(model),
        api_keys=read_api_keys(values["api_key"], values["api_key_file"]),
        chat_template=None if template is None else read_template(template),
    )
    serve_checkpoint(
        model,
        settings,
        build(EngineOptions, values),
        revision=values["revision"],
    )


def _require_extra() -> None:
    """Check that the packages of the extra `serve` are installed, before a model is loaded."""
    import importlib.util

    missing = [name for name in ("fastapi", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"serving needs {', '.join(missing)}; pip install 'minifloat[serve]'")
