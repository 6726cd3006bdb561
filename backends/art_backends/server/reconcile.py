"""Makes store, engine and alias agree with the versions on disk, at start.

The folder of a version is the commit point of its step: what it says wins. The newest version that the engine can
really serve becomes the alias (beside version 0, where that is an adapter); a step that was committed but not recorded
is recorded; recorded steps whose version is gone are forgotten, so that they are made again; rollouts that a killed
server left open are closed as faulty.

It refuses to delete a version: one that cannot be served is set aside.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from art_backends.errors import AdapterError
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.store import AsyncStore
from art_backends.training.versions import VersionInfo, list_versions, read_version, sweep

log = logging.getLogger(__name__)

INTERRUPTED = "interrupted"


async def reconcile(
    *,
    store: AsyncStore,
    policies: PolicyTable,
    adapters: Adapters,
    versions: Path,
    digest: str,
    started: float,
    pinned: int | None = None,
) -> None:
    """See the module. ``digest`` is the base model's; ``started`` the server's start, seconds since the epoch;
    ``pinned`` the version that the alias is fixed to. Raises AdapterError if that one cannot be served."""
    swept = await asyncio.to_thread(sweep, versions)
    if swept:
        log.info("removed %d unfinished versions", swept)
    if await asyncio.to_thread(read_version, versions, policies.name, 0) is not None:
        policies.begin_from_adapter()
        await adapters.load(0)
    kept = await _serve_newest(policies, adapters, versions, digest)
    if pinned is not None:
        try:
            await adapters.load(pinned)
        except AdapterError as error:
            raise AdapterError(
                f"the pinned version cannot be served: {error}; pin another one, or: art-backends versions unpin"
            ) from None
        policies.fixed = pinned
    await _record(store, policies, kept)
    closed = await store.close_open_rollouts(fault=INTERRUPTED, opened_before=started)
    if closed:
        log.warning("closed %d rollouts that the last server left open", len(closed))


async def _serve_newest(policies: PolicyTable, adapters: Adapters, versions: Path, digest: str) -> list[VersionInfo]:
    found = await asyncio.to_thread(list_versions, versions, policies.name)
    while found:
        newest = found[-1]
        made_from = newest.state.get("base_digest")
        try:
            if made_from is not None and made_from != digest:
                raise AdapterError(f"{newest.path}: made from another base model (digest {made_from})")
            await adapters.load(newest.version)
        except AdapterError as error:
            log.error("%s", error)
            adapters.set_aside(newest.version, str(error))
            found.pop()
            continue
        policies.move(newest.version)
        break
    return found


async def _record(store: AsyncStore, policies: PolicyTable, kept: list[VersionInfo]) -> None:
    recorded = await store.steps(policies.name)
    gone = [int(item["step"]) for item in recorded if item["kind"] == "committed" and item["version"] > policies.newest]
    if gone:
        log.warning("steps from %d on are made again: their versions are gone", min(gone))
        await store.drop_steps(policies.name, from_step=min(gone))
    known = {int(item["version"]) for item in recorded if item["kind"] == "committed"}
    for info in kept:
        if info.version not in known:
            step = int(info.state.get("step", info.version))
            log.info("step %d was committed but not recorded: recorded now", step)
            await store.record_step(policies.name, step, _outcome(info))


def _outcome(info: VersionInfo) -> dict[str, Any]:
    return {
        "kind": "committed",
        "version": info.version,
        "reason": None,
        "metrics": dict(info.state.get("metrics") or {}),
        "tokens": {},
        "rollout_ids": list(info.state.get("rollout_ids") or []),
    }
