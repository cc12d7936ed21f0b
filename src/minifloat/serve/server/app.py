"""The ASGI application that serves an engine through several APIs: `create_app` to embed it, `serve` to run it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from minifloat._version import __version__
from minifloat.errors import MinifloatError
from minifloat.serve.api import chat, completions, embeddings, messages, rerank, responses, tokens
from minifloat.serve.server import routes
from minifloat.serve.server.errors import APIError, from_http, from_minifloat, from_validation
from minifloat.serve.server.http_server import Server, address, fitting_connections
from minifloat.serve.server.middleware import Guard, RequestLog
from minifloat.serve.server.openapi import describe
from minifloat.serve.server.service import Service
from minifloat.serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from minifloat.engine import AsyncEngine

_LOG = logging.getLogger("minifloat.server")


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """Return an ASGI application."""
    service = Service(engine, settings)
    engine.engine.observer = service.metrics

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        yield
        # running requests are cut off; `serve` has closed the engine before, which lets them finish
        await engine.close()
        service.prompts.close()

    app = FastAPI(
        title="minifloat",
        version=__version__,
        description="A language model behind OpenAI's and Anthropic's APIs.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's documentation pages load scripts from other hosts
        redoc_url=None,
        responses={},
    )
    app.state.service = service
    for module in (completions, chat, responses, messages, embeddings, rerank, tokens, routes):
        app.include_router(module.router)
    _describe_when_asked(app, settings.model_name, service.info.vocab_size)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(MinifloatError, _answer_minifloat_error)
    app.add_exception_handler(Exception, _answer_unexpected_error)
    app.add_middleware(Guard, settings=settings)
    app.add_middleware(RequestLog, metrics=service.metrics)
    return app


def _describe_when_asked(app: FastAPI, name: str, vocab_size: int) -> None:
    """Let the OpenAPI document be made by the first request for it: that takes longer than all else here."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            describe(make(), name, vocab_size)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    return from_validation(cast(RequestValidationError, error).errors()).response(request.url.path)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    return from_http(cast(HTTPException, error)).response(request.url.path)


async def _answer_minifloat_error(request: Request, error: Exception) -> JSONResponse:
    answer = from_minifloat(cast(MinifloatError, error))
    if answer.code in ("queue_full", "stopping"):
        request.app.state.service.metrics.rejected(answer.code)
    return answer.response(request.url.path)


async def _answer_unexpected_error(request: Request, error: Exception) -> JSONResponse:
    return APIError(500, "internal server error").response(request.url.path)  # uvicorn logs the traceback


def serve(engine: AsyncEngine, settings: ServerSettings, listening: socket.socket) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then finish the admitted requests."""
    settings = replace(settings, max_connections=fitting_connections(settings.max_connections))
    app = create_app(engine, settings)
    server = Server(app, engine, settings)
    dialogs = app.state.service.prompts.dialogs
    if dialogs.has_template:
        _LOG.info(
            "tool calls: %s; thinking: %s",
            f"in the format {dialogs.tool_format}" if dialogs.tool_format else "refused",
            "told apart from answers" if dialogs.thinks else "not told apart",
        )
    _LOG.info("serving %s on %s", settings.model_name, address(listening))
    asyncio.run(server.serve(sockets=[listening]))
