"""`serve_with_vllm`: from the first check to vLLM's exit status."""

from __future__ import annotations

import contextlib
import http.client
import logging
import queue
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

from minifloat.check.subject import Subject
from minifloat.hub import open_headers
from minifloat.layouts import READERS
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.sockets import bind
from minifloat.serve.vllm import preflight
from minifloat.serve.vllm.command import Command, Node, nodes
from minifloat.serve.vllm.log import Log, Says
from minifloat.serve.vllm.options import VllmOptions
from minifloat.serve.vllm.supervise import Child

_LOG = logging.getLogger("minifloat.vllm")
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
#: Seconds beyond the drain in which vLLM takes its processes down.
_GRACE_SECONDS = 20.0
#: Seconds in which what was written before readiness is read.
_LOG_SECONDS = 1.0
_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def serve_with_vllm(options: VllmOptions) -> int:
    """Serve a checkpoint with vLLM until SIGTERM or SIGINT, or until vLLM ends.

    Of several nodes, the part of this one is run.

    Returns:
        vLLM's exit status, or 128 and the signal's number if it was killed; 1 where it did not answer in time, or was
        stopped because quantized weights would have run unquantized.

    Raises:
        UsageError: There is no vLLM; it would not load the checkpoint; the address cannot be had.
        CheckpointError: The folder is not what it claims to be.
        HubError: The hub has no such model, refuses it, or cannot be reached.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("minifloat").setLevel(logging.WARNING if options.quiet else logging.INFO)
    node = nodes(options)[options.node_rank]
    weights = _prepare(options, node)
    with _events() as events:
        return _Run(options, node, weights, events).run()


@dataclass(frozen=True)
class _Weights:
    """Whether weights of the checkpoint are quantized, and whether all experts are among them."""

    quantized: bool
    experts: bool = False


def _prepare(options: VllmOptions, node: Node) -> _Weights:
    """Check all that can be checked before anything is started."""
    with open_headers(options.model, revision=options.revision) as checkpoint:
        config = checkpoint.quantization_config
        method = (config or {}).get("quant_method")
        known = method is None or method in READERS
        weights = _weights(Subject.of_checkpoint(checkpoint)) if known else _Weights(quantized=True)
    version = preflight.find_version(options)
    preflight.note_version(version)
    if known:
        preflight.require_loadable(options, options.hardware or preflight.find_hardware(version))
    else:
        _LOG.warning("not checked whether vLLM loads this: quant_method %r is not known here", method)
    for command in node.commands:
        if command.port is not None:
            bind(str(options.master_addr), command.port).close()
    if node.has_api:
        # a server that is there already would be taken for vLLM
        bind(options.host, options.port).close()
        _note_exposure(options)
    return weights


def _weights(subject: Subject) -> _Weights:
    experts = [weight for weight in subject.weights if weight.is_expert]
    return _Weights(bool(subject.quantized), bool(experts) and all(weight.spec is not None for weight in experts))


def _note_exposure(options: VllmOptions) -> None:
    if options.api_key is not None:
        _LOG.warning("vLLM asks for the key below /v1, /v2 and /inference only; its other routes are open to everybody")
    elif not ServerSettings(options.name, options.host).on_loopback:
        _LOG.warning("everybody who reaches %s can use this server: it asks for no API key", options.host)


class _Run:
    """The children of a node, from start to end."""

    def __init__(self, options: VllmOptions, node: Node, weights: _Weights, events: queue.SimpleQueue[int]) -> None:
        self._options, self._node, self._weights, self._events = options, node, weights, events
        self._children: list[Child] = []
        self._stopping = False

    def run(self) -> int:
        """Start, wait until it answers, wait until it ends; whatever happens, nothing is left running."""
        try:
            return self._serve()
        finally:
            for child in reversed(self._children):
                child.kill()

    def _serve(self) -> int:
        deadline = time.monotonic() + self._options.startup_timeout
        for command in self._node.commands:
            started = time.monotonic()
            child = self._start(command)
            status = self._wait_until_ready(child, command, deadline)
            if status is not None:
                return status
            if self._node.has_api:
                _LOG.info("%s: ready after %.1f s", child.name, time.monotonic() - started)
        if self._node.has_api:
            self._confirm(child)
        while (status := self._ended()) is None:
            self._wait(None)
        return status

    def _start(self, command: Command) -> Child:
        _LOG.info("%s", command)
        show: BinaryIO | None = None if self._options.quiet else sys.stderr.buffer
        child = Child(command, Log(), show, lambda: self._events.put(0))
        self._children.append(child)
        return child

    def _wait_until_ready(self, child: Child, command: Command, deadline: float) -> int | None:
        """None once it is ready; else the exit status."""
        while not self._is_ready(child, command):
            if (status := self._ended()) is not None:
                return _FAILED if status == 0 and not self._stopping else status
            if time.monotonic() > deadline:
                self._show_last(child, f"no answer within {self._options.startup_timeout:g} s (--startup-timeout)")
                return _FAILED
            self._wait(_POLL_SECONDS)
        return None

    def _is_ready(self, child: Child, command: Command) -> bool:
        """Whether it answers; of what does not answer, whether it was started."""
        if self._stopping or child.returncode is not None:
            return False
        if command.port is not None:
            return _listens(str(self._options.master_addr), command.port)
        return not self._node.has_api or _is_healthy(self._options)

    def _wait(self, seconds: float | None) -> None:
        """Until a signal comes, a child writes or ends, or the time is over; the first signal stops them."""
        with contextlib.suppress(queue.Empty):
            if self._events.get(timeout=seconds):
                self._stop()

    def _stop(self) -> None:
        """Ask the children to finish, the last first; a second signal, or time, ends them."""
        self._stopping = True
        seconds = self._options.shutdown_timeout
        _LOG.info("stopping: vLLM finishes what was admitted, for at most %g s", seconds)
        for child in reversed(self._children):
            child.terminate()
            deadline = time.monotonic() + seconds + _GRACE_SECONDS
            while child.returncode is None:
                left = deadline - time.monotonic()
                with contextlib.suppress(queue.Empty):
                    if left <= 0 or self._events.get(timeout=left):
                        _LOG.warning(
                            "killing %s: %s",
                            child.name,
                            "it did not end in time" if left <= 0 else "asked a second time",
                        )
                        child.kill()

    def _ended(self) -> int | None:
        """The exit status once it is over: a child has ended, or must not go on."""
        for child in reversed(self._children):
            if child.returncode is not None:
                child.kill()  # what it has left behind; and the rest of its output is read
                return self._status_of(child)
            line = child.log.unquantized(experts=self._weights.experts)
            if self._weights.quantized and line is not None and not self._options.allow_unquantized:
                child.kill()
                self._show_last(child, "stopped")
                _LOG.error(
                    "the checkpoint is quantized, and vLLM runs its weights unquantized: %s "
                    "(--allow-unquantized serves it nevertheless)",
                    line,
                )
                return _FAILED
        return None

    def _status_of(self, child: Child) -> int:
        code = child.returncode or 0
        status = code if code >= 0 else 128 - code
        told = f"exit status {code}" if code >= 0 else f"killed by signal {-code}"
        if self._stopping:
            _LOG.info("%s has ended: %s", child.name, told)
        else:
            self._show_last(child, f"ended by itself: {told}")
        return status

    def _show_last(self, child: Child, why: str) -> None:
        """Say why it is over, with the end of its log, and its first error if that is no longer among it."""
        last, error = list(child.log.last), child.log.error
        if error and error[0] not in last:
            last = [*error, "...", *last]
        text = "\n".join(f"    {line}" for line in last)
        _LOG.error("%s %s. The last of its log:\n%s", child.name, why, text or "    (nothing)")

    def _confirm(self, child: Child) -> None:
        """Say which kernels the log names."""
        if not self._weights.quantized:
            return
        found, deadline = child.log.found, time.monotonic() + _LOG_SECONDS
        while not found[Says.QUANTIZED] and time.monotonic() < deadline and child.returncode is None:
            time.sleep(_LOG_SECONDS / 20)
        for kernel in found[Says.EMULATED]:
            _LOG.warning("vLLM has no kernel here for these weights: %s decodes them to 16 bits in every step", kernel)
        if found[Says.QUANTIZED]:
            _LOG.info("confirmed by its log, quantized weights run on: %s", ", ".join(found[Says.QUANTIZED]))
        elif not found[Says.EMULATED]:
            _LOG.warning("could not be confirmed: vLLM's log names no kernel for quantized weights")


@contextlib.contextmanager
def _events() -> Iterator[queue.SimpleQueue[int]]:
    """What wakes the main loop: numbers of signals, and 0 for news of a child."""
    events: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(number: int, frame: FrameType | None) -> None:
        events.put(number)

    if threading.current_thread() is not threading.main_thread():
        yield events  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_healthy(options: VllmOptions) -> bool:
    """Whether /health answers 200."""
    host = options.host.strip("[]")
    host = _EVERYWHERE.get(host, host)
    if any(argument.startswith("--ssl-certfile") for argument in options.arguments):
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, options.port, timeout=_ANSWER_SECONDS, context=_trusting()
        )
    else:
        connection = http.client.HTTPConnection(host, options.port, timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _trusting() -> ssl.SSLContext:
    """For a question whose answer is not believed beyond "it lives": the certificate's name is not ours to know."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_SECONDS):
            return True
    except OSError:
        return False
