"""The callback by which long runs report progress."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the work done so far, the total work, and a description of the current step. Each function documents its
#: own unit of work: bytes, tokens, sequences or milliseconds.
Progress = Callable[[int, int, str], None]
