"""A stand-in for vLLM: a program that answers --version, serves /health, and misbehaves on request.

Environment variables:

    FAKE_DIR          folder for the files it writes: argv.json, environment.json, pids, drained
    FAKE_VERSION      version that --version prints
    FAKE_LOG          file whose text goes into its log
    FAKE_NOISE        megabytes of noise in its log
    FAKE_NOISE_KIND   ``lines``, ``endless`` (one line) or ``binary``
    FAKE_DELAY        seconds before /health answers
    FAKE_EXIT         status with which it ends at the start
    FAKE_STUBBORN     set: SIGTERM is ignored
    FAKE_DRAIN        seconds between SIGTERM and the end
    FAKE_LAST_STATUS  exit status after SIGTERM
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ.get("FAKE_DIR", "."))


def write(name: str, text: str) -> None:
    """Write a file whole or not at all, since a test may be waiting for it."""
    FOLDER.joinpath(f"{name}.part").write_text(text)
    FOLDER.joinpath(f"{name}.part").rename(FOLDER / name)


def noise() -> None:
    piece = {
        "lines": b"INFO 11-22 07:15:44 [loggers.py:271] Engine 000: Avg prompt throughput: 0.0 tokens/s\n",
        "endless": b"x" * 4096,
        "binary": bytes(range(128, 256)) * 32,
    }[os.environ.get("FAKE_NOISE_KIND", "lines")]
    block = piece * (2**20 // len(piece))
    for _ in range(int(os.environ.get("FAKE_NOISE", 0))):
        sys.stdout.buffer.write(block)
    sys.stdout.buffer.flush()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/crash":
            print("ValueError: crashed under load", flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


def stop(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):  # the reader may have gone
        print(f"[shutdown] draining after signal {number}", flush=True)
    time.sleep(float(os.environ.get("FAKE_DRAIN", 0)))
    write("drained", "")
    os._exit(int(os.environ.get("FAKE_LAST_STATUS", 0)))


def main() -> None:
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        print("INFO 11-22 07:15:22 [__init__.py:1] loading")
        print(os.environ.get("FAKE_VERSION", "0.32.0+cpu"))
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "FAKE_STUBBORN" in os.environ else stop)
    worker = subprocess.Popen(
        [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"]
    )
    write("argv.json", json.dumps(sys.argv))
    write("environment.json", json.dumps(dict(os.environ)))
    write("pids", f"{os.getpid()} {worker.pid}")
    print("INFO 11-22 07:15:22 the fake starts", flush=True)
    noise()
    if "FAKE_LOG" in os.environ:
        print(Path(os.environ["FAKE_LOG"]).read_text(), flush=True)
    if "FAKE_EXIT" in os.environ:
        for number in range(100):
            print(f"line {number}", flush=True)
        print("RuntimeError: Engine core initialization failed.", file=sys.stderr)
        sys.exit(int(os.environ["FAKE_EXIT"]))
    if "--headless" in arguments:
        signal.pause()
    time.sleep(float(os.environ.get("FAKE_DELAY", 0)))
    port = int(arguments[arguments.index("--port") + 1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
