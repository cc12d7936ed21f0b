"""The status page, in a real browser where there is one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Page, browser
from fake_engine import FakeEngine
from serving import Client, running

from minifloat.serve.server import read_api_keys
from minifloat.serve.server.metrics import _medians_by_second

KEY = "a-key-for-tests"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as tab:
        yield tab


def test_the_page_is_one_file_that_loads_nothing_from_elsewhere(client: Client) -> None:
    answer = client.get("/")
    html = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/html")
    assert not re.findall(r"https?://|//[a-z]|@import|url\(", re.sub(r"<!--.*?-->|^\s*//.*$", "", html))
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert policy.count("'sha256-") == 2
    assert "unsafe" not in policy


def test_the_page_has_no_data_without_a_request_to_status(tokenizer: Any) -> None:
    with running(FakeEngine(tokenizer), model_name="secret-name") as client:
        assert b"secret-name" not in client.get("/").body
        assert b"/nowhere" not in client.get("/status").body


def test_the_status_describes_the_model_and_the_last_minute(client: Client) -> None:
    client.complete(max_tokens=20)
    status = client.get("/status").json
    assert status["model"]["bf16_bytes"] > status["model"]["weight_bytes"]
    now = status["now"]
    assert len(now["history"]) == 60
    assert now["ttft_ms"]["median"] <= now["ttft_ms"]["p99"]
    assert {"running", "waiting", "kv_usage", "generation_tokens_per_second", "itl_ms"} <= set(now)


def test_the_status_has_latency_queue_and_cache_over_time_and_the_last_errors(client: Client) -> None:
    for _ in range(7):
        assert client.post("/v1/completions", {"model": "absent", "prompt": "a"}).status == 404
    client.complete(max_tokens=20)
    now = client.get("/status").json["now"]
    assert len(now["itl_history"]) == len(now["ttft_history"]) == len(now["waiting_history"]) == 60
    assert [(error["route"], error["status"]) for error in now["errors"]] == [("/v1/completions", 404)] * 5
    assert all(0 <= error["seconds_ago"] < 60 for error in now["errors"])


def test_medians_are_by_second_in_milliseconds() -> None:
    found = _medians_by_second([(100.2, 0.01), (100.9, 0.03), (101.5, 0.05)], 102)
    assert len(found) == 60
    assert found[-2:] == [20.0, 50.0]
    assert found[:-2] == [None] * 58


@needs_chromium
@pytest.mark.parametrize(("width", "mobile"), [(1280, False), (390, True)], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_shows_the_model_and_tries_a_prompt(
    tokenizer: Any, page: Page, tmp_path: Path, width: int, mobile: bool, dark: bool
) -> None:
    with running(FakeEngine(tokenizer, seconds=0.01)) as client:
        page.resize(width, 900, mobile=mobile, dark=dark)
        page.open(client.url)
        page.wait_for("!document.getElementById('content').hidden")
        assert page.evaluate("document.getElementById('name').textContent") == "tiny"
        assert page.evaluate("document.getElementById('saving').textContent") == "3.50x smaller"
        for mode in ("chat", "text"):
            page.evaluate(
                f"mode.value = '{mode}'; prompt.value; document.getElementById('prompt').value = 'abc ';"
                "document.getElementById('tokens').value = 60; document.getElementById('send').click()"
            )
            page.wait_for("/60 tokens; the first after/.test(document.getElementById('measured').textContent)")
            shown = page.evaluate("document.getElementById('output').textContent")
            assert "abc" in shown
        curl = page.evaluate("document.getElementById('curl').textContent")
        assert curl.startswith(f"curl {client.url}")
        assert '"model":"tiny"' in curl
        assert client.post("/v1/completions", {"model": "absent", "prompt": "a"}).status == 404
        page.wait_for("/404 .v1.completions, \\d+ s ago/.test(document.getElementById('errors').textContent)")
        fields = "[...document.querySelectorAll('#try .row label > *')]"
        tops = f"new Set({fields}.map((field) => Math.round(field.getBoundingClientRect().top)))"
        assert page.evaluate(f"{tops}.size") == 1, "the fields of a row sit at different heights"
        page.wait_for("document.getElementById('rate').textContent !== '0'")
        for name in ("history", "ttft-history", "itl-history"):  # some second is above the ground line
            line = f"document.getElementById('{name}').getAttribute('d')"
            page.wait_for(f"{line}.match(/[\\d.]+ [\\d.]+/g).some((point) => Number(point.split(' ')[1]) < 18)")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is wider than the screen"
        if folder := os.environ.get("MINIFLOAT_SCREENSHOTS"):
            page.screenshot(Path(folder) / f"page-{width}-{'dark' if dark else 'light'}.png")
        assert all(url.startswith((client.url, "data:")) for url in page.requests), page.requests
        assert not page.problems


@needs_chromium
def test_the_page_asks_for_a_key_and_stops_an_answer(tokenizer: Any, page: Page) -> None:
    engine = FakeEngine(tokenizer, seconds=0.05)
    with running(engine, api_keys=read_api_keys([KEY])) as client:
        page.open(client.url)
        for key in ("a-wrong-key", KEY):
            page.wait_for("!document.getElementById('key-form').hidden")
            page.evaluate(
                f"document.getElementById('key').value = '{key}';"
                "document.querySelector('#key-form button').click(); document.getElementById('key-form').hidden = true"
            )
        page.wait_for("!document.getElementById('content').hidden")
        page.evaluate("document.getElementById('tokens').value = 400; document.getElementById('send').click()")
        page.wait_for("document.getElementById('output').textContent.length > 5")
        engine.held = True  # the answer does not end by itself
        assert page.evaluate("document.getElementById('send').textContent") == "Stop"
        page.evaluate("document.getElementById('send').click()")
        page.wait_for("document.getElementById('measured').textContent === 'stopped'")
        assert client.idle()
