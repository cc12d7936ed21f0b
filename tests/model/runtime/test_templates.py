"""Chat templates in a process of their own: the same text, and nothing that a template can take from anything else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minifloat.errors import ChatTemplateError
from minifloat.model.runtime.templates import RenderLimits, TemplateWorker, apply_chat_template
from minifloat.model.runtime.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
LIMITS = RenderLimits(seconds=0.3, max_characters=1000)


@pytest.fixture(scope="module")
def worker() -> Iterator[TemplateWorker]:
    started = TemplateWorker()
    yield started
    started.close()


def render(worker: TemplateWorker, template: str, **variables: Any) -> str:
    return worker.render(template, MESSAGES, variables, LIMITS)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' | center(1000000000) }}",
        "{{ ('x' * 100000) | replace('x', 'y' * 10000) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 10000) }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [0] * 10 ** 9 }}",
        "{% set ns = namespace(x='x' * 1000) %}{% for i in range(30) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_a_template_cannot_take_gigabytes(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(ChatTemplateError, match="more than 512 MiB of memory"):
        worker.render(template, MESSAGES, {}, RenderLimits(seconds=10.0))
    assert render(worker, "{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        # one call that never leaves C: the search for a text that almost fits everywhere
        "{{ ('a' * 200000 + 'b' + 'a' * 200000) in ('a' * 100000000) }}{{ (10 ** 200000) ** 40 % 7 }}",
    ],
    ids=["Python", "C"],
)
def test_a_template_cannot_run_on(worker: TemplateWorker, template: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"ran for more than 0\.3 s"):
        render(worker, template)
    assert render(worker, "{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 1001 }}", "writes more than 1000 characters"),
        ("{% if %}", "refuses the messages: Expected an expression"),
        ("{{ raise_exception('only \ud800 users') }}", "refuses the messages: only \\? users"),
        ("{{ raise_exception('x' * 10 ** 6) }}", "refuses the messages: x{500}$"),
        ("{{ '\ud800' }}", "half of a surrogate pair"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_what_a_template_does_wrong_is_said(worker: TemplateWorker, template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(worker, template)


def test_the_text_is_that_of_transformers(llama_folder: Path) -> None:
    tokenizer = load_tokenizer(llama_folder)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m.thinking }}{{ m.name is defined }}{% endfor %}"
        "{{ tools is none }}{{ add_generation_prompt }}{{ level }}{{ 'a b' | wordwrap(1) }}{{ messages | pprint }}"
    )
    chats = [
        [{"role": "user", "content": "é\U0001f600", "name": None}],
        [{"role": "assistant", "content": "x", "reasoning": "because", "tool_calls": [{"a": 1.5, "b": [True]}]}],
    ]
    for chat in chats:
        expected = tokenizer.apply_chat_template(chat, tokenize=False, level=3)
        assert apply_chat_template(tokenizer, chat, level=3) == expected


def test_a_process_that_was_killed_is_replaced(worker: TemplateWorker) -> None:
    render(worker, "x")
    assert worker._process is not None
    killed = worker._process.pid
    os.kill(killed, signal.SIGKILL)
    assert render(worker, "{{ messages[0].content }}") == "hello"
    assert worker._process.pid != killed


def test_signals_for_the_server_do_not_end_it(worker: TemplateWorker) -> None:
    render(worker, "x")
    assert worker._process is not None
    before = worker._process.pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(before, number)
    assert render(worker, "x") == "x"
    assert worker._process.pid == before


def test_threads_share_it(worker: TemplateWorker) -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = render(worker, "{{ number }}", number=number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(8)}


def test_it_is_small_can_open_nothing_and_ends_with_its_program() -> None:
    """It imports no torch, gets no keys, and its limits are set before it renders anything."""
    program = """
import os, sys
os.environ["MINIFLOAT_API_KEY"] = "a-secret-key"
from minifloat.model.runtime.templates import WORKER
WORKER.render("x", [], {})
pid = WORKER._process.pid
print(pid)
print(open(f"/proc/{pid}/limits").read())
print(open(f"/proc/{pid}/environ").read())
print(open(f"/proc/{pid}/status").read(), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert lines, done.stderr
    fields = {line.split(":")[0]: line.split() for line in lines}
    limits = {line[:26].strip(): line.split()[-3:-1] for line in lines if line.startswith("Max ")}
    assert limits["Max open files"] == ["0", "0"]
    assert int(limits["Max address space"][0]) < 1 << 30
    assert int(fields["VmRSS"][1]) < 64 << 10, "KiB"
    assert "a-secret-key" not in done.stdout
    end = time.monotonic() + 30
    while Path(f"/proc/{lines[0]}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{lines[0]}").exists()
