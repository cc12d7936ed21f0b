"""From a folder to a running server: the function behind `minifloat serve`."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from minifloat.serve.server.connection import listen
from minifloat.serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from minifloat.serve.engine import ModelInfo

_LOG = logging.getLogger("minifloat.server")


def serve_checkpoint(
    path: str | os.PathLike[str],
    settings: ServerSettings,
    *,
    max_queue: int = 256,
    threads: int | None = None,
    quiet: bool = False,
    **engine: Any,
) -> None:
    """Load a checkpoint and serve it until SIGTERM or SIGINT.

    Args:
        path: The folder.
        settings: How it is served.
        max_queue: Requests that may wait beside those that run.
        threads: To compute with; None: torch's choice.
        quiet: Log warnings only.
        engine: Options of `Engine`.

    Raises:
        UsageError: An option, or the address, cannot be used.
        CheckpointError: The folder cannot be loaded.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("minifloat").setLevel(logging.WARNING if quiet else logging.INFO)
    with listen(settings) as listening:
        # after the socket, for these take seconds: an address that is taken is found out at once
        from minifloat.kernels.threads import set_threads
        from minifloat.serve.engine import AsyncEngine, Engine
        from minifloat.serve.server.app import serve

        if threads is not None:
            set_threads(threads)
        loaded = Engine(path, **engine)
        _introduce(loaded.info, settings)
        serve(AsyncEngine(loaded, max_queue), settings, listening)


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.1f} MiB"


def _introduce(info: ModelInfo, settings: ServerSettings) -> None:
    """Log what is served, and what may be better otherwise."""
    _LOG.info(
        "%s: %s, %s, weights %s (BF16 %s), %s runner, loaded in %.1f s",
        settings.model_name,
        info.architecture,
        info.scheme,
        _mib(info.weight_bytes),
        _mib(info.bf16_bytes),
        info.runner,
        info.load_seconds,
    )
    _LOG.info(
        "KV cache: %s in %s, %d tokens; context %d tokens, %d requests at a time",
        _mib(info.kv_bytes),
        info.kv_element,
        info.kv_bytes // max(info.kv_bytes_per_token, 1),
        info.max_model_len,
        info.max_num_seqs,
    )
    if info.reason_not_native:
        _LOG.warning("slower than it could be, for the native runner does not take it: %s", info.reason_not_native)
    if not settings.on_loopback and not settings.api_keys:
        _LOG.warning("everybody who reaches %s can use this server: it asks for no API key", settings.host)
