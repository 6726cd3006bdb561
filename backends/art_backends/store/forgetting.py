"""Deleting rollouts with all that was kept of them: by whom they are about, by age, or by name.

It refuses to delete a rollout that is open: whoever holds it closes it first.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from art_backends.store import rows

BY_AGE = 1000  # rollouts that one transaction deletes for their age


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was deleted. ``versions``: the adapter versions, "NAME@N", that learned from it and still stand."""

    rollouts: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    calls: int = 0
    versions: tuple[str, ...] = ()


def subject_digest(subject: str) -> str:
    """How a subject stands in the store: SHA-256 of it, hexadecimal."""
    return hashlib.sha256(subject.encode("utf-8", "surrogatepass")).hexdigest()


def of_subject(connection: sqlite3.Connection, digest: str) -> list[str]:
    """Ids of the closed rollouts about a subject."""
    found = connection.execute("SELECT id FROM rollouts WHERE subject = ? AND closed = 1 ORDER BY number", (digest,))
    return [row[0] for row in found]


def finished_before(connection: sqlite3.Connection, seconds: float) -> list[str]:
    """Ids of the first closed rollouts that ended before a time (seconds since the epoch), BY_AGE at most."""
    found = connection.execute(
        "SELECT id FROM rollouts WHERE closed = 1 AND finished < ? ORDER BY number LIMIT ?", (seconds, BY_AGE)
    )
    return [row[0] for row in found]


def forget(connection: sqlite3.Connection, rollout_ids: Iterable[str]) -> Forgotten:
    """Delete these rollouts, their calls, tokens, and what was trained of them; unknown and open ones are left out."""
    wanted = sorted(set(rollout_ids))
    deleted: list[str] = []
    scenarios: set[str] = set()
    versions: set[str] = set()
    calls = 0
    for start in range(0, len(wanted), rows.BATCH):
        batch = wanted[start : start + rows.BATCH]
        found = connection.execute(
            f"SELECT id, scenario_id FROM rollouts WHERE closed = 1 AND id IN ({_marks(batch)}) ORDER BY number",  # noqa: S608  only marks
            batch,
        ).fetchall()
        closed = [row[0] for row in found]
        if not closed:
            continue
        deleted += closed
        scenarios.update(row[1] for row in found)
        versions.update(_learned(connection, closed))
        marks = _marks(closed)
        calls += connection.execute(f"DELETE FROM calls WHERE rollout_id IN ({marks})", closed).rowcount  # noqa: S608
        for table, column in (("trained", "rollout_id"), ("tokens", "rollout_id"), ("rollouts", "id")):
            connection.execute(f"DELETE FROM {table} WHERE {column} IN ({marks})", closed)  # noqa: S608  literals
    return Forgotten(tuple(deleted), tuple(sorted(scenarios)), calls, tuple(sorted(versions)))


def _learned(connection: sqlite3.Connection, rollout_ids: Sequence[str]) -> list[str]:
    found = connection.execute(
        "SELECT DISTINCT steps.policy, steps.version FROM trained JOIN steps"  # noqa: S608  only marks
        " ON steps.policy = trained.policy AND steps.step = trained.step"
        f" WHERE steps.kind = 'committed' AND trained.rollout_id IN ({_marks(rollout_ids)})",
        rollout_ids,
    )
    return [f"{row[0]}@{row[1]}" for row in found]


def _marks(items: Sequence[str]) -> str:
    return ", ".join("?" * len(items))
