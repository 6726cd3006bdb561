"""Loads adapter versions on the engine, tries them, and unloads those that nobody needs.

Each version has its own immutable name, never loaded in place. A version becomes the newest only after it answered a
probe. It refuses to decide what to train or to keep on disk.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from pathlib import Path

from art_backends.errors import AdapterError, EngineError
from art_backends.proxy.engine_client import EngineClient
from art_backends.server import probe
from art_backends.server.policy import PolicyTable
from art_backends.training.versions import read_version
from art_backends.trajectories import version_name

log = logging.getLogger(__name__)

LOAD_SECONDS = 120.0


class Adapters:
    """The engine's side of a ``PolicyTable``. One load or unload at a time."""

    def __init__(self, engine: EngineClient, policies: PolicyTable, folder: Path) -> None:
        """``folder`` holds the versions ``NAME@N``."""
        self._engine = engine
        self._policies = policies
        self._folder = folder
        self._lock = asyncio.Lock()

    async def load(self, version: int) -> None:
        """Load and try a version unless it is loaded.

        AdapterError if it is unusable, EngineError if the engine is away.
        """
        async with self._lock:
            if version in self._policies.loaded:
                return
            await self._load(version)
            self._policies.loaded.add(version)

    async def reload(self) -> None:
        """After the engine was replaced: load again what was loaded. A version that fails is given up, and logged.

        Raises the error of the newest version and the alias's: the policy would silently answer with other weights.
        """
        async with self._lock:
            for version in sorted(self._policies.loaded - self._policies.bare):
                if version in self._policies.idle():
                    self._policies.loaded.discard(version)
                    continue
                try:
                    await self._load(version)
                except AdapterError as error:
                    if version in (self._policies.newest, self._policies.alias):
                        raise
                    log.error("not loaded again: %s", error)
                    self._policies.loaded.discard(version)

    async def unload_idle(self) -> list[int]:
        """Unload what nobody needs; returns those versions. What the engine refuses is logged, and stays loaded."""
        done = []
        async with self._lock:
            for version in self._policies.idle():
                self._policies.loaded.discard(version)  # before the first await: nobody can take it now
                name = version_name(self._policies.name, version)
                try:
                    async with asyncio.timeout(LOAD_SECONDS):
                        await self._engine.unload_adapter(name)
                except (EngineError, TimeoutError) as error:
                    if not isinstance(error, EngineError) or error.status != 404:
                        log.warning("%s stays loaded: %s", name, error or "no answer")
                        self._policies.loaded.add(version)
                        continue
                done.append(version)
        return done

    def set_aside(self, version: int, reason: str) -> None:
        """Move an unusable version out of the way, so that the step that made it can be made again."""
        path = self._folder / version_name(self._policies.name, version)
        if path.exists():
            aside = path.with_name(f"broken-{path.name}-{uuid.uuid4().hex[:8]}")
            path.rename(aside)
            log.error("%s was set aside as %s", path.name, aside)
            self._policies.set_aside.append(f"{path.name} could not be served ({reason}) and is now {aside}")

    async def _load(self, version: int) -> None:
        name = version_name(self._policies.name, version)
        path = self._folder / name
        if path.is_symlink() or read_version(self._folder, self._policies.name, version) is None:
            raise AdapterError(f"{path}: there is no usable version here")
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._engine.load_adapter(name, str(path))
        except TimeoutError:
            raise EngineError(
                f"the engine did not load {name} in {LOAD_SECONDS:.0f} s", 504, "engine_timeout"
            ) from None
        except EngineError as error:
            if error.status >= 500:
                raise
            if "already" not in str(error):  # loaded by a try whose answer was lost
                raise AdapterError(f"{path}: {error}") from None
        try:
            await probe.adapter_answers(self._engine, name)
        except AdapterError:
            await self._forget(name)
            raise

    async def _forget(self, name: str) -> None:
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await self._engine.unload_adapter(name)
        except (EngineError, TimeoutError) as error:
            log.warning("%s was not unloaded: %s", name, error)
