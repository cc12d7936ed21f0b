"""vLLM as the engine: a process in its own environment, watched, and never imported.

    options.py      `VllmOptions`, and their translation from the options of `minifloat serve`
    command.py      the command that runs vLLM
    preflight.py    the version of vLLM, the hardware, and whether vLLM will load the checkpoint
    log.py          facts from vLLM's log: the last lines, the first error, the kernels
    supervise.py    a child process with its process group
    launch.py       `serve_with_vllm`: from the checks to the exit status

Engine, API and metrics are vLLM's own.
"""

from __future__ import annotations

from minifloat.serve.vllm.command import Command, command_of
from minifloat.serve.vllm.launch import serve_with_vllm
from minifloat.serve.vllm.options import VllmOptions

__all__ = ["Command", "VllmOptions", "command_of", "serve_with_vllm"]
