"""The server as a child of this process: ``LocalServer`` on one run folder, ``LocalBackend`` on several.

    async with LocalServer(config) as server:
        status = await server.client.status()

A server (proxy, store, policy) is a process of its own with the worker (engine and trainer) as its child; both end
with this process, killed or not. It refuses to import the server or torch: it starts a process and speaks HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from art_backends.child import ready
from art_backends.client import Client
from art_backends.config import TrainConfig, make_config
from art_backends.errors import ServerError

START_DEADLINE = 1800.0  # seconds; the first start may download a base model
STOP_DEADLINE = 30.0  # seconds


class LocalServer:
    """The server on a run folder, started here. ``url`` is its address, ``client`` speaks to its control API."""

    def __init__(self, config: TrainConfig, *, python: str = sys.executable) -> None:
        self.config = config
        self.folder = config.folder.expanduser().absolute()
        self.url = ""
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._client: Client | None = None

    @property
    def client(self) -> Client:
        if self._client is None:
            raise ServerError("the backend is not started: use it as `async with LocalServer(...) as backend`")
        return self._client

    async def __aenter__(self) -> LocalServer:
        logs = self.folder / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"run folder {self.folder} cannot be made: {error.strerror}") from None
        # the settings travel in a private file: a command line can be read by everyone on the machine
        try:
            with tempfile.NamedTemporaryFile("w", suffix=".json", dir=logs, delete=False) as settings:
                settings.write(self.config.model_dump_json())
        except OSError as error:
            raise ServerError(f"run folder {self.folder} cannot be written: {error.strerror}") from None
        try:
            await self._start(Path(settings.name), logs / "server.log")
        except BaseException:
            await self._stop()
            raise
        finally:
            await asyncio.to_thread(Path(settings.name).unlink, missing_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _start(self, settings: Path, log_file: Path) -> None:
        command = [self._python, "-m", "art_backends.cli", "serve", "--settings", str(settings)]
        command += ["--port", "0", "--exit-with-parent", "--announce"]
        try:
            with log_file.open("ab") as stream:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stream,
                    start_new_session=True,  # Ctrl-C is the loop's to handle; the server ends when told to
                )
        except OSError as error:
            raise ServerError(f"the server could not be started: {error}") from None
        assert self._process.stdout is not None
        self.url = (await ready(self._process.stdout, "server", START_DEADLINE, log_file))["url"]
        token = (self.folder / "admin.token").read_text().strip()
        self._client = Client(self.url, token)

    async def _stop(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_DEADLINE):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


class LocalBackend:
    """Servers for models under one folder: ``path/PROJECT/NAME`` is the run folder of each.

    ``async with LocalBackend(path="./.art") as backend``, or ``await backend.close()`` in the end; a process that ends
    without either takes its servers along.
    """

    def __init__(
        self,
        *,
        path: Path | str = ".art",
        python: str = sys.executable,
        engine: Literal["embedded", "vllm"] | None = None,
        engine_url: str | Sequence[str] | None = None,
        vllm: str | None = None,
        vllm_args: str | None = None,
        vllm_sleep: bool | None = None,
    ) -> None:
        """``engine`` and those after it are the settings of these names, for all models of this backend; what is left
        out is each model's own."""
        self.path = Path(path)
        urls = [engine_url] if isinstance(engine_url, str) else engine_url
        given: dict[str, Any] = {"engine": engine, "engine_url": urls, "vllm": vllm, "vllm_args": vllm_args}
        given["vllm_sleep"] = vllm_sleep
        self._engine = {name: value for name, value in given.items() if value is not None}
        make_config(self._engine, source="LocalBackend")  # wrong values are said here
        self._python = python
        self._servers: dict[Path, LocalServer] = {}
        self._closing: list[Callable[[], Awaitable[None]]] = []

    def before_close(self, what: Callable[[], Awaitable[None]]) -> None:
        """Await this when the backend is closed, before the servers stop."""
        self._closing.append(what)

    async def start(self, config: TrainConfig) -> LocalServer:
        """The server on ``config.folder``, started now unless it runs."""
        if self._engine:
            values = {**config.model_dump(), **self._engine}
            if "engine_url" in self._engine and "engine" not in self._engine:
                del values["engine"]  # the addresses say which one it is
            config = make_config(values, source="LocalBackend")
        folder = config.folder.expanduser().absolute()
        if folder not in self._servers:
            self._servers[folder] = await LocalServer(config, python=self._python).__aenter__()
        return self._servers[folder]

    async def close(self) -> None:
        """Stop all servers."""
        while self._closing:
            await self._closing.pop()()
        while self._servers:
            _, server = self._servers.popitem()
            await server.__aexit__(None, None, None)

    async def __aenter__(self) -> LocalBackend:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
