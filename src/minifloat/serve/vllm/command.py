"""What is run on each node. What is printed and what is executed are made here, once.

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
    """A process.

    Attributes:
        argv: Program and arguments.
        environment: Variables that are set for it.
        secrets: Variables that are set for it and never shown.
        port: Where it is ready once it listens there; None: it is no server, or one with a /health.
        name: Whose process it is.
    """

    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    port: int | None = None
    name: str = "vLLM"

    def __str__(self) -> str:
        shown = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        hidden = [f"{name}=..." for name, _ in self.secrets]
        return " ".join([*shown, *hidden, shlex.join(self.argv)])

    def full_environment(self) -> dict[str, str]:
        """This process' own environment with that of the command."""
        return {**os.environ, **dict(self.environment), **dict(self.secrets)}


@dataclass(frozen=True)
class Node:
    """A machine and what runs on it: the last command is waited for, those before it run beside it.

    Attributes:
        title: What it is.
        commands: In the order in which they are started.
        has_api: Whether the last one answers requests.
    """

    title: str
    commands: tuple[Command, ...]
    has_api: bool


def nodes(options: VllmOptions) -> tuple[Node, ...]:
    """What runs on each node, the head first."""
    if options.nodes == 1:
        return (Node("this node", (_serve(options),), has_api=True),)
    titles = [f"node {rank} of {options.nodes}" for rank in range(options.nodes)]
    titles[0] += f", the head: {options.master_addr}"
    if options.multi_node == "ray":
        return tuple(_ray(options, titles))
    return tuple(
        Node(title, (_serve(options, *_own_nodes(options, rank), headless=rank > 0),), has_api=rank == 0)
        for rank, title in enumerate(titles)
    )


def render(made: tuple[Node, ...]) -> str:
    """The commands as a shell takes them, a block per node."""
    return "\n\n".join("\n".join([f"# {node.title}", *_lines(node)]) for node in made)


def _lines(node: Node) -> list[str]:
    *beside, last = map(str, node.commands)
    return [*(f"{line} &" for line in beside), last]


def _serve(
    options: VllmOptions, *more: str, headless: bool = False, environment: tuple[tuple[str, str], ...] = ()
) -> Command:
    """The server itself."""
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


def _own_nodes(options: VllmOptions, rank: int) -> list[str]:
    return [
        *("--nnodes", str(options.nodes)),
        *("--node-rank", str(rank)),
        *("--master-addr", str(options.master_addr)),
    ]


def _ray(options: VllmOptions, titles: list[str]) -> Iterator[Node]:
    """Ray on every node, and vLLM on the head, which finds the others through it.

    Ray stays in the foreground (--block), so that it ends with what started it. Its dashboard, which runs what it is
    sent, listens on loopback only.
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
    """Ray's command, which lies beside vLLM's."""
    beside = Path(options.vllm_python or options.vllm_bin)
    return str(beside.with_name("ray")) if beside.parent != Path() else "ray"
