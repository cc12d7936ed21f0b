"""The command that runs vLLM: the same one is printed and executed.

Source: vLLM 0.32.0, `entrypoints/cli/serve.py`, `engine/arg_utils.py`.
"""

from __future__ import annotations

import math
import os
import shlex
from dataclasses import dataclass, field

from minifloat.checkpoint.hub.ids import hub_id
from minifloat.serve.vllm.options import VllmOptions

_KEY_VARIABLE = "VLLM_API_KEY"


@dataclass(frozen=True)
class Command:
    """The command of a process."""

    argv: tuple[str, ...]
    secrets: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return " ".join([*(f"{name}=..." for name, _ in self.secrets), shlex.join(self.argv)])

    def full_environment(self) -> dict[str, str]:
        """Return the environment of this process with the variables of the command."""
        return {**os.environ, **dict(self.secrets)}


def command_of(options: VllmOptions) -> Command:
    """Return the command of vLLM's server."""
    origin = hub_id(options.model, options.revision)
    argv = [*options.program, options.model if origin is None else origin.repo_id]
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
    key = () if options.api_key is None or not options.has_api else ((_KEY_VARIABLE, options.api_key),)
    return Command((*argv, *options.arguments), key)
