"""Starts a child process, waits until it is ready, restarts it when it dies or hangs, ends it with the server.

The child gets a Unix socket to listen on, writes one JSON line to its standard output (``{"ready": true, …}`` or
``{"ready": false, "type": …, "message": …}``) and ends when its standard input does, so that no child outlives a
server that was killed. Its standard error goes to a log file, whose tail stands in every error about it. A child that
has not been healthy for ``HUNG_SECONDS`` is asked for its stacks (they are in the log then) and killed.

It refuses to restart for ever: ``MAX_DEATHS`` deaths within ``DEATH_WINDOW`` seconds are a failure, said as such.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from art_backends.child import log_tail, ready
from art_backends.errors import ArtError, ServerError

log = logging.getLogger(__name__)

MAX_DEATHS = 5
DEATH_WINDOW = 300.0  # seconds
FIRST_PAUSE = 0.2  # seconds before the first restart; twice as long before each further one
LONGEST_PAUSE = 10.0
LOOK_SECONDS = 10.0  # between two looks at a child's health, and until a look is given up
HUNG_SECONDS = 180.0  # without being healthy until a child is taken to hang
STACKS_GRACE = 3.0  # seconds that it has to write its stacks
READY_BYTES = 1024 * 1024  # of the ready line, which may hold a chat template
STOP_GRACE = 15.0  # seconds between SIGTERM and SIGKILL

# glibc gives large blocks back to the kernel at once and faults them in again: keeping them made training on a CPU
# 1.4 to 1.7 times faster (measured with a 135M model).
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "268435456",
    "THP_MEM_ALLOC_ENABLE": "1",
}


class Supervisor:
    """One supervised child. ``ready`` is what its ready line said."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_file: Path,
        name: str = "worker",
        on_restart: Callable[[], Awaitable[None]] | None = None,
        healthy: Callable[[], Awaitable[bool]] | None = None,
        start_deadline: float = 900.0,
    ) -> None:
        """``command`` without the socket: ``--uds PATH`` is added. ``on_restart`` runs when a new child is ready.
        ``healthy`` asks the child; not answering, raising OSError or ArtError is the same as False."""
        self.name = name
        self.ready: dict[str, Any] = {}
        self.restarts = 0
        self.on_restart = on_restart
        self.healthy = healthy
        # Unix socket paths hold about 100 bytes: a run folder may be deeper than that
        self._folder = tempfile.TemporaryDirectory(prefix="art-")
        self.socket = Path(self._folder.name) / f"{name}.sock"
        self._command = [*command, "--uds", str(self.socket)]
        self._log_file = log_file
        self._start_deadline = start_deadline
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._looker: asyncio.Task[None] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._failure: ArtError | None = None
        self._deaths: deque[float] = deque()
        self._stopping = False

    async def start(self) -> None:
        """Start the child and wait until it is ready; raises the error that the child reported, or ServerError."""
        try:
            await self._spawn()
        except BaseException:
            await self._end_child()
            raise
        self._up.set()
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        self._looker = asyncio.get_running_loop().create_task(self._look())

    async def wait_ready(self, deadline: float) -> None:
        """Wait until the child is up; ServerError if it is not within ``deadline`` seconds or was given up."""
        try:
            async with asyncio.timeout(deadline):
                await self._up.wait()
        except TimeoutError:
            raise ServerError(f"the {self.name} was not ready within {deadline:.0f} s; {self._tail()}") from None
        if self._failure is not None:
            raise self._failure

    def state(self) -> dict[str, Any]:
        """For the status page: name, pid, state (up, starting, failed, stopped), restarts."""
        state = "up" if self._up.is_set() else "starting"
        if self._failure is not None:
            state = "failed"
        elif self._stopping:
            state = "stopped"
        return {
            "name": self.name,
            "pid": self._process.pid if self._process else None,
            "state": state,
            "restarts": self.restarts,
        }

    async def replace(self) -> None:
        """Kill the child; from here on a new one is waited for, which the watch starts."""
        if self._failure is not None:
            return
        self._up.clear()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def stop(self) -> None:
        """End the child: standard input closed and SIGTERM, SIGKILL after a grace."""
        self._stopping = True
        tasks = [task for task in (self._watcher, self._looker) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._end_child()
        self._folder.cleanup()

    async def _spawn(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._log_file.open("ab") as stream:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stream,
                    limit=READY_BYTES,
                    env={**ALLOCATOR, **os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,  # a Ctrl-C in the terminal is the server's to handle
                )
        except OSError as error:
            raise ServerError(f"the {self.name} could not be started: {error}") from None
        output = self._process.stdout
        assert output is not None
        self.ready = await ready(output, self.name, self._start_deadline, self._log_file)
        self._reader = asyncio.get_running_loop().create_task(_drain(output))

    async def _watch(self) -> None:
        while True:
            assert self._process is not None
            code = await self._process.wait()
            self._up.clear()
            now = time.monotonic()
            self._deaths.append(now)
            while now - self._deaths[0] > DEATH_WINDOW:
                self._deaths.popleft()
            log.error("the %s ended with code %s; %s", self.name, code, self._tail())
            if len(self._deaths) >= MAX_DEATHS:
                self._give_up(
                    ServerError(f"the {self.name} died {MAX_DEATHS} times within {DEATH_WINDOW:.0f} s; {self._tail()}")
                )
                return
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** (len(self._deaths) - 1), LONGEST_PAUSE))
            try:
                await self._spawn()
                self.restarts += 1
                if self.on_restart is not None:
                    await self.on_restart()
            except ArtError as error:
                await self._end_child()
                if not isinstance(error, ServerError):  # it said why it cannot start: another try says the same
                    self._give_up(error)
                    return
                log.error("restart of the %s failed: %s", self.name, error)
                continue
            except Exception:  # boundary: whatever on_restart met, the child is supervised on
                await self._end_child()
                log.exception("restart of the %s failed", self.name)
                continue
            self._up.set()

    async def _look(self) -> None:
        """Kill a child that hangs; ``_watch`` then finds it dead."""
        well = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if self.healthy is None or not self._up.is_set() or await self._well():
                well = time.monotonic()
                continue
            silent = time.monotonic() - well
            if silent >= HUNG_SECONDS:
                log.error(
                    "the %s has not been healthy for %.0f s: killed; its stacks are in its log", self.name, silent
                )
                await self._kill_hung()
                well = time.monotonic()

    async def _well(self) -> bool:
        assert self.healthy is not None
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                return await self.healthy()
        except (TimeoutError, OSError, ArtError):
            return False

    async def _kill_hung(self) -> None:
        process = self._process
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STACKS_GRACE):
                    await process.wait()
            process.kill()

    def _give_up(self, error: ArtError) -> None:
        self._failure = error
        self._up.set()  # those who wait learn of it now

    async def _end_child(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_GRACE):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def _tail(self) -> str:
        return log_tail(self._log_file)


async def _drain(output: asyncio.StreamReader) -> None:
    """Read what a child says after its ready line: a pipe that nobody reads stops the child once it is full."""
    while await output.read(65536):
        pass
