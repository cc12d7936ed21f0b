"""A server with OpenAI's API for one machine: FastAPI on uvicorn.

`settings` holds the server's settings and `app` joins the parts. A request passes `http_connection` (limits of HTTP),
`middleware` (id, log, host, key, body), a file of `serve.api` (validation and translation), `api.respond`, `service`
(tokens of prompts, submission to the engine), `generation` (deliveries of the engine) and the API's writer. Several
machines, LoRA and images are left to larger servers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minifloat.serve.server.app import create_app, serve
    from minifloat.serve.server.http_server import listen
    from minifloat.serve.server.settings import ServerSettings, read_api_keys
    from minifloat.serve.server.start import serve_checkpoint

#: Public name -> the module that defines it; resolved on first use, because some modules import torch.
_EXPORTS = {
    "ServerSettings": "settings",
    "create_app": "app",
    "listen": "http_server",
    "read_api_keys": "settings",
    "serve": "app",
    "serve_checkpoint": "start",
}

__all__ = ["ServerSettings", "create_app", "listen", "read_api_keys", "serve", "serve_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
