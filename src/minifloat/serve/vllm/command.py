"""The commands to run on each node: the same ones are printed and executed.

Source: vLLM 0.32.0, `entrypoints/cli/serve.py` (--headless), `engine/arg_utils.py`; its documentation, "Parallelism and
scaling"; `ray start --help` of Ray 2.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minifloat.hub.ids import hub_id
from minifloat.serve.vllm.options import VllmOptions

_KEY_VARIABLE = "VLLM_API_KEY"
_RAY_PORT = 6379


@dataclass(frozen=True)
class Command:
    """The command of a process.

    Attributes:
        argv: Program and arguments.
        environment: Environment variables to add.
        secrets: Environment variables to add whose values are never shown.
        port: TCP port; the process is ready once it listens there. None: it is no server, or one with /health.
        name: Name of the program in messages.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    port: int | None = None
    name: str = "vLLM"

    def __str__(self) -> str:
        visible = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        hidden = [f"{name}=..." for name, _ in self.secrets]
        return " ".join([*visible, *hidden, shlex.join(self.argv)])

    def full_environment(self) -> dict[str, str]:
        """Return the environment of this process with the variables of the command."""
        return {**os.environ, **dict(self.environment), **dict(self.secrets)}


@dataclass(frozen=True)
class Node:
    """A machine with its commands. The node runs until the last command ends; the others run beside it.

    Attributes:
        title: Name of the node for readers.
        commands: Commands in the order in which they are started.
        has_api: Whether the last command serves the API.
    """

    title: str
    commands: tuple[Command, ...]
    has_api: bool


def nodes(options: VllmOptions) -> tuple[Node, ...]:
    """Return the nodes with their commands, the head first."""
    if options.nodes == 1:
        return (Node("this node", (_serve(options),), has_api=True),)
    titles = [f"node {rank} of {options.nodes}" for rank in range(options.nodes)]
    titles[0] += f", the head: {options.master_addr}"
    if options.multi_node == "ray":
        return tuple(_ray(options, titles))
    return tuple(
        Node(
            title,
            (_serve(options, *_torch_distributed_arguments(options, rank), headless=rank > 0),),
            has_api=rank == 0,
        )
        for rank, title in enumerate(titles)
    )


def render(cluster: tuple[Node, ...]) -> str:
    """Return the commands in shell syntax, a block per node."""
    return "\n\n".join("\n".join([f"# {node.title}", *_lines(node)]) for node in cluster)


def _lines(node: Node) -> list[str]:
    *background, last = map(str, node.commands)
    return [*(f"{line} &" for line in background), last]


def _serve(
    options: VllmOptions, *more: str, headless: bool = False, environment: tuple[tuple[str, str], ...] = ()
) -> Command:
    """Return the command of vLLM's server."""
    origin = hub_id(options.model, options.revision)
    model = options.model if origin is None else origin.repo_id
    if options.vllm_python is not None:
        argv = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    else:
        argv = [options.vllm_bin, "serve", model]
    argv += ["--revision", origin.revision] if origin is not None and origin.revision is not None else []
    argv += ["--host", options.host, "--port", str(options.port), "--served-model-name", options.name]
    argv += ["--shutdown-timeout", str(math.ceil(options.shutdown_timeout))]
    for name, size in (
        ("--tensor-parallel-size", options.tensor_parallel_size),
        ("--pipeline-parallel-size", options.pipeline_parallel_size),
    ):
        argv += [name, str(size)] if size > 1 else []
    for name, value in options.settings:
        argv += [name] if value is None else [name, value]
    argv += [*more, *(["--headless"] if headless else []), *options.arguments]
    key = () if options.api_key is None or headless else ((_KEY_VARIABLE, options.api_key),)
    return Command(tuple(argv), environment, key)


def _torch_distributed_arguments(options: VllmOptions, rank: int) -> list[str]:
    return [
        *("--nnodes", str(options.nodes)),
        *("--node-rank", str(rank)),
        *("--master-addr", str(options.master_addr)),
    ]


def _ray(options: VllmOptions, titles: list[str]) -> Iterator[Node]:
    """Yield nodes that all run Ray; the head also runs vLLM, which finds the other nodes through Ray.

    Ray stays in the foreground (--block), so that it ends with its parent. Its dashboard executes jobs that it is sent,
    so it listens on loopback only.
    """
    ray, cluster = _ray_program(options), f"{options.master_addr}:{_RAY_PORT}"
    head = Command(
        (
            *(ray, "start", "--head", f"--node-ip-address={options.master_addr}", f"--port={_RAY_PORT}"),
            *("--dashboard-host=127.0.0.1", "--block"),
        ),
        port=_RAY_PORT,
        name="Ray",
    )
    serve = _serve(options, "--distributed-executor-backend", "ray", environment=(("RAY_ADDRESS", cluster),))
    yield Node(titles[0], (head, serve), has_api=True)
    for title in titles[1:]:
        yield Node(title, (Command((ray, "start", f"--address={cluster}", "--block"), name="Ray"),), has_api=False)


def _ray_program(options: VllmOptions) -> str:
    """Return the `ray` command in the folder of vLLM's."""
    program = Path(options.vllm_python or options.vllm_bin)
    return str(program.with_name("ray")) if program.parent != Path() else "ray"
