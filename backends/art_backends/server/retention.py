"""What was kept is deleted again: by age, and all that is about somebody.

Deleted are rollouts, their calls, what was trained of them, and the examples in ``report.json`` that show them.
Adapter versions that learned from them stay, because a weight cannot forget; they are named.

It refuses to delete by halves without a word: what fails is an error, and asking again deletes the rest.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from art_backends.errors import StoreError
from art_backends.report import write_json
from art_backends.server.sessions import Sessions
from art_backends.server.traffic import Traffic
from art_backends.store import AsyncStore, Forgotten, subject_digest
from art_backends.store.forgetting import BY_AGE

log = logging.getLogger(__name__)

DAY = 86400.0  # seconds
LOOK_SECONDS = 60.0  # between two looks at what is too old: each goes through all rollouts
REPORT = "report.json"
FORGOTTEN = "forgotten"


class Retention:
    """Deletes in the store of a running server. ``forget_calls`` is told each rollout that is gone."""

    def __init__(
        self,
        store: AsyncStore,
        sessions: Sessions,
        traffic: Traffic,
        folder: Path,
        *,
        keep_days: float | None,
        forget_calls: Callable[[str], None],
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._traffic = traffic
        self._folder = folder
        self._keep_days = keep_days
        self._forget_calls = forget_calls
        self._next = 0.0  # time.monotonic() of the next look at what is too old

    async def forget(self, subject: str) -> tuple[Forgotten, int]:
        """Delete all that is about a subject, open rollouts too; also how many examples went. StoreError."""
        digest = subject_digest(subject)
        await self._sessions.close_about(digest, fault=FORGOTTEN)
        await self._traffic.close_about(digest)
        forgotten = await self._store.forget(subject=subject)
        self._done(forgotten)
        examples = await asyncio.to_thread(drop_examples, self._folder / REPORT, subject, forgotten)
        return forgotten, examples

    async def expire(self) -> None:
        """Delete what is older than the settings allow."""
        if self._keep_days is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        while True:
            forgotten = await self._store.forget_before(time.time() - self._keep_days * DAY)
            self._done(forgotten)
            if forgotten.rollouts:
                log.info("deleted %d rollouts older than %g days", len(forgotten.rollouts), self._keep_days)
            if len(forgotten.rollouts) < BY_AGE:
                return

    def _done(self, forgotten: Forgotten) -> None:
        for rollout_id in forgotten.rollouts:
            self._forget_calls(rollout_id)


def drop_examples(report: Path, subject: str, forgotten: Forgotten) -> int:
    """Take the examples about a subject, and those of deleted scenarios, out of a report; returns how many.

    StoreError if the report is there and cannot be read or written.
    """
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
        examples = content["examples"]
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{report}: its examples cannot be looked through: {error}; delete it by hand") from None
    scenarios = set(forgotten.scenarios) - {""}
    kept = [item for item in examples if not _about(item, subject, scenarios)]
    if len(kept) < len(examples):
        write_json(report, {**content, "examples": kept})
    return len(examples) - len(kept)


def _about(example: Any, subject: str, scenarios: set[str]) -> bool:
    scenario = example.get("scenario") if isinstance(example, dict) else None
    if not isinstance(scenario, dict):
        return False
    return scenario.get("subject") == subject or scenario.get("id") in scenarios
