"""Run the blocks of one page, in order, in one temporary folder.

``/tmp`` of the page is a folder of the session, so is the home folder; MODEL is the example model, notes.txt a text. A
command of minifloat alone runs in a process that is forked from one which has imported what the commands import
(multiprocessing's fork server); other commands run in bash. A server runs on a free port until the page ends, or until
the next server starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from doc_blocks import ROOT, Block
from doc_matching import difference, tolerance

_PRELOAD = [
    "torch",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "minifloat.calibration.calibrate",
    "minifloat.commands.compare",
    "minifloat.commands.main",
    "minifloat.evaluate.checkpoint_report",
    "minifloat.evaluate.compare.run",
    "minifloat.quantize.job",
    "minifloat.quantize.rounding",
    "minifloat.report.figures",
    "minifloat.serve.server",
    "minifloat.serve.starting",
]
_SHELL = frozenset("|&;<>$`")
_TIMEOUT = 300


def _forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _redirect(folder: Path, environment: dict[str, str], log: Path) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)


def _minifloat(arguments: list[str], folder: Path, environment: dict[str, str], log: Path) -> None:
    """Run the command line in this process."""
    _redirect(folder, environment, log)
    from minifloat.commands.main import main

    main(arguments, prog_name="minifloat")


def _python(calls: Connection, folder: Path, environment: dict[str, str], log: Path) -> None:
    """Execute the blocks that come, in one namespace, and answer each with its traceback or an empty string."""
    _redirect(folder, environment, log)
    import ast
    import asyncio
    import inspect

    space: dict[str, object] = {"__name__": "__main__"}
    while True:
        source = calls.recv()
        error = ""
        try:
            code = compile(source, "<block>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            value = eval(code, space)
            if inspect.iscoroutine(value):
                asyncio.run(value)
        except BaseException:
            error = traceback.format_exc()
        sys.stdout.flush()
        calls.send(error)


class Session:
    """A page that is being executed; a context manager that ends what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("tmp", "home", "bin"):
            (folder / name).mkdir()
        for name in ("examples", "benchmarks", "scripts", "docs", "constraints.txt"):
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        (folder / "MODEL").symlink_to(ROOT / "examples" / "storybook-4m")
        (folder / "notes.txt").symlink_to(ROOT / "examples" / "texts" / "stories_calibration.txt")
        program = folder / "bin" / "minifloat"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m minifloat "$@"\n')
        program.chmod(0o755)
        python = folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self.environment = {
            "COLUMNS": "240",
            "HOME": str(folder / "home"),
            "NO_COLOR": "1",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        self._processes: list[Any] = []
        self._servers: list[Any] = []
        self._python: tuple[Connection, Path] | None = None
        self._logs = 0
        self.printed = ""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = str(free.getsockname()[1])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_servers()
        for process in self._processes:
            process.terminate()
            process.join(10)
            if process.is_alive():
                process.kill()

    def _stop_servers(self) -> None:
        while self._servers:
            server = self._servers.pop()
            server.terminate()
            server.join(60)

    def _here(self, text: str) -> str:
        return text.replace("/tmp/", f"{self.folder}/tmp/").replace(":8000", f":{self._port}")

    def _there(self, text: str) -> str:
        text = text.replace(f"{self.folder}/tmp/", "/tmp/").replace(f"{self.folder}/", "")
        return text.replace(f":{self._port}", ":8000")

    def _log(self) -> Path:
        self._logs += 1
        return self.folder / f"output-{self._logs}.txt"

    def run(self, command: str) -> tuple[str, int]:
        """Run a command line, and return its output, both streams together, and its exit status."""
        if command.startswith(("pip ", "./scripts/")):
            raise ValueError(f"{command!r} changes the environment: mark its block as not run")
        command = self._here(command)
        arguments = [] if _SHELL & set(command) - set("$") else shlex.split(command)
        if not arguments or arguments[0] != "minifloat" or "$(" in command:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT,
            )
            return self._there(done.stdout), done.returncode
        log = self._log()
        serves = arguments[1:2] == ["serve"] and "--print-command" not in arguments and "--help" not in arguments
        environment = {**self.environment, **({"MINIFLOAT_PORT": self._port} if serves else {})}
        process = _forking().Process(target=_minifloat, args=(arguments[1:], self.folder, environment, log))
        if serves:
            self._stop_servers()
            self._servers.append(process)
        process.start()
        self._processes.append(process)
        if serves:
            return self._wait_for_server(process, log)
        process.join(_TIMEOUT)
        if process.is_alive():
            process.kill()
            return f"did not end within {_TIMEOUT} seconds", -9
        return self._there(log.read_text()), process.exitcode

    def _wait_for_server(self, process: Any, log: Path) -> tuple[str, int]:
        end = time.monotonic() + _TIMEOUT
        while process.is_alive() and time.monotonic() < end:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5).close()
                return "", 0
            time.sleep(0.05)
        return self._there(log.read_text()), process.exitcode or -1

    def python(self, source: str) -> tuple[str, str]:
        """Execute a block of Python, and return its output and its traceback, if any; blocks share their names."""
        if self._python is None:
            ours, theirs = _forking().Pipe()
            log = self._log()
            process = _forking().Process(target=_python, args=(theirs, self.folder, self.environment, log), daemon=True)
            process.start()
            self._processes.append(process)
            self._python = ours, log
        calls, log = self._python
        before = log.stat().st_size if log.exists() else 0
        calls.send(self._here(source))
        if not calls.poll(_TIMEOUT):
            return "", f"did not end within {_TIMEOUT} seconds"
        error = self._there(calls.recv())
        self.printed = self._there(log.read_bytes()[before:].decode())
        return self.printed, error


def failure(session: Session, block: Block) -> str | None:
    """Run a block, and say where it differs from its page; None where it does not."""
    if block.language == "python":
        return session.python(block.first + "\n" + block.text)[1] or None
    if block.printed:
        return difference(block.text, session.printed, tolerance(block.tolerance))
    for line in block.first.splitlines():
        output, status = session.run(line)
        if status:
            return f"$ {line}\nended with status {status}:\n{output}"
    allowed = tolerance(block.tolerance)
    for step in block.steps:
        output, status = session.run(step.command)
        if step.output is None:
            problem = f"ended with status {status}:\n{output[-2000:]}" if status not in (0, block.status) else None
        else:
            problem = difference(step.output, output, allowed)
            if problem is None and status == 2 and "error" not in output.lower():
                problem = f"ended with status {status}"
            if "Traceback (most recent call last)" in output:
                problem = output[-2000:]
        if problem:
            return f"$ {step.command}\n{problem}"
    return None
