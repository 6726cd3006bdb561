"""``art-backends``: train any program, train on worked examples, serve a run folder, see rollouts and versions.

Errors are one clear line on standard error and exit code 2; Ctrl-C is exit code 130. Standard output carries what was
asked for, nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from art_backends import cli_forget, cli_rollouts, cli_train, cli_versions, cli_vllm, sft, stacks
from art_backends.arguments import CommandParser
from art_backends.backend import LocalServer
from art_backends.cli_folder import add_folder, connected, running
from art_backends.config import ENGINE_SETTINGS, MODEL_SETTINGS, TrainConfig, add_arguments, from_arguments, make_config
from art_backends.display import make_display, plain_console
from art_backends.errors import ArtError, ConfigError, ServerError
from art_backends.server.folder import POLICY, VERSIONS, read_pin
from art_backends.server.run import serve
from art_backends.training import versions
from art_backends.trajectories import version_name

# Settings that serving goes by.
SERVED = MODEL_SETTINGS | {"name", "folder", "models", "providers", "limits", "privacy", "history", "optimizer"}
# Settings that imitation goes by: there are no rollouts and no rewards.
IMITATED = MODEL_SETTINGS | {"name", "folder", "shuffle", "seed", "optimizer", "learning_rate", "schedule"}
IMITATED |= {"warmup_steps", "weight_decay", "max_grad_norm", "updates_per_batch", "max_kl"}
IMITATED |= {"pack_tokens", "gradient_checkpointing"}
STACKS_SECONDS = 10.0  # until a server that does not answer is taken to hang


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``art-backends``; returns the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("httpx", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    stacks.on_request()
    try:
        code: int = asyncio.run(options.run(options))
        return code
    except ArtError as error:
        if getattr(options, "announce", False):
            _announce({"ready": False, "type": type(error).__name__, "message": str(error)})
        sys.stderr.write(f"art-backends: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="art-backends", description="Serve and inspect the model under training.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serving = commands.add_parser("serve", help="serve a run folder at an OpenAI-compatible address")
    serving.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    serving.add_argument("--port", type=int, default=8787, help="port to bind, 0 for any free one (default: 8787)")
    serving.add_argument("--allow-remote", action="store_true", help="allow an address that others can reach")
    serving.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; options win over it")
    serving.add_argument("--settings", type=Path, help=argparse.SUPPRESS)  # JSON of the process that starts us
    serving.add_argument("--announce", action="store_true", help=argparse.SUPPRESS)
    serving.add_argument("--exit-with-parent", action="store_true", help="end when standard input closes")
    serving.idle = add_arguments(serving, only=SERVED)
    serving.set_defaults(run=_serve)

    cli_train.add_parser(commands)

    imitating = commands.add_parser("sft", help="train on worked examples: imitation, before or without rewards")
    imitating.add_argument("examples", type=Path, metavar="FILE", help="JSON Lines: messages (and tools) a line")
    imitating.add_argument("--epochs", type=int, default=3, help="times that all examples are trained (default: 3)")
    imitating.add_argument("--batch-size", type=int, default=8, help="examples per step (default: 8)")
    imitating.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings; options win over it")
    imitating.idle = add_arguments(imitating, only=IMITATED)
    imitating.set_defaults(run=_sft)

    cli_versions.add_parser(commands)
    cli_vllm.add_parser(commands)

    status = commands.add_parser("status", help="policies, versions, children, rollouts of a running server")
    add_folder(status, as_json=True)
    status.set_defaults(run=_status)

    asking = commands.add_parser("stacks", help="make a running server and its worker write where they stand")
    add_folder(asking)
    asking.set_defaults(run=_stacks)

    cli_rollouts.add_parser(commands)
    cli_forget.add_parser(commands)
    return parser


async def _serve(options: argparse.Namespace) -> int:
    if options.settings is not None:
        config = make_config(_object(options.settings), source=str(options.settings))
    else:
        config = _resumed(from_arguments(options, options.config), options)

    def ready(url: str) -> None:
        if options.announce:
            _announce({"ready": True, "url": url})
            return
        folder = config.folder
        console = plain_console()
        console.print(f"serving {_answering(config)} of {folder} at {url}/v1", style="bold", soft_wrap=True)
        command = f"  OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY=$(cat {folder}/agent.token) python your_app.py"
        console.print(command, soft_wrap=True)

    await serve(
        config,
        host=options.host,
        port=options.port,
        allow_remote=options.allow_remote,
        exit_with_parent=options.exit_with_parent,
        on_ready=ready,
    )
    return 0


def _answering(config: TrainConfig) -> str:
    """The version that apps are answered by."""
    made = versions.list_versions(config.folder.expanduser() / VERSIONS, config.name)
    newest = max([0, *(info.version for info in made)])
    pinned = read_pin(config.folder.expanduser())
    if pinned is None or pinned == newest:
        return version_name(config.name, newest)
    return f"{version_name(config.name, pinned)} (pinned; the newest is @{newest})"


async def _sft(options: argparse.Namespace) -> int:
    logging.getLogger().setLevel(logging.WARNING)
    if options.epochs < 1 or options.batch_size < 1:
        raise ConfigError("--epochs and --batch-size must be at least 1")
    config = from_arguments(options, options.config)
    examples = sft.read(options.examples)
    console = plain_console()
    display = make_display(console)
    display.note(f"starting the server on {config.folder}: it loads {config.base_model}")
    async with LocalServer(config) as backend:
        report = await sft.run(
            client=backend.client,
            config=config,
            examples=examples,
            display=display,
            epochs=options.epochs,
            batch_size=options.batch_size,
        )
    folder = config.folder
    losses = "" if report.last_loss is None else f", loss {report.first_loss:.3f} → {report.last_loss:.3f}"
    console.print(f"{report.version}: {report.examples} examples, {report.steps} steps{losses}", soft_wrap=True)
    console.print(f"serve it:       art-backends serve --folder {folder}", soft_wrap=True)
    console.print(f"begin from it:  --init-adapter {folder}/versions/{report.version}", soft_wrap=True)
    return 0


def _resumed(config: TrainConfig, options: argparse.Namespace) -> TrainConfig:
    """Serving an existing run folder needs no settings: those it was made with are the defaults."""
    file = config.folder.expanduser() / POLICY
    if not file.exists():
        return config
    defaults = {key: value for key, value in _object(file).items() if key in TrainConfig.model_fields}
    given = {key: value for key, value in vars(options).items() if key in TrainConfig.model_fields}
    given = {**config.model_dump(exclude_unset=True), **given}
    other: frozenset[str] = frozenset({"engine_url"} if "engine" in given else ())
    if "engine_url" in given or given.get("engine") == "embedded":  # what was kept is of another engine
        other = ENGINE_SETTINGS
    defaults = {key: value for key, value in defaults.items() if key not in other}
    return make_config({**defaults, **given}, source=str(file))


def _object(file: Path) -> dict[str, Any]:
    """The object of a JSON file; ConfigError names the file."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: cannot be read: it holds no object")
    return content


