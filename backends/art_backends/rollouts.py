"""Play rollouts: open, run the agent in its scope, score, close; many at once, each wait with a deadline.

What the agent does wrong is data: it is closed with ``error`` set, scored and trained. What the world does wrong is a
fault: the rollout is closed with ``fault`` set and excluded. A reward that raises, hangs or returns what is no number
is a fault, never a reward of 0.

It refuses to go on without a server: a control API that does not answer ends the collection. So does a scenario of
which no input can be made, or a graph that cannot be built: those are the user's to mend.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from art_backends.capture.scope import rollout_scope
from art_backends.client import OpenRollout, StepOutcome, StepProgress
from art_backends.config import TrainConfig
from art_backends.errors import ArtError, ControlError, GraphError, RewardError, ScenarioError, ServerError
from art_backends.failures import AGENT_STATUSES, brief, describe, fault_of, jsonable
from art_backends.rewards.identity import identity
from art_backends.rewards.values import LazyCalls, Reward, Run, parts
from art_backends.scenarios import Scenario
from art_backends.stragglers import LateError, Stragglers
from art_backends.trajectories import CallStatus, Purpose, Rollout, RolloutError, version_number
from art_backends.waiting import OverdueError, SelfCancelledError, bounded, in_thread, resolve
from art_backends.watchdog import Watchdog

CONTROL_SECONDS = 180.0  # most that one control request may take, its repeats included
CLOSE_SECONDS = 10.0  # most that closing may take when the run was interrupted
ROUNDS = 3  # times that a rollout which met a fault of the world is played before the step does without it
PAGE = 500

T = TypeVar("T")
RunAgent = Callable[[dict[str, Any]], Awaitable[Any]]
Success = Callable[[Run], bool | float]


class Control(Protocol):
    """What the loop needs of the server; ``client.Client`` is it."""

    async def status(self) -> dict[str, Any]: ...

    async def open_rollout(
        self,
        *,
        policy: str,
        purpose: Purpose = ...,
        scenario_id: str = ...,
        scenario: Any = ...,
        step: int | None = ...,
        group: str = ...,
        sample: int = ...,
        version: int | None = ...,
    ) -> OpenRollout: ...

    async def close_rollout(
        self,
        rollout_id: str,
        *,
        output: Any = ...,
        reward: float | None = ...,
        metrics: Mapping[str, float] | None = ...,
        scored_by: str | None = ...,
        error: RolloutError | None = ...,
        fault: str | None = ...,
    ) -> Rollout: ...

    async def rollout(self, rollout_id: str) -> Rollout: ...

    async def rollouts(
        self,
        *,
        policy: str | None = ...,
        step: int | None = ...,
        purpose: Purpose | None = ...,
        closed: bool | None = ...,
        limit: int | None = ...,
        after: str | None = ...,
    ) -> list[Rollout]: ...

    async def steps(self, policy: str) -> list[dict[str, Any]]: ...

    async def train_step(
        self,
        step: int,
        config: TrainConfig,
        *,
        rollout_ids: Sequence[str] | None = ...,
        progress: Callable[[StepProgress], None] | None = ...,
        deadline: float | None = ...,
    ) -> StepOutcome: ...


@dataclass(frozen=True, eq=False)
class Slot:
    """One rollout to be played. ``version`` is the number of the adapter version that answers it; of a rollout that was
    played earlier it may be as old as ``oldest``."""

    purpose: Purpose
    step: int
    group: str
    sample: int
    scenario: Scenario
    version: int
    oldest: int

    def fits(self, rollout: Rollout, scored_by: str) -> bool:
        """Whether a rollout played earlier is this slot's: same task and reward, right version, nothing went wrong."""
        number = version_number(rollout.policy, rollout.version)
        return (
            rollout.closed
            and rollout.fault is None
            and rollout.reward is not None
            and rollout.scored_by == scored_by
            and (rollout.group, rollout.sample) == (self.group, self.sample)
            and number is not None
            and self.oldest <= number <= self.version
            and rollout.scenario == self.scenario.data
        )


