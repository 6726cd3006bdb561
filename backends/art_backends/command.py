"""Any program as an agent: it is started once per rollout, and its model calls go to the proxy by its environment.

    run_agent = Command("node agent.mjs")

The program gets the scenario as JSON on standard input and, unless it is large, in ``ART_SCENARIO``. The SDKs of OpenAI
and Anthropic find the proxy and a key that belongs to this rollout alone in their usual variables. What it writes to
standard output is its output; a reward function scores that, or the program scores itself: the JSON object that it
writes to the file named by ``ART_REPORT`` is the report, with a number as ``"reward"``. An exit code other than 0 is
the agent's error, with the end of what it wrote to standard error.

A program that must end, because its time is over or the run stops, is killed with all that it started. It refuses to
use a shell: ``--command "sh -c '…'"`` asks for one.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from art_backends.capture.scope import Scope, current_scope
from art_backends.errors import ConfigError, RewardError, ServerError
from art_backends.rewards.values import Run

OUTPUT_BYTES = 4 * 1024 * 1024  # of each stream that are kept: the end of it
ERROR_CHARACTERS = 4000  # of standard error in an error's message
VARIABLE_BYTES = 100_000  # of a scenario in the environment: Linux takes no variable of 128 KiB
TERM_SECONDS = 2.0  # that a program has to end by itself when it is told to
PIPE_SECONDS = 2.0  # that its output is waited for when it has ended: a child that got away may hold it open

# What else SDKs and agents look for: with it they might not ask the proxy, or not with this rollout's key.
_REMOVED = frozenset(
    {
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_CUSTOM_HEADERS",
        "AZURE_OPENAI_AD_TOKEN",
        "CLAUDE_CODE_USE_BEDROCK",
        "CLAUDE_CODE_USE_VERTEX",
        "OPENAI_CUSTOM_HEADERS",
        "OPENAI_ORG_ID",
        "OPENAI_PROJECT_ID",
    }
)


class CommandError(Exception):
    """The program failed: its exit code or signal, and the end of its standard error."""


@dataclass(frozen=True)
class Command:
    """Runs a program as the agent of one rollout; call it inside the rollout's scope.

    ``command`` is a line in the shell's way of quoting, or its words. ``environment`` is added to this process's own.
    Raises ConfigError at once if there is no such program.
    """

    command: str | Sequence[str]
    folder: Path | None = None  # where it runs; None: here
    environment: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        words = self.words
        if not words:
            raise ConfigError("the command is empty")
        path = (self.environment or {}).get("PATH") or os.environ.get("PATH")
        name = str((self.folder or Path()) / words[0]) if os.sep in words[0] else words[0]
        if shutil.which(name, path=path) is None:
            raise ConfigError(f"there is no program {words[0]!r} here that can be run")

    @property
    def words(self) -> list[str]:
        """The program and its arguments."""
        if not isinstance(self.command, str):
            return list(self.command)
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"the command {self.command!r} cannot be taken apart: {error}") from None

    async def __call__(self, scenario: dict[str, Any]) -> dict[str, Any]:
        """``{"stdout", "stderr", "exit_code", "report"}`` of one run; CommandError if it failed.

        When cancelled, the program and all that it started are gone before this returns.
        """
        scope = current_scope()
        if scope is None:
            raise RuntimeError("a command runs in the scope of a rollout")
        with tempfile.TemporaryDirectory(prefix="art-") as place:
            report = Path(place) / "report.json"
            given = json.dumps(scenario)
            try:
                transport, program = await asyncio.get_running_loop().subprocess_exec(
                    _Program,
                    *self.words,
                    cwd=self.folder,
                    env=self._environment(scope, given, report),
                    start_new_session=True,  # a group of its own, to be killed as one
                )
            except OSError as error:  # too little memory, too many processes: not the agent's doing
                raise ServerError(f"the program {self.words[0]} could not be started: {error}") from error
            try:
                program.give(given)
                await asyncio.wait((program.exited,))
                _kill(transport.get_pid())  # what it left behind would call models for nobody
                await asyncio.wait((program.told,), timeout=PIPE_SECONDS)
            except asyncio.CancelledError:
                _kill(transport.get_pid(), signal.SIGTERM)  # a word first, so that it can tidy up, then no more of it
                try:
                    await asyncio.wait((program.exited,), timeout=TERM_SECONDS)
                finally:
                    _kill(transport.get_pid())
                raise
            finally:
                transport.close()
            code = transport.get_returncode() or 0
            stdout, stderr = (program.output[fd].decode(errors="replace") for fd in (1, 2))
            if code != 0:
                raise CommandError(_failure(code, stderr))
            return {"stdout": stdout, "stderr": stderr, "exit_code": code, "report": _read(report)}

    def _environment(self, scope: Scope, scenario: str, report: Path) -> dict[str, str]:
        root = scope.base_url.removesuffix("/v1")
        kept = {name: value for name, value in os.environ.items() if name not in _REMOVED}
        direct = ",".join(filter(None, (kept.get("NO_PROXY"), kept.get("no_proxy"), _host(root))))
        small = {"ART_SCENARIO": scenario} if len(scenario.encode()) < VARIABLE_BYTES else {}
        return {
            **kept,
            "NO_PROXY": direct,
            "no_proxy": direct,
            **(self.environment or {}),
            "OPENAI_BASE_URL": scope.base_url,
            "OPENAI_API_BASE": scope.base_url,
            "OPENAI_API_KEY": scope.token,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": scope.token,
            "AZURE_OPENAI_ENDPOINT": root,
            "AZURE_OPENAI_API_KEY": scope.token,
            "ART_BASE_URL": scope.base_url,
            "ART_API_KEY": scope.token,
            "ART_ROLLOUT_ID": scope.rollout_id,
            **small,
            "ART_REPORT": str(report),
        }


def reported(run: Run) -> dict[str, Any]:
    """The reward that the program itself reports; 0 for a program that failed."""
    if run.error is not None:
        return {"reward": 0.0}
    report = run.output["report"]
    if not isinstance(report, dict) or "reward" not in report:
        raise RewardError("the program wrote no JSON object with a reward to the file that ART_REPORT names")
    return {name: value for name, value in report.items() if isinstance(value, int | float)}


def _host(root: str) -> str:
    return root.partition("://")[2].partition("/")[0].rpartition(":")[0].strip("[]")


class _Program(asyncio.SubprocessProtocol):
    """The end of what a program writes, and when it has ended: asyncio's own ``wait`` waits for its children, too."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.output = {1: bytearray(), 2: bytearray()}
        self.exited: asyncio.Future[None] = loop.create_future()
        self.told: asyncio.Future[None] = loop.create_future()  # it has ended, and nobody holds its output
        self._stdin: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        stdin = transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        self._stdin = stdin

    def give(self, text: str) -> None:
        """Write to its standard input, and end that; a program need not read it."""
        assert self._stdin is not None
        self._stdin.write(text.encode() + b"\n")
        self._stdin.write_eof()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd] += data
        del self.output[fd][:-OUTPUT_BYTES]

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.set_result(None)


def _kill(group: int, number: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _failure(code: int, stderr: str) -> str:
    names = {number.value: number.name for number in signal.Signals}
    how = f"exit code {code}" if code > 0 else f"killed by {names.get(-code, f'signal {-code}')}"
    said = stderr[-ERROR_CHARACTERS:].strip()
    return f"{how}: {said}" if said else f"{how}, with nothing on standard error"


def _read(report: Path) -> Any:
    try:
        return json.loads(report.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"what it wrote to ART_REPORT is no JSON: {error}") from None
