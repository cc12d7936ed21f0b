from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_vllm
import pytest
from vllm_process import Serving


@pytest.fixture
def vllm_bin(tmp_path: Path) -> Path:
    """Path of a command that runs the fake vLLM."""
    command = tmp_path / "bin" / "vllm"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{Path(fake_vllm.__file__).read_text()}")
    command.chmod(0o755)
    return command


@pytest.fixture(scope="session")
def served_folder(make_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 Llama whose sizes every kernel of vLLM accepts."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    return make_llama(tmp_path_factory.mktemp("served") / "llama", **sizes)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serving(tmp_path: Path, vllm_bin: Path, port: int, served_folder: Path) -> Iterator[Callable[..., Serving]]:
    """A function that starts a server: ``serving(*options, model=..., **environment)``. The test's end kills all."""
    started: list[Serving] = []

    def start(
        *options: str,
        model: Path = served_folder,
        program: tuple[str, ...] = ("-m", "minifloat"),
        leaves_at: str | None = None,
        **environment: str,
    ) -> Serving:
        folder = tmp_path / "noted"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        arguments = ["--vllm-bin", str(vllm_bin), "--hardware", "cpu", str(model), *options]
        started.append(Serving(folder, port, program, arguments, environment, leaves_at))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        with contextlib.suppress(OSError, ValueError):
            for pid in map(int, (server.folder / "pids").read_text().split()):
                os.kill(pid, signal.SIGKILL)
