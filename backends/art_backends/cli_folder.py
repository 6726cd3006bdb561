"""The ``--folder`` of all commands that look at a run: the option, what is wrong with the folder, and its server.

A folder that is not there is told with those that are; one whose server is still starting, or that another command
works on, with the process that holds it. It refuses to make or change anything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from art_backends.client import Client
from art_backends.config import TrainConfig
from art_backends.errors import ConfigError, ServerError
from art_backends.server.folder import POLICY, SERVER
from art_backends.server.holder import Holder, held_by

RUNS = Path(".art")  # below which runs are kept unless another folder is given
NAMED = 5  # run folders that a message names


def add_folder(parser: argparse.ArgumentParser, *, as_json: bool = False) -> None:
    """Add ``--folder``, and ``--json`` if the command can print it."""
    default = TrainConfig.model_fields["folder"].get_default()
    parser.add_argument("--folder", type=_path, default=default, help=f"run folder (default: {default})")
    if as_json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def check(folder: Path) -> Holder | None:
    """Who holds the run folder, if anybody; ConfigError if it is none, naming those there are."""
    held = held_by(folder)
    if held is not None or (folder / POLICY).exists():
        return held
    if (folder / "logs").is_dir():
        raise ConfigError(
            f"{folder} is no run folder yet: it has no {POLICY}; if a run was started on it just now, try again in a "
            f"moment, else {folder}/logs says why it ended"
        )
    if folder.is_dir():
        raise ConfigError(f"{folder} is no run folder: it has no {POLICY}{_others()}")
    raise ConfigError(f"there is no run folder {folder}{_others()}")


def running(folder: Path) -> Holder:
    """The process whose server answers for the folder; ServerError says why there is none, and what to do."""
    held = check(folder)
    if held is None:
        raise ServerError(f"no server runs on {folder}{_gone(folder)}; start one with: {_start(folder)}")
    if held.starting:
        raise ServerError(
            f"a server is starting on {folder} ({_process(held)} holds it, the model is being loaded): try again in a "
            f"moment; {folder}/logs has what it does meanwhile"
        )
    if not held.url:
        raise ServerError(
            f"no server runs on {folder}, and {_process(held)} (art-backends {held.work}) works on it: when that has "
            f"ended, start one with: {_start(folder)}"
        )
    return held


@asynccontextmanager
async def connected(folder: Path) -> AsyncIterator[Client]:
    """A client of the server that runs on the folder; the errors are those of ``running``."""
    url = running(folder).url
    try:
        token = (folder / "admin.token").read_text().strip()
    except OSError as error:
        raise ServerError(f"{folder}/admin.token cannot be read: {error.strerror}") from None
    async with Client(url, token) as client:
        yield client


def _path(text: str) -> Path:
    return Path(text).expanduser()  # a shell leaves the tilde of --folder=~/run as it is


def _process(held: Holder) -> str:
    return f"process {'unknown' if held.pid is None else held.pid}"


def _start(folder: Path) -> str:
    return f"art-backends serve --folder {folder}"


def _gone(folder: Path) -> str:
    """Of a server that was killed, its ``server.json`` is left."""
    try:
        last: Any = json.loads((folder / SERVER).read_text())
        return f": the last one, process {last['pid']} at {last['url']}, is gone"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _others() -> str:
    """The run folders below ``.art``, the latest first, as the end of a message."""
    found = [file for pattern in ("*", "*/*") for file in RUNS.glob(f"{pattern}/{POLICY}")]
    if not found:
        return f", and there is none below {RUNS}/: a training makes its folder when it starts"
    latest = sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)
    names = ", ".join(str(file.parent) for file in latest[:NAMED])
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"; there are: {names}{more} (choose with --folder)"
