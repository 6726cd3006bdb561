"""``python -m art_backends.engines.vllm.launcher [--set NAME=VALUE …] [--unset NAME …] -- COMMAND… --uds PATH``.

Starts vLLM, says in one line of JSON when it answers ``GET /health`` on its socket or why it does not, and keeps it:
when standard input ends, on SIGTERM, or when vLLM itself has died, all that vLLM started ends, too. vLLM's processes
are one group. Should this process be killed, a shell that waits for its end kills the group: no vLLM outlives us.

It refuses to restart anything: that is the supervisor's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_backends import stacks
from art_backends.child import when_input_ends
from art_backends.engines.vllm import environment, said
from art_backends.errors import ArtError, ServerError

LINES = 400  # of vLLM's output that are kept for an error
LINE_BYTES = 1024 * 1024
ASK_SECONDS = 0.25  # between two looks at its health
ANSWER_SECONDS = 5.0  # until a look is given up
TERM_SECONDS = 8.0  # between SIGTERM and SIGKILL: less than the supervisor gives us
FAILED = 3

# reads a byte when all has ended in order; the end of its input without one is our death
_GUARD = 'read -r word || kill -9 -"$1" 2> /dev/null'


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep vLLM until it, or standard input, ends; returns the exit code."""
    stacks.on_request()
    own, command, socket = _arguments(list(sys.argv[1:] if arguments is None else arguments))
    variables = {name: value for name, value in os.environ.items() if name not in own.unset}
    variables |= dict(item.partition("=")[::2] for item in own.set)
    try:
        return asyncio.run(_keep(command, Path(socket), variables))
    except ArtError as error:
        _announce({"ready": False, "type": type(error).__name__, "message": str(error)})
        return FAILED


def _arguments(words: list[str]) -> tuple[argparse.Namespace, list[str], str]:
    """Our own options, vLLM's whole command, and the socket that it ends with."""
    parser = argparse.ArgumentParser(prog="python -m art_backends.engines.vllm.launcher")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="variable of vLLM's")
    parser.add_argument("--unset", action="append", default=[], metavar="NAME", help="variable that vLLM does not get")
    at = words.index("--") if "--" in words else len(words)
    own, command = parser.parse_args(words[:at]), words[at + 1 :]
    if len(command) < 3 or command[-2] != "--uds":
        parser.error("-- and vLLM's command are missing, which ends with --uds PATH")
    return own, command, command[-1]


async def _keep(command: list[str], socket: Path, variables: dict[str, str]) -> int:
    began = time.monotonic()
    output, theirs = os.pipe()  # not asyncio's: its wait() would wait for whoever else holds the output
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env=variables,
            start_new_session=True,  # a group of its own, to be ended as one
        )
    except OSError as error:
        os.close(output)
        raise ServerError(f"vLLM could not be started: {command[0]}: {error.strerror or error}") from None
    finally:
        os.close(theirs)
    guard = await asyncio.create_subprocess_exec(
        "/bin/sh",
        "-c",
        _GUARD,
        "guard",
        str(process.pid),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    lines: deque[str] = deque(maxlen=LINES)
    reading = asyncio.create_task(_copy(output, lines), name="output")
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    when_input_ends(loop, told.set)
    loop.add_signal_handler(signal.SIGTERM, told.set)
    ended = asyncio.create_task(process.wait(), name="vLLM")
    stopping = asyncio.create_task(told.wait(), name="told to end")
    answering = asyncio.create_task(_answers(socket), name="health")
    try:
        await asyncio.wait((ended, stopping, answering), return_when=asyncio.FIRST_COMPLETED)
        if answering.done() and not ended.done():
            seconds = round(time.monotonic() - began, 1)
            _announce({"ready": True, "engine_pid": process.pid, "start_seconds": seconds})
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
        elif ended.done() and not told.is_set():
            await asyncio.wait((reading,), timeout=1.0)  # a process that got away may hold the output open
            raise said.explain(ended.result(), list(lines), install=environment.INSTALL)
        return ended.result() if ended.done() else 0
    finally:
        for task in (answering, stopping):
            task.cancel()
        await _end(process, ended)
        reading.cancel()
        await asyncio.gather(answering, stopping, reading, return_exceptions=True)
        assert guard.stdin is not None
        with contextlib.suppress(ConnectionError):
            guard.stdin.write(b"ended\n")
            await guard.stdin.drain()
        guard.stdin.close()
        await guard.wait()


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
    """A word first, so that it can tidy up; then nothing of the group is left."""
    if not ended.done():
        _signal(process.pid, signal.SIGTERM)
        await asyncio.wait((ended,), timeout=TERM_SECONDS)
    _signal(process.pid, signal.SIGKILL)
    await asyncio.wait((ended,))


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


async def _copy(output: int, lines: deque[str]) -> None:
    """vLLM's output into our log, and its end into ``lines``."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", 0)
    )
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # longer than a line may be
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip("\n")
            lines.append(text)
            sys.stderr.write(text + "\n")
            sys.stderr.flush()
    finally:
        transport.close()


async def _answers(socket: Path) -> None:
    """Wait until the server says on its socket that it is well."""
    while True:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(str(socket))
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nhost: engine\r\nconnection: close\r\n\r\n")
                    await writer.drain()
                    status = (await reader.readuntil(b"\r\n")).split()
                finally:
                    writer.close()
            if status[1:2] == [b"200"]:
                return
        await asyncio.sleep(ASK_SECONDS)


def _announce(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
