"""An engine behind OpenAI's API, for one machine: FastAPI on uvicorn.

`settings` is what a server is told; `app` puts the parts together; a request passes `connection` (limits of HTTP),
`middleware` (id, log, host, key, body), `protocol` (its shape), `prompts` and `chat` (its tokens), `service` (to the
engine), `generation` (from the engine) and `writers` (the answer). Several machines, LoRA, images and tool calls are
left to larger servers.
"""

from minifloat.serve.server.app import create_app, serve
from minifloat.serve.server.connection import listen
from minifloat.serve.server.settings import ServerSettings, read_api_keys

__all__ = ["ServerSettings", "create_app", "listen", "read_api_keys", "serve"]
