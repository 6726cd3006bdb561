"""``art-backends forget``: delete all that was kept about somebody, with or without a running server.

It refuses to ask back: naming the subject is the decision. What cannot be deleted, the adapter versions that learned
from it, is named.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from art_backends.cli_folder import add_folder, check, connected
from art_backends.client import Forgotten
from art_backends.display import plain_console
from art_backends.errors import ConfigError
from art_backends.server.folder import RunFolder
from art_backends.server.retention import FORGOTTEN, REPORT, drop_examples
from art_backends.store import Store


def add_parser(commands: Any) -> None:
    """Add the subcommand to those of ``art-backends``."""
    forgetting = commands.add_parser("forget", help="delete all that was kept about a subject")
    forgetting.add_argument(
        "--subject", required=True, metavar="TEXT", help="as scenarios and calls name it: a user's id, for example"
    )
    add_folder(forgetting, as_json=True)
    forgetting.set_defaults(run=_forget)


async def _forget(options: argparse.Namespace) -> int:
    if not options.subject:
        raise ConfigError("--subject is empty")
    held = check(options.folder)
    if held is not None and held.url:
        async with connected(options.folder) as client:
            forgotten = await client.forget(options.subject)
    else:
        forgotten = await asyncio.to_thread(_offline, options.folder, options.subject)
    console = plain_console()
    if options.json:
        console.print_json(data=forgotten.model_dump(mode="json"))
        return 0
    counts = f"{forgotten.rollouts} rollouts with {forgotten.calls} calls, {forgotten.examples} examples of the report"
    console.print(f"deleted: {counts}", soft_wrap=True)
    if forgotten.versions:
        console.print(
            f"learned from them, and stay: {', '.join(forgotten.versions)} (art-backends versions rollback to one "
            "before them, and prune; or train anew)",
            soft_wrap=True,
        )
    return 0


def _offline(folder: Path, subject: str) -> Forgotten:
    """The same in a folder that nobody uses; FolderInUseError if somebody does."""
    held = RunFolder.acquire(folder, "forget")
    try:
        store = Store.open(held.store)
        try:
            store.close_open_rollouts(fault=FORGOTTEN, opened_before=float("inf"), subject=subject)
            gone = store.forget(subject=subject)
        finally:
            store.close()
        examples = drop_examples(held.path / REPORT, subject, gone)
    finally:
        held.release()
    return Forgotten(rollouts=len(gone.rollouts), calls=gone.calls, examples=examples, versions=list(gone.versions))
