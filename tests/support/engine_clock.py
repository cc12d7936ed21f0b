"""A clock that the work of an engine drives, so that times are exact on any machine."""

from __future__ import annotations

from typing import Any

import pytest

from minifloat.engine import Engine

#: The modules of the engine that read the time.
_MODULES = ("engine", "scheduler", "sequence")


class EngineClock:
    """A substitute for the module `time` whose clocks advance by a quarter of a second per run of the model."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self._run = 1000.0, engine._runner.run
        monkeypatch.setattr(engine._runner, "run", self._run_and_advance)
        for module in _MODULES:
            monkeypatch.setattr(f"minifloat.engine.{module}.time", self)

    def _run_and_advance(self, items: Any) -> Any:
        self.now += 0.25
        return self._run(items)

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic
