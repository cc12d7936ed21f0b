"""A real vLLM as the engine: run in its own environment, watched, and never imported.

    options.py      what the user wants;  command.py  what is run for it on each node
    preflight.py    which vLLM that is, on what hardware, and whether it will load the checkpoint
    log.py          what its log says: the last lines, the first error, which kernels it chose
    supervise.py    one child with its process group;  run.py  serve_with_vllm: from the first check to the exit status

What vLLM itself does (engine, API, metrics) is left to it.
"""

from __future__ import annotations

from minifloat.serve.vllm.command import Command, Node, nodes, render
from minifloat.serve.vllm.launch import serve_with_vllm
from minifloat.serve.vllm.options import VllmOptions

__all__ = ["Command", "Node", "VllmOptions", "nodes", "render", "serve_with_vllm"]
