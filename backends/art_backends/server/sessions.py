"""Open rollouts: their secret tokens, the version each is pinned to, and their end.

A rollout is opened with a token that only its opener learns (the store gets the digest), and is pinned to a version
until it is closed or expires. What a token stands for is answered from memory while its rollout is open, so that calls
are served even when the store is not.

It refuses to keep a token, and to let a rollout whose calls were not all recorded count as trainable.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
import uuid
from collections.abc import Callable
from typing import Any, Unpack

from art_backends.config import TrainConfig
from art_backends.errors import ConfigError
from art_backends.proxy.identity import Identity, RolloutContext, SamplingOverrides
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.store import AsyncStore, Ending, NotFoundError, subject_digest
from art_backends.trajectories import Purpose, Rollout, version_name

log = logging.getLogger(__name__)

GRACE_SECONDS = 300.0  # beyond the rollout's and the reward's own deadlines
TOKEN_SECONDS = 7 * 86400.0  # a rollout's token is refused when it is older
CAPTURE_LOST = "capture lost"


def digest(token: str) -> str:
    """SHA-256 of a token, hexadecimal: what is stored and compared."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def new_token() -> str:
    """256 random bits; the prefix lets secret scanners recognise it."""
    return "art-" + secrets.token_urlsafe(32)


