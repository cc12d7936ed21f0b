"""The progress bar of long commands: on a terminal alone, with its rate, without colors where they are unwanted."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from minifloat.commands import progress as console
from minifloat.commands.progress import RateColumn, progress_bar


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Make the bar's console a terminal whose output is returned."""
    written = io.StringIO()
    monkeypatch.setattr(
        console, "Console", lambda **_: Console(file=written, force_terminal=True, width=100, color_system="standard")
    )
    return written


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_shows_share_time_and_what_is_done(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    written = terminal(monkeypatch)
    with progress_bar(enabled=True) as progress:
        assert progress is not None
        progress(30, 120, "layer 3")
    text = written.getvalue()
    for words in ("25%", "left", "layer 3"):
        assert words in text
    assert ("\x1b[35m" in text) == (not no_color)  # rich's color of the share


def test_nothing_is_shown_in_a_pipe_or_when_it_is_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar(enabled=True) as progress:
        assert progress is None
    written = terminal(monkeypatch)
    with progress_bar(enabled=False) as progress:
        assert progress is None
    assert (capsys.readouterr().err, written.getvalue()) == ("", "")


@pytest.mark.parametrize(
    ("in_bytes", "total", "rate"),
    [(True, 1 << 30, "100.00 MiB/s"), (False, 1 << 30, "9.8%/s"), (False, 100 << 30, "5.9%/min")],
)
def test_the_rate_is_bytes_per_second_or_a_share_of_the_work(in_bytes: bool, total: int, rate: str) -> None:
    clock = iter(range(100))
    progress = Progress(get_time=lambda: float(next(clock)))
    task = progress.add_task("", total=total)
    column = RateColumn(in_bytes=in_bytes)
    assert column.render(progress.tasks[0]).plain == ""
    for step in range(1, 5):
        progress.update(task, completed=step * (100 << 20))
    progress.tasks[0].finished_speed = float(100 << 20)
    assert column.render(progress.tasks[0]).plain == rate