class Player:
    """Plays rollouts against one server with one agent and one reward."""

    def __init__(
        self,
        client: Control,
        config: TrainConfig,
        run_agent: RunAgent,
        reward: Reward,
        success: Success | None = None,
        *,
        watchdog: Watchdog | None = None,
    ) -> None:
        self._client = client
        self._config = config
        self._run_agent = run_agent
        self._reward = reward
        self._success = success
        self.scored_by = identity(reward, success)
        self._watchdog = watchdog or Watchdog()
        self._room = asyncio.Semaphore(config.concurrency)

    async def collect(self, slots: Sequence[Slot], advance: Callable[[int], None]) -> list[Rollout]:
        """The rollouts of ``slots``, in their order: those closed earlier reused, the others played.

        A rollout that met a fault of the world (not of the reward) is played again, up to ROUNDS times in all.
        Raises ServerError if the control API fails; on cancellation the open rollouts are closed as interrupted.
        """
        found: dict[Slot, Rollout] = await self._earlier(slots)
        advance(len(found))
        for _ in range(ROUNDS):
            missing = [slot for slot in slots if slot not in found or _again(found[slot])]
            if not missing:
                break
            await self._play_all(missing, found, advance)
        return [found[slot] for slot in slots]

    async def _earlier(self, slots: Sequence[Slot]) -> dict[Slot, Rollout]:
        """Closed rollouts of a run that was stopped, by the slot that they fill."""
        found: dict[Slot, Rollout] = {}
        for purpose, step in {(slot.purpose, slot.step): None for slot in slots}:
            by_place = {(s.group, s.sample): s for s in slots if (s.purpose, s.step) == (purpose, step)}
            after: str | None = None
            while True:
                page = await control(
                    self._client.rollouts(
                        policy=self._config.name, purpose=purpose, step=step, closed=True, limit=PAGE, after=after
                    )
                )
                for rollout in page:
                    slot = by_place.get((rollout.group, rollout.sample))
                    if slot is not None and slot.fits(rollout, self.scored_by):
                        found.setdefault(slot, rollout)
                if len(page) < PAGE:
                    break
                after = page[-1].id
        return found

    async def _play_all(
        self, slots: Sequence[Slot], found: dict[Slot, Rollout], advance: Callable[[int], None]
    ) -> None:
        stragglers = Stragglers(self._config.straggler_timeout, [slot.group for slot in slots])

        async def play(slot: Slot) -> None:
            async with self._room:
                found[slot] = await self._play(slot, stragglers)
            advance(len(found))

        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(play(slot)) for slot in slots]
        try:
            # Each task ends by its own deadlines; the first that fails (no server) ends all.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _play(self, slot: Slot, stragglers: Stragglers) -> Rollout:
        waiting, where = self._watchdog.waiting, f"(scenario {slot.scenario.id}, sample {slot.sample})"
        with waiting(f"the server to open a rollout {where}"):
            opened = await self._open(slot)
        where = f"in rollout {opened.id} {where}"
        try:
            with waiting(f"the agent {where}"):
                output, error, fault = await self._act(opened, slot, stragglers)
            reward: float | None = None
            metrics: dict[str, float] = {}
            if fault is None:
                calls = LazyCalls(partial(self._calls, opened.id), CONTROL_SECONDS)
                run = Run(slot.scenario.data, output, calls, error, opened.id)
                try:
                    with waiting(f"the reward {where}"):
                        reward, metrics = await self._score(run)
                except RewardError as problem:
                    fault = f"reward: {problem}"
        except (asyncio.CancelledError, ScenarioError, GraphError) as ended:
            fault = f"setup: {ended}" if isinstance(ended, ArtError) else "interrupted"
            with suppress(ServerError, TimeoutError):
                await asyncio.wait_for(self._client.close_rollout(opened.id, fault=fault), CLOSE_SECONDS)
            raise
        closing = self._client.close_rollout(
            opened.id,
            output=jsonable(output),
            reward=reward,
            metrics=metrics,
            scored_by=self.scored_by,
            error=error,
            fault=fault,
        )
        try:
            with waiting(f"the server to close it, {where}"):
                return await _to_the_end(control(closing))
        except ControlError as refused:
            if refused.status >= 500:
                raise
            # This rollout only (its pin expired, its output is too large): the server does not know it as closed.
            return _faulted(opened, slot, self._config.name, f"server: {refused}")

    async def _open(self, slot: Slot) -> OpenRollout:
        return await control(
            self._client.open_rollout(
                policy=self._config.name,
                purpose=slot.purpose,
                scenario_id=slot.scenario.id,
                scenario=slot.scenario.data,
                step=slot.step,
                group=slot.group,
                sample=slot.sample,
                version=slot.version,
            )
        )

    async def _calls(self, rollout_id: str) -> Sequence[Any]:
        return (await control(self._client.rollout(rollout_id))).calls

    async def _act(
        self, opened: OpenRollout, slot: Slot, stragglers: Stragglers
    ) -> tuple[Any, RolloutError | None, str | None]:
        """(output, the agent's error, the world's fault) of one run of the agent."""
        scenario = json.loads(json.dumps(slot.scenario.data))  # its own copy: an agent may write into its input

        async def act() -> tuple[Any, BaseException | None]:
            try:
                return await self._run_agent(scenario), None
            except (Exception, SystemExit) as error:  # noqa: BLE001 - boundary: what the agent raises is data
                return None, error

        seconds = self._config.rollout_timeout
        try:
            # The scope is ours, not the task's: it ends with the rollout even if the agent does not.
            with rollout_scope(opened.base_url, opened.token, opened.id, self._config.models):
                async with stragglers.limited(slot.group):
                    output, error = await bounded(act(), seconds)
        except LateError as late:
            return None, None, f"late: {late} (straggler_timeout)"
        except OverdueError:
            return None, RolloutError(type="TimeoutError", message=f"the agent did not end within {seconds:g} s"), None
        except SelfCancelledError as cancelled:
            return None, RolloutError(type="CancelledError", message=f"the agent {cancelled}"), None
        if error is None:
            return output, None, None
        if isinstance(error, ScenarioError | GraphError):  # neither the agent's nor the world's: the user's to mend
            raise error
        return None, describe(error), fault_of(error) or await self._broken_call(opened.id)

    async def _broken_call(self, rollout_id: str) -> str | None:
        """What the world did wrong in the last call of an agent that failed: its error need not show that."""
        calls = await self._calls(rollout_id)
        last = calls[-1] if calls else None
        error = last.error if last is not None and last.status is CallStatus.ERROR else None
        if error is None or error.startswith(("bad_request:", *(f"{status} " for status in AGENT_STATUSES))):
            return None
        return f"{'engine' if last is None or last.version else 'provider'}: {error}"

    async def _score(self, run: Run) -> tuple[float, dict[str, float]]:
        """Reward and metrics of a run; RewardError says what the reward function did instead."""
        seconds = self._config.reward_timeout
        try:
            value = await bounded(self._ask_reward(run), seconds)
        except OverdueError:
            raise RewardError(f"did not return within {seconds:g} s (reward_timeout)") from None
        except Exception as error:  # boundary: the reward is the user's code
            raise RewardError(f"raised {brief(error)}") from error
        try:
            reward, metrics = parts(value)
        except RewardError as problem:
            raise RewardError(f"returned {problem}") from None
        if self._success is not None and "success" not in metrics:
            try:
                verdict = await bounded(in_thread(self._success, run), seconds)
                metrics["success"] = parts({"reward": 0.0, "success": verdict})[1]["success"]
            except Exception as error:  # boundary: the success function is the user's code
                raise RewardError(f"gave a reward, but the success function raised {brief(error)}") from error
        return reward, metrics

    async def _ask_reward(self, run: Run) -> Any:
        try:
            return await self._call_reward(run)
        except SystemExit as error:  # out of a task it would end the event loop
            raise RuntimeError(f"SystemExit: {error}") from error

    async def _call_reward(self, run: Run) -> Any:
        if _is_async(self._reward):
            assert isinstance(run.calls, LazyCalls)
            await run.calls.load()  # an async reward cannot wait for a fetch in the middle of an attribute
            return await resolve(self._reward(run))
        value = await in_thread(self._reward, run)
        if inspect.isawaitable(value):
            assert isinstance(run.calls, LazyCalls)
            await run.calls.load()
            return await value
        return value