def _announce(said: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


async def _status(options: argparse.Namespace) -> int:
    async with connected(options.folder) as client:
        status = await client.status()
    console = plain_console()
    if options.json:
        console.print_json(data=status)
        return 0
    policies = Table("policy", "base model", "version", "step", "capture", "versions", title="policies")
    for policy in status["policies"]:
        versions = ", ".join(f"@{number}" for number in policy["versions"])
        current = f"{policy['name']}@{policy['version']}"
        current += "" if policy["pinned"] is None else f", apps get @{policy['pinned']}"
        policies.add_row(
            policy["name"], policy["base_model"], current, str(policy["step"]), policy["capture"], versions
        )
    console.print(policies)
    children = Table("child", "pid", "state", "restarts", title="children")
    for child in status["children"]:
        children.add_row(child["name"], str(child["pid"]), child["state"], str(child["restarts"]))
    console.print(children)
    if status["replicas"]:
        replicas = Table("server", "state", "calls in flight", "moved elsewhere", "why", title="engine servers")
        for one in status["replicas"]:
            counted = (str(one["in_flight"]), str(one["moved"]))
            replicas.add_row(one["name"], one["state"], *counted, one["why"] or "")
        console.print(replicas)
    counts = Table("what", "count", title="rollouts and calls")
    for key, value in status["rollouts"].items():
        counts.add_row(key, str(value))
    counts.add_row("app calls answered since start, not kept", str(status["proxy"]["apps"]))
    console.print(counts)
    return 0


async def _stacks(options: argparse.Namespace) -> int:
    server = running(options.folder).pid
    children: list[int] = []
    async with connected(options.folder) as client:
        with suppress(ServerError, TimeoutError):  # it hangs: that is why its stacks are asked for
            async with asyncio.timeout(STACKS_SECONDS):
                children = [child["pid"] for child in (await client.status())["children"] if child["pid"]]
    for pid in (server, *children):
        if pid is None:
            continue
        try:
            os.kill(pid, signal.SIGUSR1)
        except ProcessLookupError:
            raise ServerError(f"process {pid} of {options.folder} is gone") from None
    logs = options.folder / "logs"
    plain_console().print(
        f"asked server (process {server}) and worker ({', '.join(map(str, children)) or 'not known'}): see "
        f"{logs}/server.log (or the terminal where it was started) and {logs}/worker.log",
        soft_wrap=True,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
