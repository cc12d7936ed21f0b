"""A headless Chromium, controlled over a pipe with the Chrome DevTools Protocol, without further packages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_TIMEOUT = 60.0


class Page:
    """One tab of a browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in, self._rest, self._number = to_browser, from_browser, b"", 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.wait_for(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def resize(self, width: int, height: int, *, mobile: bool = False, dark: bool = False) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} did not become true; {self.problems}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path) -> None:
        data = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self._record_event(answer)

    def _read(self) -> Any:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], _TIMEOUT)[0], "the browser does not answer"
            received = os.read(self._in, 1 << 20)
            assert received, "the browser has exited"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _record_event(self, event: Any) -> None:
        parameters = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Start a browser and yield its tab."""
    assert CHROMIUM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
    move = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$@"'
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
    process = subprocess.Popen(
        ["bash", "-c", move, "bash", CHROMIUM, *flags, "--no-first-run", f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        process.terminate()
        process.wait(20)
        os.close(to_browser[1])
        os.close(from_browser[0])
