"""What a process does before it imports torch and opens a model: it binds its address, and starts faster."""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from minifloat.errors import UsageError

#: How long Python lets one thread run while another waits: short, because a thread that packs weights needs Python for
#: microseconds only, after each weight.
_SWITCH_SECONDS = 0.0005


@contextmanager
def starting() -> Iterator[None]:
    """Within the context, which imports torch and opens a model, start faster."""
    # Imports make hundreds of thousands of objects that stay: no search for garbage now, and none among them later.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def loading_torch() -> Iterator[None]:
    """Load the largest library of torch while the context imports what needs no torch."""
    thread = threading.Thread(target=_load_library_of_torch, name="minifloat-torch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load_library_of_torch() -> None:
    # `import torch` would hold Python's lock meanwhile, as `ctypes.CDLL` does. No error: the import has its own.
    spec = importlib.util.find_spec("torch")
    if sys.platform == "linux" and spec is not None and spec.origin is not None:
        load = ctypes.CDLL(None).dlopen
        load.restype = ctypes.c_void_p
        load(os.fsencode(Path(spec.origin).parent / "lib" / "libtorch_cpu.so"), os.RTLD_NOW)


#: Registers torch's kernels for tensors without memory (device "meta"), of use to its compiler and to transformers'
#: models: a quarter of the time of `import torch`. `engine/opening.py` and `compare` import it before those models.
_META_KERNELS = "torch._meta_registrations"


def import_torch() -> None:
    """Import torch without the kernels of its device "meta"; who needs them imports their module later."""
    if "torch" in sys.modules:
        return
    stand_in = sys.modules[_META_KERNELS] = ModuleType(_META_KERNELS)
    try:
        torch = importlib.import_module("torch")
    finally:
        if sys.modules.get(_META_KERNELS) is stand_in:
            del sys.modules[_META_KERNELS]
    vars(torch).pop(_META_KERNELS.rpartition(".")[2], None)


@contextmanager
def importing(module: str) -> Iterator[None]:
    """Import a module on another thread while the context loads weights, which mostly runs outside of Python."""
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
    # the error is raised where the module is imported again
    with suppress(Exception):
        importlib.import_module(module)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, so that an address in use is an error before any slow work."""
    name = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((name, port))
    except OSError as error:
        bound.close()
        cure = ""
        if error.errno == errno.EADDRINUSE:
            cure = "; another program listens on this port: choose another one with --port"
        elif error.errno == errno.EACCES:
            cure = "; ports below 1024 need a privilege: choose another one with --port"
        raise UsageError(f"{host}:{port}: cannot listen there: {error.strerror}{cure}") from error
    return bound
