"""The application of the server in this process, around an engine, with its event loop: no sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from minifloat.engine import AsyncEngine
from minifloat.serve.server import ServerSettings, create_app

MODEL = "fuzzed"
#: Seconds in which a request must be answered, and the engine be idle again.
PATIENCE = 20.0
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for message in messages %}{{ message.role }}: "
    "{{ message.content }}{% for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{# <think></think> #}"
)
_Result = TypeVar("_Result")


class Application:
    """A started application.

    Args:
        engine: An `Engine`, or what stands in for it.
    """

    def __init__(self, engine: Any) -> None:
        self.settings = ServerSettings(MODEL, chat_template=TEMPLATE, read_timeout=PATIENCE, request_timeout=PATIENCE)
        self.engine = AsyncEngine(engine, 64)
        self.app = create_app(self.engine, self.settings)
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self._stack = AsyncExitStack()
        self.wait(self._stack.enter_async_context(self.app.router.lifespan_context(self.app)))

    def wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine to its end.

        Raises:
            TimeoutError: It takes longer than `PATIENCE`.
        """
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    async def idle(self) -> None:
        """Wait until no request runs or waits."""
        while self.engine.running or self.engine.waiting:
            await asyncio.sleep(0.001)
