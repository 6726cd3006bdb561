"""``art-backends versions``: list, compare, pin, roll back, prune and export the adapter versions of a run folder.

No server may run on the folder (its lock is taken for as long as the command runs). Merging needs torch and runs in a
process of its own. It refuses to overwrite: an export goes to a new folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from art_backends.cli_folder import add_folder, check
from art_backends.display import plain_console
from art_backends.errors import FolderInUseError, ServerError, revive
from art_backends.server import catalog
from art_backends.server.folder import POLICY, RunFolder

MERGE_SECONDS = 3600.0


def add_parser(commands: Any) -> None:
    """Add the subcommands to those of ``art-backends``."""
    versions = commands.add_parser("versions", help="the adapter versions of a run folder")
    actions = versions.add_subparsers(required=True, metavar="ACTION")

    listing = actions.add_parser("list", help="all versions with their figures; marks the newest and the best")
    listing.set_defaults(run=_list)

    comparing = actions.add_parser("compare", help="settings and figures that differ between two versions")
    comparing.add_argument("one", type=int, metavar="N")
    comparing.add_argument("other", type=int, metavar="M")
    comparing.set_defaults(run=_compare)

    pinning = actions.add_parser("pin", help="let version N answer apps from the next start on, whatever is newer")
    pinning.add_argument("version", type=int, metavar="N", help="0: what the run began from")
    pinning.set_defaults(run=_pin)

    unpinning = actions.add_parser("unpin", help="let the newest version answer again")
    unpinning.set_defaults(run=_unpin)

    rolling = actions.add_parser("rollback", help="make version N the newest; later ones are set aside")
    rolling.add_argument("version", type=int, metavar="N", help="0: what the run began from")
    rolling.set_defaults(run=_roll_back)

    pruning = actions.add_parser("prune", help="remove versions; the best, the pinned, the newest and version 0 stay")
    pruning.add_argument("--keep", type=int, default=3, help="how many of the newest stay (default: 3)")
    pruning.set_defaults(run=_prune)

    exporting = actions.add_parser("export", help="a folder with a model card for PEFT, vLLM, transformers, llama.cpp")
    exporting.add_argument("version", type=int, metavar="N")
    exporting.add_argument("out", type=Path, metavar="FOLDER")
    form = exporting.add_mutually_exclusive_group()
    form.add_argument("--merged", action="store_true", help="base model and adapter in one (safetensors)")
    form.add_argument("--gguf", action="store_true", help="base model and adapter in one file for llama.cpp (GGUF)")
    exporting.set_defaults(run=_export)

    for action in (listing, comparing):
        add_folder(action, as_json=True)
    for action in (pinning, unpinning, rolling, pruning, exporting):
        add_folder(action)


@contextmanager
def _catalog(folder: Path) -> Iterator[catalog.Catalog]:
    """The catalog of a folder that nobody else uses; ConfigError before anything is made if it is no run folder."""
    check(folder)
    try:
        held = RunFolder.acquire(folder, "versions")
    except FolderInUseError as error:
        raise FolderInUseError(
            f"{error}; art-backends status --folder {folder} shows which versions a running server has loaded"
        ) from None
    try:
        yield catalog.read(held.path)
    finally:
        held.release()


async def _list(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        best, newest, pinned = found.best, found.newest, found.pinned
        if options.json:
            rows = [
                {
                    "version": f"{found.policy}@{entry.version}",
                    "step": entry.step,
                    "reward": entry.reward,
                    "held_out_reward": entry.held_out_reward,
                    "held_out_success": entry.held_out_success,
                    "bytes": entry.bytes,
                    "newest": entry is newest,
                    "best": entry is best,
                    "pinned": entry.version == pinned,
                    "damaged": entry.problem,
                }
                for entry in found.entries
            ]
            plain_console().print_json(data=rows)
            return 0
        table = Table("version", "step", "reward", "held-out reward", "success", "MB", "", title=found.policy)
        if found.base is not None:
            figures = catalog.figure(found.base.reward), catalog.figure(found.base.success)
            table.add_row("base", "", "", *figures, "", "better than every version" if found.beaten else "")
        for entry in found.entries:
            sampled = "best" if entry.held_out_reward is not None else "best, by sampled rewards"
            marked = ("newest", entry is newest), (sampled, entry is best), ("pinned", entry.version == pinned)
            marks = [name for name, holds in marked if holds]
            marks += [] if entry.problem is None else ["damaged"]
            table.add_row(
                f"@{entry.version}",
                str(entry.step),
                catalog.figure(entry.reward),
                catalog.figure(entry.held_out_reward),
                catalog.figure(entry.held_out_success),
                f"{entry.bytes / 1e6:.1f}",
                ", ".join(marks),
            )
        plain_console().print(table)
        if not found.entries:
            plain_console().print(f"no version was made yet: {found.policy}@0, the base model, answers", soft_wrap=True)
    return 0


async def _compare(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        one, other = found.entry(options.one), found.entry(options.other)
        rows = catalog.compare(one, other)
        if options.json:
            plain_console().print_json(data={name: [left, right] for name, left, right in rows})
            return 0
        table = Table("", f"{found.policy}@{one.version}", f"{found.policy}@{other.version}")
        for name, left, right in rows:
            table.add_row(name, *catalog.figures(left, right))
        plain_console().print(table)
    return 0


async def _pin(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        catalog.pin(found, options.version)
        plain_console().print(f"{found.policy}@{options.version} answers from the next start of the server on")
    return 0


async def _unpin(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        catalog.pin(found, None)
        plain_console().print(f"the newest version of {found.policy} answers from the next start of the server on")
    return 0


async def _roll_back(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        aside = catalog.roll_back(found, options.version)
        console = plain_console()
        for path in aside:
            console.print(f"set aside: {path}", soft_wrap=True)
        console.print(f"{found.policy}@{options.version} is the newest version")
    return 0


async def _prune(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        removed = catalog.prune(found, options.keep)
        freed = sum(entry.bytes for entry in removed) / 1e6
        names = f" ({', '.join(f'@{entry.version}' for entry in removed)})" if removed else ""
        said = f"removed {len(removed)} of {len(found.entries)} versions{names}, {freed:.1f} MB"
        plain_console().print(said, soft_wrap=True)
    return 0


async def _export(options: argparse.Namespace) -> int:
    with _catalog(options.folder) as found:
        if options.merged or options.gguf:
            await _merge(found, options.version, options.out, gguf=options.gguf)
        else:
            await asyncio.to_thread(catalog.export_adapter, found, options.version, options.out)
        plain_console().print(f"{found.policy}@{options.version} → {options.out}", soft_wrap=True)
    return 0


@contextmanager
def _new_folder(out: Path) -> Iterator[None]:
    """A folder for an export; if it was made here and nothing came into it, it goes again."""
    made = not out.exists()
    catalog.empty(out)
    try:
        yield
    finally:
        if made and not any(out.iterdir()):
            out.rmdir()


async def _merge(found: catalog.Catalog, version: int, out: Path, *, gguf: bool) -> None:
    entry = found.sound(version)
    command = [sys.executable, "-m", "art_backends.worker.merge", "--base-model", found.base_model]
    command += ["--digest", found.digest, "--adapter", str(entry.path), "--out", str(out)]
    if gguf:
        command += ["--gguf", catalog.gguf_name(found, entry)]
    template = json.loads((found.folder / POLICY).read_bytes()).get("chat_template")
    if template is not None:
        command += ["--chat-template", str(template)]
    with _new_folder(out):
        await _run(command)
        (out / "README.md").write_text(catalog.card(found, entry, "gguf" if gguf else "merged"))


async def _run(command: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(MERGE_SECONDS):
            said, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise ServerError(f"merging did not end within {MERGE_SECONDS:.0f} s") from None
    try:
        problem = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        problem = {"type": "ServerError", "message": f"merging ended with exit code {process.returncode}"}
    if process.returncode or problem:
        raise revive(str(problem.get("type")), str(problem.get("message")))
