"""``art-backends rollouts``: the newest rollouts of a running server, a line each, and one of them in full.

A rollout is named by its id or by the beginning of it, as long as no other begins so. Ids are never cut: a table is
rather wider than the terminal; what an app may make long is shortened instead, and shown in full by ``show``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from art_backends.cli_folder import add_folder, connected
from art_backends.client import Client
from art_backends.display import plain_console
from art_backends.errors import ConfigError
from art_backends.trajectories import Purpose, Rollout

LONGEST = 32  # characters of a scenario's id or of a fault in the list
_UNTRAINED = {
    Purpose.TRAIN: "not trained yet",
    Purpose.EVAL: "of an evaluation: it does not train",
    Purpose.TRAFFIC: "an app's: it does not train",
}
CANDIDATES = 5  # that are named where the beginning of an id fits several


def add_parser(commands: Any) -> None:
    """Add the subcommands to those of ``art-backends``."""
    rollouts = commands.add_parser("rollouts", help="the rollouts of a running server")
    actions = rollouts.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="the newest rollouts, a line each")
    listing.add_argument("--step", type=int, help="only those of this training step")
    listing.add_argument("--purpose", choices=[*Purpose], help="only of this purpose")
    listing.add_argument("--limit", type=int, default=50, help="how many at the most (default: 50)")
    add_folder(listing, as_json=True)
    listing.set_defaults(run=_list)
    show = actions.add_parser("show", help="one rollout: messages, tokens, what was trained with what advantage")
    show.add_argument("id", metavar="ID", help="the rollout's id, or the beginning of it")
    add_folder(show, as_json=True)
    show.set_defaults(run=_show)


async def _list(options: argparse.Namespace) -> int:
    async with connected(options.folder) as client:
        rollouts = await client.rollouts(step=options.step, purpose=options.purpose, limit=options.limit, newest=True)
    console = plain_console()
    if options.json:
        console.print_json(data=[rollout.model_dump(mode="json") for rollout in rollouts])
        return 0
    if not rollouts:
        console.print("no rollouts (training opens them; calls of apps are answered and not kept)", soft_wrap=True)
        return 0
    table = Table()
    for name in ("rollout", "purpose", "step", "scenario", "version", "state", "reward"):
        shortened = name in ("scenario", "state")
        table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=LONGEST if shortened else None)
    for rollout in rollouts:
        state = rollout.fault or ("closed" if rollout.closed else "open")
        step = "" if rollout.step is None else str(rollout.step)
        reward = "" if rollout.reward is None else f"{rollout.reward:.3f}"
        table.add_row(rollout.id, rollout.purpose, step, rollout.scenario_id, rollout.version, state, reward)
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.width = max(console.width, needed)
    console.print(table)
    return 0


async def _show(options: argparse.Namespace) -> int:
    async with connected(options.folder) as client:
        rollout, training = await client.rollout_with_training(await _whole_id(client, options.id, options.folder))
    console = plain_console()
    if options.json:
        console.print_json(data={**rollout.model_dump(mode="json"), "training": training})
        return 0
    reward = "none" if rollout.reward is None else f"{rollout.reward:.3f}"
    console.print(f"rollout {rollout.id} · {rollout.purpose} · scenario {rollout.scenario_id} · {rollout.version}")
    judge = "" if rollout.scored_by is None else f" by {rollout.scored_by}"
    console.print(f"reward {reward}{judge} {rollout.metrics or ''}")
    for trouble in (rollout.fault, rollout.error and f"{rollout.error.type}: {rollout.error.message}"):
        if trouble:
            console.print(f"  {trouble}")
    trained = {(item["call"], item["choice"]): item for item in training}
    for call in rollout.calls:
        console.rule(f"call {call.sequence} · node {'/'.join(call.node.path) or '-'} · {call.version} · {call.status}")
        console.print(
            f"prompt {len(call.prompt_token_ids)} tokens ({call.prompt_mode}), continues {call.continues or 'nothing'}"
            f"{', drifted' if call.drifted else ''}{f', excluded: {call.excluded}' if call.excluded else ''}"
        )
        for message in call.request.get("messages", []):
            console.print(f"  {message.get('role')}: {_text_of(message)}")
        for choice in call.choices:
            console.print(f"  → {_text_of(choice.message)}", style="bold")
            item = trained.get((call.id, choice.index))
            later = _UNTRAINED[rollout.purpose]
            said = later if item is None else _trained(item)
            console.print(f"    {len(choice.token_ids)} tokens sampled, {choice.finish_reason}; {said}")
    return 0


async def _whole_id(client: Client, given: str, folder: Path) -> str:
    """The id of the one rollout that begins so; ConfigError if there is none or more than one."""
    found = await client.rollouts(prefix=given, limit=CANDIDATES + 1) if given else []
    if len(found) == 1 or any(rollout.id == given for rollout in found):
        return given if len(found) > 1 else found[0].id
    if not found:
        raise ConfigError(
            f"no rollout of {folder} begins with {given!r}; to find ids: art-backends rollouts list --folder {folder}"
        )
    many = f"more than {CANDIDATES}" if len(found) > CANDIDATES else str(len(found))
    named = ", ".join(_named(rollout) for rollout in found[:CANDIDATES])
    raise ConfigError(f"{many} rollouts begin with {given!r}, give more of the id: {named}")


def _named(rollout: Rollout) -> str:
    step = "" if rollout.step is None else f", step {rollout.step}"
    return f"{rollout.id} ({rollout.purpose}{step})"


def _trained(item: dict[str, Any]) -> str:
    if item.get("excluded"):
        return f"not trained: {item['excluded']}"
    return f"{item['trained']} tokens trained with advantage {item['advantage']:+.3f}"


def _text_of(message: dict[str, Any]) -> str:
    parts = [] if message.get("content") in (None, "") else [str(message["content"])]
    for tool_call in message.get("tool_calls") or []:
        function = tool_call.get("function", {})
        parts.append(f"{function.get('name')}({function.get('arguments')})")
    return " ".join(parts)
