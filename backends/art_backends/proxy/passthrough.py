"""A call for a model that is not the policy's: to its provider and back, byte for byte, and heard on the way.

A rollout's call is recorded as text: what was asked and said, excluded from training as ``provider``. What it says is
context for the policy, and may be worked examples one day. It refuses to change an answer, to send a request twice, and
to let trouble of the record reach the agent.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Send

from art_backends.errors import EngineError
from art_backends.proxy import sse, wire
from art_backends.proxy.attended import StuckClientError
from art_backends.proxy.dialect import Dialect
from art_backends.proxy.engine_client import EngineStream
from art_backends.proxy.identity import Identity
from art_backends.proxy.placed import Placed
from art_backends.proxy.providers import Upstream
from art_backends.proxy.services import Services
from art_backends.trajectories import CallStatus, CaptureLevel, Choice, Sampling

log = logging.getLogger(__name__)

_ERROR_TEXT = 1000  # characters of an error kept in the record
_ENDS = re.compile(rb"\[DONE\]|response\.(completed|incomplete|failed)|message_stop")  # of a stream, in any format


class PassThrough(Placed):
    """See the module. ``path`` is the provider's, ``body`` the client's own request."""

    def __init__(
        self,
        services: Services,
        *,
        upstream: Upstream,
        dialect: Dialect,
        identity: Identity,
        path: str,
        body: dict[str, Any],
        headers: list[tuple[str, str]],
    ) -> None:
        super().__init__(services, dialect=dialect, identity=identity, body=body, headers=headers)
        self._upstream = upstream
        self._path = path
        self._listener = dialect.listener()
        self._splitter = sse.Splitter(services.limits.event_bytes)
        self._deaf = False  # the answer was not understood: no more of it is listened to

    async def _attend(self, send: Send) -> None:
        self._services.counters.passed += 1
        try:
            if self._context is not None:
                self._observed.belongs(self._context.id, None)
                await self._begin(self._context, Sampling())
            await self._ask(send)
        except asyncio.CancelledError:
            if not self._delivered:
                self._services.counters.cancelled += 1
                await asyncio.shield(self._finish(CallStatus.CANCELLED))
            raise
        except StuckClientError:
            self._services.counters.cancelled += 1
            await self._finish(CallStatus.CANCELLED)
        except (EngineError, TimeoutError) as error:
            status = error.status if isinstance(error, EngineError) else 504
            said = str(error) if isinstance(error, EngineError) else "it did not answer in time"
            await self._fail(send, status, said.replace("the engine", "it"))
        except Exception as error:  # boundary: whatever goes wrong in here, the call gets an outcome
            log.exception("a call to a provider failed in the proxy")
            await self._fail(send, 502, f"the proxy failed: {type(error).__name__}")
        finally:
            if self._recording is not None:
                self._services.recorder.end(self._recording)

    def _recorded(self) -> dict[str, Any]:
        """As a chat completion, if it can be one."""
        try:
            return self._dialect.read(self._request, self._identity.owner)[0]
        except Exception:  # noqa: BLE001 - boundary: what cannot be read here is for the provider to read
            return self._request

    async def _ask(self, send: Send) -> None:
        limits = self._services.limits
        headers = wire.request_headers(self._request_headers, None) + self._observed.onward()
        content = orjson.dumps(wire.without_addresses(self._request))
        async with self._upstream.client.open(
            self._path, content, headers, first_byte_seconds=limits.first_byte_seconds
        ) as reply:
            async with asyncio.timeout(limits.total_seconds):
                if reply.status == 200 and reply.is_events:
                    await self._stream(send, reply)
                else:
                    await self._whole(send, reply)

    async def _whole(self, send: Send, reply: EngineStream) -> None:
        content = await reply.read()
        if reply.status == 200:
            self._hear(self._listener.whole, content)
            await self._finish(CallStatus.OK)
        else:
            said = content[:_ERROR_TEXT].decode(errors="replace")
            await self._finish(CallStatus.ERROR, error=f"{reply.status} {self._upstream.name}: {said}"[:_ERROR_TEXT])
        status = 502 if 300 <= reply.status < 400 else reply.status
        await self._answer(send, status, wire.reply_headers(reply.headers), content)

    async def _stream(self, send: Send, reply: EngineStream) -> None:
        limits = self._services.limits
        await self._start(send, 200, wire.reply_headers(reply.headers))
        held: list[bytes] = []  # of a recorded call, from its end on: sent when the outcome is durable
        while read := await reply.next_read(limits.idle_seconds):
            self._hear(self._events, read)
            if held or (self._recording is not None and _ENDS.search(read)):
                held.append(read)
            else:
                await self._send_part(send, read)
        await self._finish(CallStatus.OK)
        await self._send_last(send, b"".join(held))

    def _events(self, read: bytes) -> None:
        for event in self._splitter.feed(read):
            if event.data is not None:
                self._listener.event(event.data)

    def _hear(self, listen: Callable[..., Any], *content: bytes) -> Any:
        if self._recording is None or self._deaf:
            return None
        try:
            return listen(*content)
        except Exception as error:  # noqa: BLE001 - boundary: the agent gets its answer, understood by us or not
            self._deaf = True
            log.info("an answer of %s could not be read for the record: %s", self._upstream.name, error)
            return None

    async def _fail(self, send: Send, status: int, said: str) -> None:
        """The provider cannot be reached, or broke off. A stream that has begun is cut: nobody takes it for whole."""
        self._services.counters.errors += 1
        message = f"provider {self._upstream.name}: {said}"
        await self._finish(CallStatus.ERROR, error=f"{status} {message}"[:_ERROR_TEXT])
        if self._started:
            self._delivered = True
            return
        content = self._dialect.refused(status, wire.envelope(status, message, code="provider_error"))
        await self._answer(send, status, [], content)

    async def _finish(self, status: CallStatus, **changes: Any) -> None:
        if self._recording is None:
            return
        choices: list[Choice] = []
        if status is CallStatus.OK:
            choices = self._hear(self._listener.choices) or []
        facts: dict[str, Any] = {"choices": choices, "capture": CaptureLevel.TEXT, "version": None, **changes}
        await self._services.recorder.finish(self._recording, status, **facts, excluded="provider")
