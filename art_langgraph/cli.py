"""``art-langgraph``: train a graph from a terminal, and look at it before.

    art-langgraph inspect my_app:graph                               what it is made of; nothing runs
    art-langgraph check my_app:graph --scenarios tasks.jsonl         one scenario runs; what is captured of it
    art-langgraph train my_app:graph --scenarios tasks.jsonl --reward my_rewards:score

Every setting of TrainConfig that a command goes by is an option of it; the app is found from the current folder, as
with ``python -m``. What is wrong is one clear line on standard error and exit code 2 (an error of the app has its
own traceback); Ctrl-C is exit code 130, and the same command goes on. It refuses to show tracebacks of its own
for the user's errors.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from art_backends import stacks
from art_backends.arguments import CommandParser
from art_backends.config import MODEL_SETTINGS, add_arguments, from_arguments
from art_backends.display import PlainDisplay, make_display
from art_backends.errors import ArtError, ConfigError, NothingToLearnError, did_you_mean
from art_backends.functions import find_from_here, load_function
from art_backends.report import summary
from art_backends.scenarios import Scenario, file_or_share, load
from art_backends.waiting import run_to_end
from rich.console import Console

from art_langgraph.capturing import placeholder_key
from art_langgraph.check import check, lines, trained_tokens
from art_langgraph.graphs import load_graph
from art_langgraph.inspection import Inspection, inspect_graph, inspection_lines
from art_langgraph.names import check_names
from art_langgraph.train import train

# Settings that one rollout goes by.
CHECKED = MODEL_SETTINGS | {"models", "nodes", "rollout_timeout", "temperature", "top_p", "max_tokens", "history"}
_SHOWN = 5  # ids of scenarios
INTERRUPTED = 130  # exit code of a program that Ctrl-C ended
_LINGER = 5.0  # seconds that the app's own threads have to end


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``art-langgraph``; returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    stacks.on_request()
    find_from_here()
    code = 0
    try:
        with placeholder_key():
            options.run(options)
    except ArtError as error:
        sys.stderr.write(f"art-langgraph: {error}\n")
        code = 2
    except KeyboardInterrupt:
        sys.stderr.write("art-langgraph: interrupted; the same command goes on\n")
        code = INTERRUPTED
    if arguments is None:
        _leave(code)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="art-langgraph", description="Train an unmodified LangGraph agent in place.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    training = commands.add_parser("train", help="train the model behind a graph")
    _add_running(training)
    training.add_argument("--reward", required=True, metavar="MODULE:ATTR", help="function that scores a run")
    training.add_argument(
        "--held-out", metavar="FILE|SHARE", help="scenarios to measure success on: a file, or a share such as 0.2"
    )
    training.add_argument("--success", metavar="MODULE:ATTR", help="function that judges a run: success or not")
    add_arguments(training)
    training.set_defaults(run=_train)
    looking = commands.add_parser("inspect", help="show a graph's models and where their calls would go; runs nothing")
    _add_graph(looking)
    looking.add_argument(
        "--models", nargs="+", default=[], metavar="NAME", help="model names of the policy (none: all)"
    )
    looking.add_argument(
        "--nodes", nargs="+", default=[], metavar="NAME", help="nodes or agents that train (none: all)"
    )
    looking.add_argument("--json", action="store_true", help="as JSON")
    looking.set_defaults(run=_inspect)
    checking = commands.add_parser("check", help="run one scenario and show what is captured and would be trained")
    _add_running(checking)
    checking.add_argument("--scenario", metavar="ID", help="which one (default: the first)")
    checking.idle = {"--reward", "--held-out", "--success", *add_arguments(checking, only=CHECKED)}
    checking.set_defaults(run=_check)
    return parser


def _add_graph(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "graph",
        metavar="MODULE:ATTR",
        help="the graph, or a function that makes it; also path.py:ATTR and langgraph.json:NAME",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    """What every command takes that runs the graph, but for the settings."""
    _add_graph(parser)
    parser.add_argument("--scenarios", type=Path, required=True, metavar="FILE", help="JSON Lines: a scenario a line")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; options win over it")
    parser.add_argument("--to-input", metavar="MODULE:ATTR", help="function that makes the graph's input")
    parser.add_argument("--on-interrupt", metavar="MODULE:ATTR", help="function that answers the graph's interrupts")


def _functions(options: argparse.Namespace) -> dict[str, Any]:
    """The user's functions that both commands take, by parameter."""
    given = {"to_input": options.to_input, "on_interrupt": options.on_interrupt}
    return {
        name: None if spec is None else load_function(spec, "--" + name.replace("_", "-"))
        for name, spec in given.items()
    }


def _train(options: argparse.Namespace) -> None:
    config = from_arguments(options, options.config)
    console = Console()
    report = train(
        options.graph,
        scenarios=options.scenarios,
        reward=load_function(options.reward, "--reward"),
        held_out=file_or_share(options.held_out),
        **_functions(options),
        success=None if options.success is None else load_function(options.success, "--success"),
        config=config,
        display=make_display(console),
    )
    for line in summary(report, config.folder):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _inspect(options: argparse.Namespace) -> None:
    found, warnings = asyncio.run(_inspected(options.graph, options.models, options.nodes))
    for warning in warnings:
        sys.stderr.write(f"art-langgraph: warning: {warning}\n")
    if options.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(found), indent=2) + "\n")
        return
    sys.stdout.write("\n".join(inspection_lines(found)) + "\n")


async def _inspected(spec: str, models: list[str], nodes: list[str]) -> tuple[Inspection, list[str]]:
    async with load_graph(spec) as loaded:
        found = inspect_graph(loaded.graph, models, nodes)
        return found, check_names(found, models, nodes)


def _check(options: argparse.Namespace) -> None:
    given = from_arguments(options, options.config)
    scenario = _scenario(options.scenarios, options.scenario)
    functions = _functions(options)
    display = PlainDisplay(Console(stderr=True), time.monotonic)
    with tempfile.TemporaryDirectory(prefix="art-check-") as folder:
        config = given.model_copy(update={"folder": Path(folder)})
        checked = run_to_end(check(options.graph, scenario, config, display=display, **functions), threads=8)
    sys.stdout.write("\n".join(lines(checked)) + "\n")
    if checked.ended is not None:
        raise NothingToLearnError("the agent failed on this scenario (see above)")
    if not trained_tokens(checked.rollout.calls, checked.nodes):
        raise NothingToLearnError("no token of this run would train (see above)")


def _scenario(file: Path, wanted: str | None) -> Scenario:
    """The scenario of an id, the first if none is wanted; ConfigError says which there are."""
    scenarios = load(file)
    if wanted is None:
        return scenarios[0]
    known = {scenario.id: scenario for scenario in scenarios}
    if wanted in known:
        return known[wanted]
    ids = ", ".join(list(known)[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
    listed = f"There are {len(known)}: {ids}" if len(known) > 1 else f"The only one is {ids}"
    made = any(scenario.data.get("id") is None for scenario in scenarios)
    how = ' (a scenario without an "id" has one made from its content)' if made else ""
    hint = did_you_mean(wanted, known) or "."
    raise ConfigError(f"--scenario {wanted}: {file} has no scenario of that id{hint} {listed}{how}")


def _leave(code: int) -> None:
    """End the process even if a thread of the app hangs: Python would wait for it for ever."""
    deadline = time.monotonic() + _LINGER
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    raise SystemExit(main())