async def control(request: Coroutine[Any, Any, T], seconds: float = CONTROL_SECONDS) -> T:
    """A control request with a deadline of its own; ServerError if it passes."""
    try:
        return await bounded(request, seconds)
    except OverdueError:
        raise ServerError(f"the server did not answer within {seconds:g} s; see logs/server.log") from None


async def _to_the_end(request: Coroutine[Any, Any, T]) -> T:
    """Await a request; when cancelled meanwhile, still let it end: the rollout is finished and worth keeping."""
    task = asyncio.get_running_loop().create_task(request)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task}, timeout=CLOSE_SECONDS)
        if not task.cancel() and not task.cancelled():
            task.exception()  # looked at: there is nobody left to tell
        raise


def _again(rollout: Rollout) -> bool:
    """Whether playing once more may help: the world's faults pass, a reward's do not, nor does being late."""
    return rollout.fault is not None and not rollout.fault.startswith(("reward:", "late:"))


def _faulted(opened: OpenRollout, slot: Slot, policy: str, fault: str) -> Rollout:
    return Rollout(
        id=opened.id,
        policy=policy,
        version=opened.version,
        purpose=slot.purpose,
        scenario_id=slot.scenario.id,
        scenario=slot.scenario.data,
        step=slot.step,
        group=slot.group,
        sample=slot.sample,
        closed=True,
        fault=fault,
    )


def _is_async(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
