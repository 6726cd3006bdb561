"""A call that is watched: when its client goes away, or the server stops, the work for it ends.

It refuses to know what the work is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from art_backends.proxy.observing import Observed

_PIECE = 256 * 1024  # bytes of an answer that wait for the client at most: the server buffers what it is given


class StuckClientError(Exception):
    """The client holds its connection open but does not read."""


class Attended(Response):
    """An ASGI response whose answer is made by ``_work``, which is cancelled when nobody waits for it any more.

    ``write_seconds``: until a client that does not read is given up.
    """

    def __init__(self, observed: Observed, write_seconds: float) -> None:
        super().__init__()
        self._observed = observed
        self._write_seconds = write_seconds
        self._started = False  # the client has a status line
        self._delivered = False  # the client has everything: its leaving means nothing any more
        self._gone = False
        self._stuck = False
        self._writing: float | None = None  # since when, time.monotonic()
        self._timer: asyncio.TimerHandle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._observed:
            await self._attended(receive, send)

    async def _attended(self, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(receive, task))
        self._timer = asyncio.get_running_loop().call_later(self._write_seconds, self._look, task)
        try:
            await self._work(send)
            if self._gone:
                await asyncio.sleep(0)  # the work ended just then: this is where the cancellation comes
        except asyncio.CancelledError:
            if not self._gone or task.uncancel() > 0:  # the server itself is being stopped
                raise
        finally:
            watch.cancel()
            self._timer.cancel()

    async def _watch(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self._delivered:
            self._gone = True
            task.cancel("the client went away")

    async def _work(self, send: Send) -> None:
        raise NotImplementedError

    async def _answer(self, send: Send, status: int, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        headers = [*headers, (b"content-length", str(len(content)).encode())]
        if not any(name == b"content-type" for name, _ in headers):
            headers.append((b"content-type", b"application/json"))
        await self._start(send, status, headers)
        sent = 0
        while len(content) - sent > _PIECE:
            await self._send_part(send, content[sent : sent + _PIECE])
            sent += _PIECE
        await self._send_last(send, content[sent:])

    async def _start(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        await self._write(send, {"type": "http.response.start", "status": status, "headers": headers})
        self._started = True
        self._observed.answered(status)

    async def _send_part(self, send: Send, content: bytes) -> None:
        await self._write(send, {"type": "http.response.body", "body": content, "more_body": True})
        self._observed.told()

    async def _send_last(self, send: Send, content: bytes) -> None:
        await self._write(send, {"type": "http.response.body", "body": content, "more_body": False})
        self._delivered = True
        self._observed.told()

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        self._writing = time.monotonic()
        try:
            await send(message)
        except asyncio.CancelledError:
            if self._stuck and (task := asyncio.current_task()) is not None and task.uncancel() == 0:
                raise StuckClientError from None
            raise
        finally:
            self._writing = None

    def _look(self, task: asyncio.Task[Any]) -> None:
        """End a write that takes too long: one timer for all of a call's, which is cheaper than one for each."""
        now = time.monotonic()
        left = self._write_seconds if self._writing is None else self._writing + self._write_seconds - now
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look, task)
        else:
            self._stuck = True
            task.cancel("the client does not read")
