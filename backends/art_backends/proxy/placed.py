"""A client's call that takes a place, belongs to its rollout as long as that is open, and is recorded for it.

It refuses to know who answers: see ``exchange`` for the policy's engine, ``passthrough`` for a provider.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Send

from art_backends.proxy import wire
from art_backends.proxy.attended import Attended
from art_backends.proxy.dialect import Dialect
from art_backends.proxy.identity import Identity, RolloutContext
from art_backends.proxy.limits import Overloaded
from art_backends.proxy.recorder import Recording
from art_backends.proxy.services import Services
from art_backends.trajectories import Sampling


class Placed(Attended):
    """``body`` is the request with its ``model``. ``_attend`` answers; it is called with a place in the gate held."""

    def __init__(
        self,
        services: Services,
        *,
        dialect: Dialect,
        identity: Identity,
        body: dict[str, Any],
        headers: list[tuple[str, str]],
    ) -> None:
        observed = services.observer.call(dialect.name, body["model"], headers)
        super().__init__(observed, services.limits.write_seconds)
        self._services = services
        self._dialect = dialect
        self._identity = identity
        self._request = body
        self._request_headers = headers
        self._context: RolloutContext | None = None  # of the rollout, if it is open
        self._recording: Recording | None = None

    async def _attend(self, send: Send) -> None:
        raise NotImplementedError

    def _recorded(self) -> dict[str, Any]:
        """The request as the record has it."""
        return self._request

    async def _work(self, send: Send) -> None:
        services, context = self._services, self._identity.rollout
        if context is not None and context.closed:
            services.counters.late += 1
            context = None
        self._context = context
        try:
            async with services.gate:
                services.running[id(self)] = None if context is None else context.id, time.monotonic()
                try:
                    await self._attend(send)
                finally:
                    del services.running[id(self)]
        except Overloaded as refusal:
            if context is not None:
                services.recorder.refused(context, request=self._recorded(), **self._origin())
            content = self._dialect.refused(refusal.status, wire.envelope(refusal.status, str(refusal)))
            await self._answer(send, refusal.status, [(b"retry-after", str(refusal.retry_after).encode())], content)

    async def _begin(self, context: RolloutContext, sampling: Sampling) -> Recording:
        """Note the call's intent."""
        self._recording = await self._services.recorder.begin(
            context, request=self._recorded(), model=self._request["model"], sampling=sampling, **self._origin()
        )
        return self._recording

    def _origin(self) -> dict[str, Any]:
        headers = {name: value for name, value in self._request_headers if name[:2] == "x-"}
        return {"node": wire.node(headers), "retry": wire.retry_count(headers)}
