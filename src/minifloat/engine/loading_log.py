"""What the log says while a large model is loaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

_LOG = logging.getLogger(__name__)
_Item = TypeVar("_Item")
SECONDS_BETWEEN_LINES = 5.0


def logged_layers(layers: Sequence[_Item]) -> Iterator[_Item]:
    """Yield the layers that are to be loaded, and log how many are done, every `SECONDS_BETWEEN_LINES` at most."""
    said = time.monotonic()
    for number, layer in enumerate(layers):
        now = time.monotonic()
        if now - said >= SECONDS_BETWEEN_LINES:
            said = now
            _LOG.info("loading: %d of %d layers", number, len(layers))
        yield layer