class Sessions:
    """Who may call, and for which rollout."""

    def __init__(
        self, store: AsyncStore, policies: PolicyTable, adapters: Adapters, config: TrainConfig, *, ttl: float | None
    ) -> None:
        """``ttl``: seconds until an open rollout expires (None: what the configuration's deadlines need)."""
        self.config = config
        self._store = store
        self._policies = policies
        self._adapters = adapters
        self._ttl = ttl
        self.on_closed: Callable[[str], None] | None = None  # told the id of each rollout that ended
        self._fixed: dict[str, Identity] = {}  # admin and agent tokens
        self._open: dict[str, tuple[RolloutContext, str, int, float]] = {}  # id → context, digest, version, deadline
        self._by_digest: dict[str, RolloutContext] = {}
        self._subjects: dict[str, str] = {}  # id of an open rollout → digest of whom it is about

    def add_fixed(self, token_digest: str, identity: Identity) -> None:
        self._fixed[token_digest] = identity

    def __len__(self) -> int:
        return len(self._open)

    async def identify(self, token: str) -> Identity | None:
        """Who the token belongs to; None if it is unknown or too old. StoreError if the store must be asked and cannot.

        The token of a closed rollout still identifies it, as closed: such calls are served but not attributed.
        """
        wanted = digest(token)
        for known, identity in self._fixed.items():
            if hmac.compare_digest(known, wanted):
                return identity
        context = self._by_digest.get(wanted)
        if context is not None:
            return Identity("rollout", context, context.policy)
        found = await self._store.find_token(wanted)
        if found is None or found.kind != "rollout" or found.rollout_id is None:
            return None
        if not hmac.compare_digest(found.digest, wanted) or time.time() - found.created > TOKEN_SECONDS:
            return None
        name = self._policies.name
        late = RolloutContext(found.rollout_id, found.policy or name, self._policies.version_of(name), closed=True)
        return Identity("rollout", late, found.policy)

    async def open(
        self,
        *,
        purpose: Purpose,
        scenario_id: str,
        scenario: Any,
        step: int | None,
        group: str,
        sample: int,
        version: int | None,
    ) -> tuple[Rollout, str]:
        """A new rollout of the policy and its token. AdapterError or EngineError if ``version`` cannot be served.

        A text ``subject`` in the scenario says whom it is about.
        """
        number = self._policies.newest if version is None else version
        self._policies.pin(number)  # before the first await, so that it is not unloaded meanwhile
        try:
            if number not in self._policies.loaded:
                await self._adapters.load(number)
            token = new_token()
            rollout = Rollout(
                id=uuid.uuid4().hex,
                policy=self._policies.name,
                version=version_name(self._policies.name, number),
                purpose=purpose,
                scenario_id=scenario_id,
                scenario=scenario,
                step=step,
                group=group,
                sample=sample,
                subject=_subject(scenario),
                opened=time.time(),
            )
            await self._store.open_rollout(rollout, digest(token))
        except BaseException:
            self._policies.unpin(number)
            raise
        context = self._context(rollout)
        self._open[rollout.id] = (context, digest(token), number, time.monotonic() + self.ttl())
        self._by_digest[digest(token)] = context
        if rollout.subject is not None:
            self._subjects[rollout.id] = rollout.subject
        return rollout, token

    async def close(self, rollout_id: str, **ending: Unpack[Ending]) -> Rollout:
        """Close a rollout with its outcome; see ``Store.close_rollout``. Its pin and its attribution end here."""
        session = self._open.get(rollout_id)
        if session is not None:
            session[0].closed = True  # from now on its calls are late
            lost = session[0].capture_lost
            if lost and ending.get("fault") is None:
                ending["fault"] = f"{CAPTURE_LOST}: {lost} of its calls could not be recorded"
        elif ending.get("fault") is None:
            stored = await self._store.rollout(rollout_id)
            if stored is not None and stored.fault is not None and stored.fault.startswith(CAPTURE_LOST):
                ending["fault"] = stored.fault  # the closer does not know; asking again must not conflict
        rollout = await self._store.close_rollout(rollout_id, **ending)
        self._forget(rollout_id)
        return rollout

    async def close_about(self, subject: str, *, fault: str) -> None:
        """Close the open rollouts about somebody as faulty; ``subject`` is the digest."""
        for rollout_id in [key for key, about in self._subjects.items() if about == subject]:
            await self._end(rollout_id, fault)

    async def expire(self) -> list[str]:
        """Close rollouts whose time is over as faulty; returns their ids."""
        now = time.monotonic()
        late = [rollout_id for rollout_id, session in self._open.items() if session[3] < now]
        for rollout_id in late:
            log.warning("rollout %s was not closed within %.0f s: closed as faulty", rollout_id, self.ttl())
            await self._end(rollout_id, "expired")
        return late

    async def _end(self, rollout_id: str, fault: str) -> None:
        """Close a rollout as faulty, whether the store knows it or not."""
        try:
            await self.close(rollout_id, fault=fault)
        except NotFoundError:
            self._forget(rollout_id)

    def ttl(self) -> float:
        if self._ttl is not None:
            return self._ttl
        return self.config.rollout_timeout + self.config.reward_timeout + GRACE_SECONDS

    def settings(self, config: TrainConfig) -> None:
        """Use these settings for rollouts opened from now on."""
        if config.name != self._policies.name:
            raise ConfigError(f"name: this server serves {self._policies.name!r}, not {config.name!r}")
        self.config = config
        self._policies.models = list(config.models)

    def _context(self, rollout: Rollout) -> RolloutContext:
        overrides = SamplingOverrides(
            temperature=self.config.temperature, top_p=self.config.top_p, max_tokens=self.config.max_tokens
        )
        return RolloutContext(
            rollout.id,
            rollout.policy,
            rollout.version,
            purpose=rollout.purpose,
            overrides=overrides if rollout.purpose is Purpose.TRAIN else None,
            history=self.config.history,
        )

    def _forget(self, rollout_id: str) -> None:
        session = self._open.pop(rollout_id, None)
        self._subjects.pop(rollout_id, None)
        if session is not None:
            self._by_digest.pop(session[1], None)
            self._policies.unpin(session[2])
            if self.on_closed is not None:
                self.on_closed(rollout_id)


def _subject(scenario: Any) -> str | None:
    subject = scenario.get("subject") if isinstance(scenario, dict) else None
    return subject_digest(subject) if isinstance(subject, str) and subject else None
