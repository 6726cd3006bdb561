"""Calls of apps, outside of rollouts that a run opens, kept as rollouts of their own where the settings ask for it.

A *session* is what an app names so: the header ``x-art-session``, or ``session_id``, ``thread_id`` or
``conversation_id`` in the request's ``metadata``. Its calls are one rollout of purpose ``traffic`` until none has come
for a while; a call without a session is one alone. Whom it is about is the header ``x-art-subject``, or
``safety_identifier``, ``user`` or ``metadata.user_id`` of the request.

It refuses to keep anything unless ``privacy.traffic`` says so, to keep part of a session, and to fail a call: trouble
with the store is logged, and the call is served and not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from art_backends.config import Privacy
from art_backends.errors import StoreError
from art_backends.proxy.identity import RolloutContext
from art_backends.server.policy import PolicyTable
from art_backends.store import AsyncStore, subject_digest
from art_backends.trajectories import Purpose, Rollout, version_name

log = logging.getLogger(__name__)

SESSIONS = 10_000  # open at once; beyond that the one that waited longest is over
LONGEST = 200  # characters of a session's name
_SESSION_FIELDS = ("session_id", "thread_id", "conversation_id")
_SUBJECT_FIELDS = ("safety_identifier", "user")


@dataclass(eq=False)
class _Session:
    rollout_id: str
    subject: str | None
    opening: asyncio.Task[bool]
    last: float  # time.monotonic()


class Traffic:
    """The open sessions of apps. Lives in one event loop."""

    def __init__(self, store: AsyncStore, policies: PolicyTable, privacy: Privacy) -> None:
        self._store = store
        self._policies = policies
        self._privacy = privacy
        self.on_closed: Callable[[str], None] | None = None  # told the id of each rollout that ended
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the one called last is last

    def __len__(self) -> int:
        return len(self._sessions)

    async def context(self, asked: Mapping[str, Any], headers: Mapping[str, str]) -> RolloutContext | None:
        """The rollout that an app's call is kept in, or None if it is not. ``headers`` in lower case."""
        if self._privacy.traffic == "off":
            return None
        name = _session_of(asked, headers)
        key = name or uuid.uuid4().hex
        if self._privacy.traffic == "sampled" and not _drawn(key, self._privacy.traffic_share):
            return None
        session = self._sessions.get(key)
        if session is None:
            session = self._begin(key, name, _subject_of(asked, headers))
        self._sessions.move_to_end(key)
        session.last = time.monotonic()
        if not await asyncio.shield(session.opening):
            self._sessions.pop(key, None)
            return None
        version = self._policies.version_of(str(asked["model"]))
        return RolloutContext(session.rollout_id, self._policies.name, version, purpose=Purpose.TRAFFIC)

    async def close_idle(self, *, now: float | None = None) -> None:
        """End the sessions without a call for ``session_seconds``, and what is beyond SESSIONS."""
        late = (time.monotonic() if now is None else now) - self._privacy.session_seconds
        for key, session in list(self._sessions.items()):
            if session.last > late and len(self._sessions) <= SESSIONS:
                break
            await self._end(key, session)

    async def close_about(self, subject: str) -> None:
        """End the sessions about somebody; ``subject`` is the digest."""
        for key, session in list(self._sessions.items()):
            if session.subject == subject:
                await self._end(key, session)

    async def close_all(self) -> None:
        """End all sessions: the server stops."""
        for key, session in list(self._sessions.items()):
            await self._end(key, session)

    def _begin(self, key: str, name: str | None, subject: str | None) -> _Session:
        number = self._policies.alias
        rollout = Rollout(
            id=uuid.uuid4().hex,
            policy=self._policies.name,
            version=version_name(self._policies.name, number),
            purpose=Purpose.TRAFFIC,
            group=(name or "")[:LONGEST],
            subject=subject,
            opened=time.time(),
        )
        opening = asyncio.create_task(self._open(rollout), name="traffic")
        session = self._sessions[key] = _Session(rollout.id, subject, opening, time.monotonic())
        return session

    async def _open(self, rollout: Rollout) -> bool:
        try:
            await self._store.open_rollout(rollout)
        except StoreError as error:
            log.error("an app's calls are not kept: %s", error)
            return False
        return True

    async def _end(self, key: str, session: _Session) -> None:
        self._sessions.pop(key, None)
        if await session.opening:
            try:
                await self._store.close_rollout(session.rollout_id)
            except StoreError as error:
                log.error("an app's session stays open until the next start: %s", error)
            if self.on_closed is not None:
                self.on_closed(session.rollout_id)


def _session_of(asked: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    metadata = asked.get("metadata")
    given = [headers.get("x-art-session")]
    given += [metadata.get(name) for name in _SESSION_FIELDS] if isinstance(metadata, dict) else []
    return next((item for item in given if isinstance(item, str) and item), None)


def _subject_of(asked: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    metadata = asked.get("metadata")
    given = [headers.get("x-art-subject"), *(asked.get(name) for name in _SUBJECT_FIELDS)]
    given.append(metadata.get("user_id") if isinstance(metadata, dict) else None)
    found = next((item for item in given if isinstance(item, str) and item), None)
    return None if found is None else subject_digest(found)


def _drawn(key: str, share: float) -> bool:
    """Whether a session is among those that are kept: always the same for a name, on every server."""
    number = int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big")
    return number < share * 2**64
