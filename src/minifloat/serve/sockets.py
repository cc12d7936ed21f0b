"""The address of a server, taken before anything that needs time."""

from __future__ import annotations

import socket

from minifloat.errors import UsageError


def bind(host: str, port: int) -> socket.socket:
    """A socket at an address: one that is in use is found out at once.

    Raises:
        UsageError: The address cannot be had.
    """
    name = host.strip("[]")
    made = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((name, port))
    except OSError as error:
        made.close()
        raise UsageError(f"{host}:{port}: cannot listen there: {error.strerror}") from error
    return made
