"""Loads a checkpoint and serves it: the function behind `minifloat serve`."""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING

from minifloat.checkpoint import Checkpoint
from minifloat.checkpoint.hub import model_folder, model_name
from minifloat.kernels.memory import touching
from minifloat.kernels.processors import NODES
from minifloat.model.architecture.roles import is_embedding
from minifloat.report.text import size_text
from minifloat.serve.server.log import logging_to_stderr
from minifloat.serve.server.settings import ServerSettings
from minifloat.serve.starting import bind, import_torch, importing, loading_torch, starting

if TYPE_CHECKING:
    from minifloat.engine import EngineOptions, ModelInfo

_LOG = logging.getLogger("minifloat.server")


def serve_checkpoint(
    path: str | os.PathLike[str],
    settings: ServerSettings | None = None,
    options: EngineOptions | None = None,
    *,
    revision: str | None = None,
) -> None:
    """Load a checkpoint and serve it until SIGTERM, SIGINT or SIGHUP.

    Args:
        path: Checkpoint: a folder or a model of the hub.
        settings: Name, keys and limits of the server; None: the defaults, under the name of the folder or model.
        options: How the engine opens and runs the model; None: the defaults.
        revision: Branch, tag or commit of a model of the hub; None: the default branch.

    Raises:
        UsageError: If an option is invalid or the address cannot be bound.
        CheckpointError: If the checkpoint cannot be loaded.
    """
    settings = settings or ServerSettings(model_name(os.fspath(path)))
    with logging_to_stderr(quiet=settings.quiet), bind(settings.host, settings.port) as listening:
        _LOG.info("opening %s; requests are answered once it is loaded", os.fspath(path))
        with starting():
            # These imports take seconds; they follow the socket, so that an address in use is an error at once.
            on_cpu = options is None or options.device == "cpu"
            with loading_torch():
                importlib.import_module("fastapi")
                importlib.import_module("uvicorn")
            folder = model_folder(path, revision=revision)
            with Checkpoint.open(folder) as checkpoint, touching(_packed_bytes(checkpoint) if on_cpu else 0):
                if on_cpu:
                    import_torch()
                from minifloat.engine import AsyncEngine, Engine
                from minifloat.kernels.threads import set_up

                set_up(settings)
                with importing("minifloat.serve.server.app"):
                    loaded = Engine(folder, options, checkpoint=checkpoint, grammars=True)
                from minifloat.serve.server.app import serve
        _log_model(loaded.info, settings)
        serve(AsyncEngine(loaded, settings.max_num_queued_reqs), settings, listening)


def _packed_bytes(checkpoint: Checkpoint) -> int:
    """Return about what the packed weights of a checkpoint take; 0 where memory belongs to NUMA nodes."""
    if len(list(NODES.glob("node[0-9]*"))) > 1:
        return 0
    tensors = checkpoint.tensors.items()
    return sum(info.nbytes for name, info in tensors if not is_embedding(name.rpartition(".")[0]))


def _log_model(info: ModelInfo, settings: ServerSettings) -> None:
    """Log the served model and its cache, and warn of a slow runner or a missing API key."""
    _LOG.info(
        "%s: %s, %s, output layer in %s, weights %s (BF16 %s), %s runner, loaded in %.1f s",
        settings.model_name,
        info.architecture,
        info.scheme,
        info.lm_head,
        size_text(info.weight_bytes),
        size_text(info.bf16_bytes),
        info.runner,
        info.load_seconds,
    )
    _LOG.info(
        "KV cache: %s in %s, %d tokens; context %d tokens, %d requests at a time",
        size_text(info.kv_bytes),
        info.kv_element,
        info.kv_bytes // max(info.kv_bytes_per_token, 1),
        info.max_model_len,
        info.max_num_seqs,
    )
    if info.state_bytes:
        _LOG.info(
            "states of sequences: %s, %d copies for equal prefixes", size_text(info.state_bytes), info.state_copies
        )
    if info.deterministic:
        _LOG.info("deterministic: the same bits whatever else runs, by batch-invariant kernels of %s", info.isa)
    if info.activations != info.dtype:
        _LOG.info("inputs of the linears are rounded to %s where that is faster: --activations", info.activations)
    if info.reason_not_native:
        _LOG.warning("slow: the native runner does not support this checkpoint: %s", info.reason_not_native)
    if not settings.on_loopback and not settings.api_keys:
        _LOG.warning("everybody who reaches %s can use this server: it needs no API key", settings.host)
