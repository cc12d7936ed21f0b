"""`serve_with_vllm`: checks a checkpoint, runs vLLM and returns its exit status."""

from __future__ import annotations

import contextlib
import http.client
import logging
import queue
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import BinaryIO

from minifloat.checkpoint.hub import open_headers
from minifloat.deploy.check.subject import Subject
from minifloat.model.layouts import READERS
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.sockets import bind
from minifloat.serve.vllm import preflight
from minifloat.serve.vllm.command import command_of
from minifloat.serve.vllm.log import Evidence, Log
from minifloat.serve.vllm.options import VllmOptions
from minifloat.serve.vllm.supervise import Child

_LOG = logging.getLogger("minifloat.vllm")
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0
#: Seconds after the drain in which vLLM must end its processes.
_GRACE_SECONDS = 20.0
#: Seconds to wait, once vLLM is ready, for the log lines that it wrote before.
_LOG_SECONDS = 1.0
_FAILED = 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: Wildcard address -> address to reach it at.
_LOOPBACK_OF_WILDCARD = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def serve_with_vllm(options: VllmOptions) -> int:
    """Serve a checkpoint with vLLM until SIGTERM or SIGINT, or until vLLM ends."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("minifloat").setLevel(logging.WARNING if options.quiet else logging.INFO)
    weights = _prepare(options)
    with _events() as events:
        return _Run(options, weights, events).run()


@dataclass(frozen=True)
class _Weights:
    """Whether weights of the checkpoint are quantized."""

    quantized: bool
    experts: bool = False


def _prepare(options: VllmOptions) -> _Weights:
    """Run all checks that need no running vLLM."""
    with open_headers(options.model, revision=options.revision) as checkpoint:
        config = checkpoint.quantization_config
        method = (config or {}).get("quant_method")
        is_readable = method is None or method in READERS
        weights = _weights(Subject.of_checkpoint(checkpoint)) if is_readable else _Weights(quantized=True)
    vllm = preflight.find_vllm(options)
    preflight.note_version(vllm.version)
    if is_readable:
        preflight.require_loadable(options, options.hardware or preflight.find_hardware(vllm.version), vllm.plugin)
    else:
        _LOG.warning("not checked whether vLLM loads this: unknown quant_method %r", method)
    if options.has_api:
        # another server at this address would be mistaken for vLLM
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
        _LOG.warning("everybody who reaches %s can use this server: it needs no API key", options.host)


class _Run:
    """Runs vLLM, from start to end."""

    def __init__(self, options: VllmOptions, weights: _Weights, events: queue.SimpleQueue[int]) -> None:
        self._options, self._weights, self._events = options, weights, events
        self._stopping = False
        self._command = command_of(options)
        _LOG.info("%s", self._command)
        self._started = time.monotonic()
        show: BinaryIO | None = None if options.quiet else sys.stderr.buffer
        self._child = Child(self._command, Log(), show, lambda: events.put(0))

    def run(self) -> int:
        """Wait for readiness, then for the end, and return the exit status. Kill vLLM in any case."""
        try:
            status = self._wait_until_ready() if self._options.has_api else None
            while status is None and (status := self._exit_status()) is None:
                self._wait(None)
            return status
        finally:
            self._child.kill()

    def _wait_until_ready(self) -> int | None:
        """Wait until vLLM answers. Return None, or the exit status if the run is over."""
        while self._stopping or self._child.returncode is not None or not _is_healthy(self._options):
            if (status := self._exit_status()) is not None:
                return _FAILED if status == 0 and not self._stopping else status
            if time.monotonic() > self._started + self._options.startup_timeout:
                self._log_end(f"no answer within {self._options.startup_timeout:g} s (--startup-timeout)")
                return _FAILED
            self._wait(_POLL_SECONDS)
        _LOG.info("vLLM: ready after %.1f s", time.monotonic() - self._started)
        self._confirm()
        return None

    def _wait(self, seconds: float | None) -> None:
        """Wait for a signal, news of vLLM, or the timeout. Stop vLLM at a signal."""
        with contextlib.suppress(queue.Empty):
            if self._events.get(timeout=seconds):
                self._stop()

    def _stop(self) -> None:
        """Ask vLLM to finish. Kill it at a second signal or after the shutdown timeout."""
        self._stopping = True
        seconds = self._options.shutdown_timeout
        _LOG.info("stopping: vLLM finishes admitted requests, for at most %g s", seconds)
        self._child.terminate()
        deadline = time.monotonic() + seconds + _GRACE_SECONDS
        while self._child.returncode is None:
            seconds_left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                if seconds_left <= 0 or self._events.get(timeout=seconds_left):
                    why = "it did not end in time" if seconds_left <= 0 else "second signal"
                    _LOG.warning("killing vLLM: %s", why)
                    self._child.kill()

    def _exit_status(self) -> int | None:
        """Return the exit status if vLLM has ended, or is stopped here for unquantized weights; else None."""
        if self._child.returncode is not None:
            self._child.kill()  # kills its descendants and reads the rest of its output
            return self._status()
        line = self._child.log.unquantized(experts=self._weights.experts)
        if self._weights.quantized and line is not None and not self._options.allow_unquantized:
            self._child.kill()
            self._log_end("stopped")
            _LOG.error(
                "the checkpoint is quantized, but vLLM runs its weights unquantized: %s "
                "(--allow-unquantized serves it anyway)",
                line,
            )
            return _FAILED
        return None

    def _status(self) -> int:
        code = self._child.returncode or 0
        end = f"exit status {code}" if code >= 0 else f"killed by signal {-code}"
        if self._stopping:
            _LOG.info("vLLM has ended: %s", end)
        else:
            self._log_end(f"ended by itself: {end}")
        return code if code >= 0 else 128 - code

    def _log_end(self, reason: str) -> None:
        """Log why vLLM ended, with the last lines of its log, and before them its first error if they lack it."""
        last, error = list(self._child.log.last), self._child.log.error
        if error and error[0] not in last:
            last = [*error, "...", *last]
        text = "\n".join(f"    {line}" for line in last)
        _LOG.error("vLLM %s. The last of its log:\n%s", reason, text or "    (nothing)")

    def _confirm(self) -> None:
        """Log which kernels vLLM's log names."""
        if not self._weights.quantized:
            return
        kernels, deadline = self._child.log.kernels, time.monotonic() + _LOG_SECONDS
        while not kernels[Evidence.QUANTIZED] and time.monotonic() < deadline and self._child.returncode is None:
            time.sleep(_LOG_SECONDS / 20)
        for kernel in kernels[Evidence.EMULATED]:
            _LOG.warning("vLLM has no kernel for these weights here: %s decodes them to 16 bits in every step", kernel)
        if kernels[Evidence.QUANTIZED]:
            _LOG.info("confirmed by its log, quantized weights run on: %s", ", ".join(kernels[Evidence.QUANTIZED]))
        elif not kernels[Evidence.EMULATED]:
            _LOG.warning("could not be confirmed: vLLM's log names no kernel for quantized weights")


@contextlib.contextmanager
def _events() -> Iterator[queue.SimpleQueue[int]]:
    """Yield a queue of events that wake the main loop: numbers of signals, and 0 for news of a child."""
    events: queue.SimpleQueue[int] = queue.SimpleQueue()

    def put_signal(number: int, frame: FrameType | None) -> None:
        events.put(number)

    if threading.current_thread() is not threading.main_thread():
        yield events  # only the main thread may handle signals
        return
    before = {number: signal.signal(number, put_signal) for number in _SIGNALS}
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_healthy(options: VllmOptions) -> bool:
    """Return whether /health answers 200."""
    host = options.host.strip("[]")
    host = _LOOPBACK_OF_WILDCARD.get(host, host)
    if any(argument.startswith("--ssl-certfile") for argument in options.arguments):
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, options.port, timeout=_ANSWER_SECONDS, context=_without_verification()
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


def _without_verification() -> ssl.SSLContext:
    """Return a TLS context that accepts every certificate, which is enough to ask whether the server answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
