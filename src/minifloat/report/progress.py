"""How a long run tells its caller how far it is."""

from __future__ import annotations

from collections.abc import Callable

#: Called with the work done, the work in all, and what is being done now. The unit of work is the function's own:
#: bytes, tokens, sequences or milliseconds.
Progress = Callable[[int, int, str], None]
