"""Imitation first: train a policy on worked examples (supervised fine-tuning), step by step, as new versions.

An example is an object with ``messages`` in OpenAI's form, the assistant's tool calls included, and ``tools`` where
the agent has some. The engine's own template renders it; only what the assistant said is trained, but for messages of
``"weight": 0`` (such as worked examples in a prompt). The versions are those of any run: they can be served, and
another run can begin from one (``init_adapter``).

Each step is a function of its number, so the same command goes on where a run was stopped. It refuses an example
without an assistant's message before anything starts, and a folder whose steps were made from something else.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from art_backends.client import StepOutcome, StepProgress, policy_of
from art_backends.config import TrainConfig
from art_backends.display import Display, StepLine
from art_backends.errors import ConfigError, ScenarioError
from art_backends.scenarios import Scenario, load, order
from art_backends.tracking import MetricsFile


class Control(Protocol):
    """What is needed of the server; ``client.Client`` is it."""

    async def status(self) -> dict[str, Any]: ...

    async def train_step(
        self,
        step: int,
        config: TrainConfig,
        *,
        examples: Sequence[Mapping[str, Any]] | None = ...,
        progress: Any = ...,
    ) -> StepOutcome: ...


@dataclass(frozen=True)
class SftReport:
    """What came of it. ``loss`` is the mean cross-entropy per token of the assistant, in nats: of the first and of
    the last step that this call made (None if it made none)."""

    version: str
    folder: Path
    examples: int
    steps: int
    first_loss: float | None
    last_loss: float | None
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Which examples each step learns: ``epochs`` times all of them, ``batch_size`` in a step."""

    examples: Sequence[Scenario]
    epochs: int
    batch_size: int
    seed: int
    shuffle: bool

    @property
    def steps(self) -> int:
        return -(-len(self.examples) * self.epochs // self.batch_size)

    def digest(self) -> str:
        """Of all that decides which examples a step learns, but for the number of epochs: more may be asked for."""
        content = [[item.data for item in self.examples], self.batch_size, self.seed, self.shuffle]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def batch(self, step: int) -> list[dict[str, Any]]:
        """The examples of a step, from 1 on; the last step has what is left."""
        chosen = order(self.seed, step, self.batch_size, len(self.examples), shuffle=self.shuffle)
        if step == self.steps:
            chosen = chosen[: len(self.examples) * self.epochs - self.batch_size * (self.steps - 1)]
        return [self.examples[index].data for index in chosen]


def read(source: Any) -> list[Scenario]:
    """Examples of a JSON Lines file or of objects in memory; ScenarioError names the one that cannot be used."""
    found = load(source, what="example", distinct=False)  # an example may count twice
    for number, example in enumerate(found, start=1):
        problem = _problem(example.data)
        if problem is not None:
            raise ScenarioError(f"example {number} ({example.id}): {problem}")
    return found


def _problem(example: Mapping[str, Any]) -> str | None:
    messages, tools = example.get("messages"), example.get("tools")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return 'no list of messages: an example is an object with "messages" in OpenAI\'s form'
    for at, message in enumerate(messages, start=1):
        if message.get("weight", 1) not in (0, 1) or ("weight" in message and message.get("role") != "assistant"):
            return f'message {at}: "weight" must be 0 (context only) or 1 (learned), of a message of the assistant'
    said = [m for m in messages if m.get("role") == "assistant" and (m.get("content") or m.get("tool_calls"))]
    if not [message for message in said if message.get("weight", 1)]:
        return "no message of the assistant that says something and is to be learned: there is nothing to imitate"
    if messages[0].get("role") == "assistant":
        return "it begins with the assistant: there is nothing to answer"
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return '"tools" must be a list of objects'
    return None


async def run(
    *,
    client: Control,
    config: TrainConfig,
    examples: Sequence[Scenario],
    display: Display,
    epochs: int = 3,
    batch_size: int = 8,
) -> SftReport:
    """Make the steps that are still to be made: ``epochs`` times all examples, ``batch_size`` in a step.

    Raises TemplateError (the template refuses an example), TrainingError, ServerError; CancelledError when stopped.
    """
    began = time.monotonic()
    plan = Plan(examples, epochs, batch_size, config.seed, config.shuffle)
    steps = plan.steps
    content = plan.digest()
    config = config.model_copy(update={"steps": steps})  # so that a schedule of the learning rate spans the run
    losses: list[float] = []
    metrics = MetricsFile(config.folder / "metrics.jsonl")
    try:
        with display:
            policy = policy_of(await client.status(), config.name)
            step, version = int(policy.get("step") or 0), int(policy["version"])
            _check_same(metrics, step, content, config.folder)
            told = f"{len(examples)} examples, {steps} steps"
            if step >= steps:
                told += f": all were made, nothing is left to do (more with --epochs, now {epochs})"
            display.note(told + (f"; going on after step {step}" if 0 < step < steps else ""))
            while step < steps:
                step += 1
                started = time.monotonic()
                outcome = await _step(client, config, step, plan.batch(step), display)
                seconds = time.monotonic() - started
                version = outcome.version
                loss = outcome.metrics.get("loss")
                losses += [] if loss is None else [loss]
                metrics.write({"step": step, "outcome": outcome.kind, "version": version, **outcome.metrics})
                skipped = outcome.reason or "" if outcome.kind == "skipped" else ""
                display.step(
                    StepLine(
                        step=step,
                        steps=steps,
                        reward=None,
                        success=None,
                        seconds=seconds,
                        version=f"{config.name}@{version}",
                        skipped=skipped,
                        loss=float("nan") if loss is None else loss,
                    )
                )
    finally:
        metrics.close()
    return SftReport(
        version=f"{config.name}@{version}",
        folder=config.folder,
        examples=len(examples),
        steps=steps,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        seconds=time.monotonic() - began,
    )


def _check_same(metrics: MetricsFile, step: int, content: str, folder: Path) -> None:
    """ConfigError if the folder's steps were not made from these examples; notes them before the first step."""
    begun = [row["imitation"] for row in metrics.rows if "imitation" in row]
    if begun and begun[-1] == content:
        return
    if step or begun:
        what = "other examples (or another batch size, seed or shuffle)" if begun else "rewards"
        raise ConfigError(
            f"{folder} holds a run that learns from {what}: give another --folder, and --init-adapter "
            f"{folder}/versions/NAME@N to begin from one of its versions"
        )
    metrics.write({"imitation": content})


async def _step(
    client: Control, config: TrainConfig, step: int, examples: Sequence[Mapping[str, Any]], display: Display
) -> StepOutcome:
    packs = 0
    display.phase(f"step {step}: training", 0)

    def progress(now: StepProgress) -> None:
        nonlocal packs
        if now.packs != packs:
            packs = now.packs
            display.phase(f"step {step}: training", packs)
        display.advance(now.packs_done)

    return await client.train_step(step, config, examples=examples, progress=progress)
