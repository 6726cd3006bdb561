"""Loads adapter versions on the engine, tries them, and unloads those that nobody needs.

Each version has its own immutable name, never loaded in place. A version becomes the newest only after it answered a
probe at every server of the engine: all or nothing. A server that cannot be reached meanwhile is taken out, and is
given what it missed before it comes back.

A server may live longer than a run, and vLLM's prefix cache finds what an adapter of some name and path has computed
even after that was unloaded. So the path is spelled by what the files hold: other weights under a name that was there
before, of a folder that was begun anew, are never answered from the old ones' cache.

It refuses to decide what to train or to keep on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from art_backends.errors import AdapterError, ArtError, EngineError
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import EngineClient
from art_backends.server import probe
from art_backends.server.policy import PolicyTable
from art_backends.training.versions import read_version
from art_backends.trajectories import version_name, version_number

log = logging.getLogger(__name__)

LOAD_SECONDS = 120.0
WEIGHTS = "adapter_model.safetensors"
NOT_TAKEN = "adapter_not_taken"  # code of the refusals that are a server's matter: the files may be in order


class Adapters:
    """The engine's side of a ``PolicyTable``. One load or unload at a time."""

    def __init__(self, engine: Engine, policies: PolicyTable, folder: Path) -> None:
        """``folder`` holds the versions ``NAME@N``."""
        self._engine = engine
        self._policies = policies
        self._folder = folder
        self._lock = asyncio.Lock()
        self._given: set[tuple[EngineClient, str]] = set()  # names that were loaded, or may have been, by us

    async def load(self, version: int) -> None:
        """Load and try a version unless it is loaded: at every server, or at none.

        AdapterError if it is unusable; EngineError if the engine is away, or a server does not take it (NOT_TAKEN).
        """
        async with self._lock:
            if version in self._policies.loaded:
                return
            await self._load(version, self._engine.servers())
            self._policies.loaded.add(version)

    async def reload(self, server: EngineClient | None = None) -> None:
        """After the engine was replaced: load again what was loaded. A version that fails is given up, and logged.

        With ``server``: what that one must have before it comes back, all of it, and nothing else of this policy.
        Raises the error of the newest version and the alias's: the policy would silently answer with other weights.
        """
        async with self._lock:
            versions = sorted(self._policies.loaded - self._policies.bare)
            if server is not None:
                for version in versions:
                    await self._load(version, {server.address: server})
                await self._tidy(server)
                return
            for version in versions:
                if version in self._policies.idle():
                    self._policies.loaded.discard(version)
                    continue
                try:
                    await self._load(version, self._engine.servers())
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
                servers = self._engine.servers()
                gone = [await self._forget(server, name) for server in servers.values()]
                if any(gone) or not servers:  # what one lacks no call may ask for; another is tidied when it returns
                    done.append(version)
                else:
                    self._policies.loaded.add(version)
        return done

    def set_aside(self, version: int, reason: str) -> None:
        """Move an unusable version out of the way, so that the step that made it can be made again."""
        path = self._folder / version_name(self._policies.name, version)
        if path.exists():
            aside = path.with_name(f"broken-{path.name}-{uuid.uuid4().hex[:8]}")
            path.rename(aside)
            log.error("%s was set aside as %s", path.name, aside)
            self._policies.set_aside.append(f"{path.name} could not be served ({reason}) and is now {aside}")

    async def _load(self, version: int, servers: Mapping[str, EngineClient]) -> None:
        """See ``load``: at all of these that can be reached, or at none."""
        name = version_name(self._policies.name, version)
        path = self._folder / name
        if path.is_symlink() or read_version(self._folder, self._policies.name, version) is None:
            raise AdapterError(f"{path}: there is no usable version here")
        try:
            spelled = await asyncio.to_thread(_spelled, path)
        except OSError as problem:
            raise AdapterError(f"{path}: cannot be read: {problem.strerror}") from None
        verdicts = await asyncio.gather(*(self._give(server, name, path, spelled) for server in servers.values()))
        told = dict(zip(servers, verdicts, strict=True))
        refused = {server: error for server, error in told.items() if error is not None and not _is_away(error)}
        taken = [server for server, error in told.items() if error is None]
        for server, error in told.items():
            if error is not None and _is_away(error):
                self._engine.take_out(servers[server], f"{name} could not be loaded: {error}")
        if refused:
            for server in taken:
                await self._forget(servers[server], name, used=False)
            raise _refusal(name, refused, alone=not taken)
        if not taken:
            away = [error for error in verdicts if error is not None]
            raise away[0] if away else EngineError("no engine server takes calls", 503, "engine_unreachable")

    async def _give(self, server: EngineClient, name: str, path: Path, spelled: str) -> ArtError | None:
        """Load and try an adapter at one server; what is wrong, or None. Nothing of it stays there if it is refused."""
        try:
            await self._place(server, name, path, spelled)
            await probe.adapter_answers(server, name)
        except (AdapterError, EngineError) as error:
            if not _is_away(error):
                await self._forget(server, name, used=False)
            return error
        return None

    async def _place(self, server: EngineClient, name: str, path: Path, spelled: str) -> None:
        ours = (server, name) in self._given
        self._given.add((server, name))
        while True:
            try:
                async with asyncio.timeout(LOAD_SECONDS):
                    await server.load_adapter(name, spelled)
            except TimeoutError:
                said = f"the engine did not load {name} in {LOAD_SECONDS:.0f} s"
                raise EngineError(said, 504, "engine_timeout") from None
            except EngineError as error:
                if "already" not in str(error):
                    raise await self._explained(server, path, error) from None
                if not ours:  # an earlier run's, of other weights perhaps
                    log.warning("%s serves a %s that is not this run's: it is unloaded", server.address, name)
                    await self._forget(server, name)
                    ours = True
                    continue
                # loaded by a try whose answer was lost
            return

    async def _explained(self, server: EngineClient, path: Path, error: EngineError) -> ArtError:
        """What a server's refusal to load means."""
        said = str(error)
        if error.status in probe.AWAY or (error.status >= 500 and await probe.away(server)):
            return error
        if "enable-lora" in said or "not enabled" in said or "Not Found" in said:
            hint = "start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        elif error.status == 404 and (path / WEIGHTS).exists():
            hint = f"it must see {path.parent} under this very path: on another machine that takes a shared folder"
        elif "max_lora_rank" in said:
            hint = "start it with a --max-lora-rank of at least the adapter's"
        else:
            return AdapterError(f"{path}: {said}")
        return EngineError(f"{said}; {hint}", 400, NOT_TAKEN)

    async def _forget(self, server: EngineClient, name: str, *, used: bool = True) -> bool:
        """Unload a name; whether it is gone."""
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                await server.unload_adapter(name, used=used)
        except (EngineError, TimeoutError) as error:
            if not isinstance(error, EngineError) or error.status != 404:
                log.warning("%s stays loaded at %s: %s", name, server.address, error or "no answer")
                return False
        return True

    async def _tidy(self, server: EngineClient) -> None:
        """Unload this policy's versions that were unloaded elsewhere while the server was out."""
        async with asyncio.timeout(LOAD_SECONDS):
            models = await server.models()
        for model in models:
            name = str(model.get("id"))
            number = version_number(self._policies.name, name)
            if number is not None and model.get("parent") and number not in self._policies.loaded:
                await self._forget(server, name)


def _spelled(path: Path) -> str:
    """The path, then 32 bits of a digest of what lies there as ``/.`` or ``/``, which lead nowhere else. OSError."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("adapter_*")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    bits = int.from_bytes(digest.digest()[:4], "big")
    return str(path) + "".join("/." if bits >> place & 1 else "/" for place in range(32))


def _is_away(error: ArtError) -> bool:
    """Whether it says nothing about the adapter."""
    return isinstance(error, EngineError) and error.code != NOT_TAKEN


def _refusal(name: str, refused: Mapping[str, ArtError], *, alone: bool) -> ArtError:
    """The error of a version that was refused; an AdapterError only if no server took the files (``alone``)."""
    if len(refused) == 1 and alone:
        return next(iter(refused.values()))
    said = f"{name} is served nowhere: " + "; ".join(
        f"{server} refused it ({error})" for server, error in refused.items()
    )
    if alone and any(isinstance(error, AdapterError) for error in refused.values()):
        return AdapterError(said)
    return EngineError(said, 502, NOT_TAKEN)
