"""Replies of the embedded engine as ASGI responses: JSON or server-sent events, for as long as the client listens.

A reply is computed while it is sent, and is cancelled, its rows in the engine with it, when the client goes away.
Errors before the first byte are HTTP errors; later ones are an ``error`` event followed by ``[DONE]``, as in vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from art_backends.engines.embedded.protocol import ApiError
from art_backends.errors import AdapterError, ArtError, EngineError, TemplateError

MAX_BODY_BYTES = 32 * 1024 * 1024

_log = logging.getLogger(__name__)


async def read_json(request: Request) -> Any:
    """The decoded body; ApiError 413 beyond MAX_BODY_BYTES, 400 where it is no JSON."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES} bytes", status=413)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not valid JSON: {error}") from None


def as_api_error(error: Exception) -> ApiError:
    """Any error as what the client is told; unforeseen ones are logged and told without their details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineError):
        return ApiError(str(error), status=error.status, code=error.code)
    if isinstance(error, AdapterError | TemplateError):
        return ApiError(str(error))
    if isinstance(error, ArtError):
        return ApiError(str(error), status=500, code=type(error).__name__)
    _log.error("a request failed", exc_info=error)
    return ApiError(f"the engine failed: {type(error).__name__}; its log has the details", status=500, code="error")


def json_response(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


def error_response(error: Exception) -> Response:
    told = as_api_error(error)
    return json_response(told.envelope(), told.status)


class JsonReply:
    """Sends what ``work`` returns."""

    def __init__(self, work: Callable[[], Awaitable[Any]]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = json_response(await self._work())
        except Exception as error:  # noqa: BLE001 - boundary: every failure of a request becomes its error reply
            response = error_response(error)
        await response(scope, receive, send)


class EventReply:
    """Sends each JSON value of ``events`` as a server-sent event, then ``[DONE]``."""

    def __init__(self, events: AsyncGenerator[Any, None]) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(self._answer(scope, receive, send), receive)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    if not started:
                        started = True
                        await send(_START)
                    await _send_event(send, orjson.dumps(event))
            except OSError:
                raise  # the connection itself: nobody is left to be told
            except Exception as error:  # noqa: BLE001 - boundary: every failure of a request becomes its error reply
                if not started:
                    await error_response(error)(scope, receive, send)
                    return
                await _send_event(send, orjson.dumps(as_api_error(error).envelope()))
        await _send_event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")],
}


async def _send_event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work``; cancel it, and wait until it has cleaned up, when the client disconnects."""
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            job.result()
    finally:
        job.cancel()
        gone.cancel()
        await asyncio.gather(job, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
