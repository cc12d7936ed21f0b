"""Binds the address of a server."""

from __future__ import annotations

import errno
import socket

from minifloat.errors import UsageError


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
