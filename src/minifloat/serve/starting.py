"""What a process that will open a model does before it imports torch: `starting`.

Imports no torch: the imports are what takes the time that this uses.
"""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

#: How long Python lets one thread run while another waits: short, because a thread that packs weights needs Python for
#: microseconds only, after each weight.
_SWITCH_SECONDS = 0.0005


@contextmanager
def starting() -> Iterator[None]:
    """Within the context, which imports torch and opens a model, start faster.

    Python does not search for garbage, because imports make hundreds of thousands of objects that stay. Afterwards it
    leaves these objects out of its searches.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Import a module on another thread while the context loads weights, which mostly runs outside of Python.

    An error of the import is raised where the module is imported again.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    thread = threading.Thread(target=_import, args=(module,), name="minifloat-import", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        sys.setswitchinterval(interval)


def _import(module: str) -> None:
    with suppress(Exception):
        importlib.import_module(module)
