"""``art-backends train``: train the model behind any program, which is started once per rollout.

    art-backends train --command "node agent.mjs" --scenarios tasks.jsonl --reward my_rewards:score

It refuses to know the program's language: see ``command`` for what the program is given and what is taken from it.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from art_backends.backend import LocalServer
from art_backends.command import Command, reported
from art_backends.config import TrainConfig, add_arguments, from_arguments
from art_backends.display import make_display, plain_console
from art_backends.functions import find_from_here, load_function
from art_backends.loop import run
from art_backends.report import summary
from art_backends.scenarios import file_or_share, prepared

SETTINGS = frozenset(TrainConfig.model_fields) - {"nodes"}  # a program's calls carry no node


def add_parser(commands: Any) -> None:
    """Add the command."""
    training = commands.add_parser("train", help="train the model behind any program")
    training.add_argument("--command", required=True, metavar="LINE", help='the program, for example "node agent.mjs"')
    training.add_argument("--scenarios", type=Path, required=True, metavar="FILE", help="JSON Lines: a scenario a line")
    training.add_argument(
        "--reward",
        metavar="MODULE:ATTR",
        help="function that scores a run (without it: what the program writes to the file named by ART_REPORT)",
    )
    training.add_argument(
        "--held-out", metavar="FILE|SHARE", help="scenarios to measure success on: a file, or a share such as 0.2"
    )
    training.add_argument("--success", metavar="MODULE:ATTR", help="function that judges a run: success or not")
    training.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; options win over it")
    training.idle = add_arguments(training, only=SETTINGS)
    training.set_defaults(run=_train)


async def _train(options: argparse.Namespace) -> int:
    logging.getLogger().setLevel(logging.WARNING)
    find_from_here()
    config = from_arguments(options, options.config)
    run_agent = Command(options.command)
    reward = reported if options.reward is None else load_function(options.reward, "--reward")
    success = None if options.success is None else load_function(options.success, "--success")
    training, testing = prepared(options.scenarios, file_or_share(options.held_out), config.seed)
    console = plain_console()
    display = make_display(console)
    display.note(f"starting the server on {config.folder}: it loads {config.base_model}")
    async with LocalServer(config) as backend:
        report = await run(
            client=backend.client,
            config=config,
            scenarios=training,
            held_out=testing,
            run_agent=run_agent,
            reward=reward,
            display=display,
            success=success,
        )
    for line in summary(report, config.folder):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
