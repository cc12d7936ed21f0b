"""lm-evaluation-harness as a library without side effects.

The harness is written for its own command line: it prints, logs, draws progress bars and seeds every random generator
of the process. The contexts here suppress its output and restore the state that it changes. The harness is imported
only when needed, because the import takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from minifloat.errors import UsageError

_LOG = logging.getLogger(__name__)

#: Modules to import before replacing attributes of modules that they import.
_IMPORTED = ("lm_eval.evaluator", "lm_eval.models.huggingface", "evaluate")
_LOGGERS = ("lm_eval", "datasets", "evaluate", "huggingface_hub", "transformers")


def harness(module: str) -> Any:
    """Import a module of lm-eval or of its dependencies."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"tasks need lm-evaluation-harness: pip install 'minifloat[eval]' ({error})") from error


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module while the context lasts; do nothing if this version lacks the attribute."""
    if not hasattr(module, name):
        yield
        return
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextlib.contextmanager
def quiet(*, warn: bool = False) -> Iterator[None]:
    """Send the output of the harness and its libraries to the log while the context lasts.

    Progress bars, warnings and random generators are restored at the end.
    """
    with contextlib.ExitStack() as stack:
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        for name in _LOGGERS:
            stack.enter_context(_forwarded(logging.getLogger(name), warn and name == "lm_eval"))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for module in _IMPORTED:
            harness(module)
        stack.enter_context(_seeds_kept())
        stack.enter_context(_without_bars())
        try:
            yield
        finally:
            if text := printed.getvalue().strip():
                _LOG.debug("printed by lm-eval: %s", text)


class _Forward(logging.Handler):
    """Forward records to this module's log, at debug level or, for the first of each kind of warning, as a warning."""

    def __init__(self, warn: bool) -> None:
        super().__init__()
        self._warn, self._warned = warn, set[tuple[str, int]]()

    def emit(self, record: logging.LogRecord) -> None:
        kind = (record.name, record.lineno)
        first = self._warn and record.levelno >= logging.WARNING and kind not in self._warned
        self._warned.add(kind)
        _LOG.log(logging.WARNING if first else logging.DEBUG, "%s: %s", record.name, record.getMessage())


@contextlib.contextmanager
def _forwarded(logger: logging.Logger, warn: bool) -> Iterator[None]:
    handlers, propagate = logger.handlers[:], logger.propagate
    logger.handlers[:], logger.propagate = [_Forward(warn)], False
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate


@contextlib.contextmanager
def _seeds_kept() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    task, bars = harness("lm_eval.api.task"), harness("tqdm")
    hidden = type("tqdm", (bars.tqdm,), {"__init__": functools.partialmethod(bars.tqdm.__init__, disable=True)})
    with contextlib.ExitStack() as stack:
        for name in ("datasets.utils", "huggingface_hub.utils"):
            module = harness(name)
            if not module.are_progress_bars_disabled():
                module.disable_progress_bars()
                stack.callback(module.enable_progress_bars)
        for module in (bars, task):  # other modules of the harness have an option for it
            stack.enter_context(replaced(module, "tqdm", hidden))
        yield
