"""What a process that will open a model does before it imports torch: `starting`.

Imports no torch: the imports are what takes the time that this uses.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from minifloat.checkpoint.layout import is_weights
from minifloat.kernels import prepared_memory

#: How long Python lets one thread run while another waits: short, because a thread that packs weights needs Python for
#: microseconds only, after each weight.
_SWITCH_SECONDS = 0.0005


@contextmanager
def starting(
    model: str | os.PathLike[str],
    device: str = "cpu",
    *,
    packed_cache: Path | None = None,
    dtype: str | None = None,
    lm_head: str = "auto",
) -> Iterator[None]:
    """Within the context, which imports torch and opens a model, start faster.

    Another thread verifies the packed weights that are kept on disk, or prepares memory for those that will be packed.
    Python does not search for garbage, because imports make hundreds of thousands of objects that stay. Afterwards it
    leaves these objects out of its searches.

    Args:
        model: A folder; nothing is prepared for a model of the hub, whose size is not known yet.
        device: The device that the weights are for.
        packed_cache: The folder of packed weights, as the engine's option of this name.
        dtype: As the engine's option.
        lm_head: As the engine's option.

    Raises:
        UsageError: If others can write to the folder of packed weights.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if device == "cpu" and not _is_kept(packed_cache, Path(model), dtype, lm_head):
            prepared_memory.prepare(_weight_bytes(Path(model)))
        yield
    finally:
        prepared_memory.finish()
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Import a module on another thread while the context loads weights, which mostly runs outside of Python.

    An error of the import is raised where the module is imported again.

    Args:
        module: Its full name.
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


def _is_kept(packed_cache: Path | None, model: Path, dtype: str | None, lm_head: str) -> bool:
    """Begin to verify the packed weights that are kept on disk, and return whether there are any."""
    if packed_cache is None:
        return False
    from minifloat.runtime import packed_cache as packed

    return packed.begin(packed_cache, model, dtype=dtype, lm_head=lm_head)


def _weight_bytes(folder: Path) -> int:
    """Return the bytes of the files of weights in a folder; 0 if they cannot be listed."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if is_weights(entry.name))
    except OSError:
        return 0
