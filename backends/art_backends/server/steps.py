"""Training steps: collect the rollouts, have the worker train, serve the new version, record the step.

A step is known by (policy, step): asking for one that was recorded gives its outcome, asking for one that runs joins
it. A worker that dies is restarted by the supervisor and given the job again, a bounded number of times; what it had
committed it recognises. Order of a swap: load, probe, move the alias, record. A crash between any two of these is
mended by ``reconcile`` at the next start, because the committed folder says it all.

It refuses to move the alias to a version that does not answer, and to make steps out of order.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from art_backends.client import StepOutcome, StepProgress, StepReport
from art_backends.config import TrainConfig
from art_backends.errors import AdapterError, ArtError, EngineError, ServerError, StoreError, TrainingError, revive
from art_backends.proxy import examples
from art_backends.proxy.app import EngineRenderer
from art_backends.proxy.engine import Engine
from art_backends.proxy.engine_client import EngineClient
from art_backends.proxy.tail import Vocabulary
from art_backends.server import worker_jobs
from art_backends.server.adapters import Adapters
from art_backends.server.policy import PolicyTable
from art_backends.store import AsyncStore, ConflictError
from art_backends.trajectories import Purpose, Rollout, TrajectoryGroup, trajectory, version_number

log = logging.getLogger(__name__)

TRIES = 3  # of a job whose worker dies
SWAP_TRIES = 5
READY_SECONDS = 900.0  # until a restarted worker must be up
UNREACHABLE_SECONDS = 120.0  # until a worker that is said to be up must answer
BACKOFF_SECONDS = 5.0  # at most, between two tries


class WorkerChild(Protocol):
    """What is needed of the supervisor."""

    async def wait_ready(self, deadline: float) -> None: ...


class Job:
    """A step in the making."""

    def __init__(self, step: int, rollout_ids: Sequence[str] | None, examples: Sequence[dict[str, Any]] | None) -> None:
        self.step = step
        self.rollout_ids = None if rollout_ids is None else sorted(set(rollout_ids))
        self.examples = examples
        self.progress = StepProgress()
        self.outcome: StepOutcome | None = None
        self.error: dict[str, str] | None = None
        self.finished = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def report(self) -> StepReport:
        state = "failed" if self.error is not None else "done" if self.outcome is not None else "running"
        return StepReport.model_validate(
            {"state": state, "progress": self.progress, "outcome": self.outcome, "error": self.error}
        )


class Steps:
    """The steps of one policy, one at a time."""

    def __init__(
        self,
        *,
        store: AsyncStore,
        policies: PolicyTable,
        adapters: Adapters,
        engine: Engine,
        engine_child: WorkerChild,
        trainer: EngineClient,
        worker: WorkerChild,
        versions: Path,
        training: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """``worker`` takes the steps, by way of ``trainer``; ``engine_child`` is what answers for ``engine``, which may
        be the same. ``training()`` surrounds each training."""
        self._store = store
        self._policies = policies
        self._adapters = adapters
        self._engine = engine
        self._trainer = trainer
        self._worker = worker
        self._engine_child = engine_child
        self._training = training
        self._versions = versions
        self._job: Job | None = None
        self._unrecorded: dict[int, StepOutcome] = {}  # made, but the store could not be written
        self._stopping = asyncio.Event()

    async def submit(
        self,
        step: int,
        rollout_ids: Sequence[str] | None,
        config: TrainConfig,
        imitated: Sequence[dict[str, Any]] | None = None,
    ) -> StepReport:
        """Start step ``step``, join it, or give its outcome. With ``imitated`` it learns these examples.

        ConflictError if another one runs, or if it is out of order.
        """
        job = self._job
        if job is not None and job.step == step:
            same = rollout_ids is None or job.rollout_ids is None or sorted(set(rollout_ids)) == job.rollout_ids
            if job.outcome is not None or (job.error is None and same):
                return job.report()
            if job.error is None:
                raise ConflictError(f"training step {step} is being made from other rollouts")
        recorded = await self.recorded(step)
        if recorded is not None:
            return StepReport(state="done", outcome=recorded)
        last = await self.last_step()
        if step <= last:
            raise ConflictError(f"training step {step} is out of order: step {last} was made already")
        if self._job is not None and not self._job.finished.is_set():
            if self._job.step == step:
                return self._job.report()  # another request was first, while the store was asked
            raise ConflictError(f"training step {self._job.step} is being made; ask again when it is done")
        if self._stopping.is_set():
            raise ServerError("the server is stopping")
        job = self._job = Job(step, rollout_ids, imitated)
        job.task = asyncio.get_running_loop().create_task(self._run(job, config), name=f"step {step}")
        return job.report()

    async def wait(self, step: int, seconds: float) -> StepReport | None:
        """Where a step stands, at the latest after ``seconds``; None if it was never asked for."""
        job = self._job
        if job is not None and job.step == step:
            if seconds > 0 and not self._stopping.is_set():
                await _first(seconds, job.finished, self._stopping)
            return job.report()
        recorded = await self.recorded(step)
        return None if recorded is None else StepReport(state="done", outcome=recorded)

    async def recorded(self, step: int) -> StepOutcome | None:
        if step in self._unrecorded:
            return self._unrecorded[step]
        found = await self._store.step(self._policies.name, step)
        return None if found is None else StepOutcome.model_validate(found)

    async def last_step(self) -> int:
        """Number of the last step that was made, 0 if none was."""
        steps = await self._store.steps(self._policies.name)
        return max([0, *self._unrecorded, *(int(item["step"]) for item in steps)])

    def running(self) -> int | None:
        """Number of the step in the making, or None."""
        return self._job.step if self._job is not None and not self._job.finished.is_set() else None

    def stop_waiting(self) -> None:
        """Answer every poll now: the server is stopping."""
        self._stopping.set()

    async def aclose(self) -> None:
        """End the step in the making; it is made again, to the same bytes, after the next start."""
        self.stop_waiting()
        task = self._job.task if self._job is not None else None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self, job: Job, config: TrainConfig) -> None:
        try:
            job.outcome = await self._make(job, config)
            kind, version = job.outcome.kind, job.outcome.version
            log.info("step %d: %s, %s@%d is served", job.step, kind, self._policies.name, version)
        except asyncio.CancelledError:
            job.error = {"type": "ServerError", "message": "the server stopped; the step is made again when asked for"}
            raise
        except ArtError as error:
            log.error("step %d failed: %s", job.step, error)
            job.error = {"type": type(error).__name__, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - boundary: a job's failure is its report, the server lives on
            log.error("step %d failed\n%s", job.step, traceback.format_exc())
            job.error = {"type": type(error).__name__, "message": str(error) or type(error).__name__}
        finally:
            job.finished.set()

    async def _make(self, job: Job, config: TrainConfig) -> StepOutcome:
        if job.examples is None:
            groups, excluded = await self._collect(job, config.max_staleness)
        else:
            groups, excluded = [await self._imitated(job.examples)], {}
        used = sorted(item.rollout_id for group in groups for item in group.trajectories)
        if used:
            content = await asyncio.to_thread(
                worker_jobs.encode,
                policy=self._policies.name,
                from_version=self._policies.newest,
                versions=self._versions,
                step=job.step,
                config=config,
                groups=groups,
                imitate=job.examples is not None,
            )
            async with self._training():
                outcome = await self._train(job, content)
        else:
            reason = "no_rollouts: none of the step's rollouts can be trained" + _histogram(excluded)
            outcome = StepOutcome(kind="skipped", version=self._policies.newest, reason=reason)
        outcome = outcome.model_copy(update={"excluded": excluded})
        if job.examples is not None:
            outcome = outcome.model_copy(update={"tokens": {}})  # they are no rollouts of the store
        if outcome.kind == "committed":
            await self._swap(outcome.version)
        await self._record(job.step, outcome, used)
        return outcome

    async def _collect(self, job: Job, max_staleness: int) -> tuple[list[TrajectoryGroup], dict[str, str]]:
        """The step's groups, ordered by name and rollout id, and the rollouts that cannot be trained, with why."""
        name = self._policies.name
        ids = job.rollout_ids
        if ids is None:
            # ids only: the rollouts' calls are read below, in order of id
            ids = []
            after: str | None = None
            while page := await self._store.rollouts(
                policy=name, step=job.step, purpose=Purpose.TRAIN, closed=True, after=after
            ):
                ids += [rollout.id for rollout in page]
                after = page[-1].id
        found = {rollout.id: rollout for rollout in await self._store.rollouts_by_id(ids)}
        groups: dict[str, list[Rollout]] = {}
        excluded: dict[str, str] = {}
        for rollout_id in sorted(set(ids)):
            rollout = found.get(rollout_id)
            reason = _unusable(rollout, name, self._policies.newest - max_staleness)
            if reason is not None or rollout is None:
                excluded[rollout_id] = reason or "unknown"
            else:
                groups.setdefault(rollout.group, []).append(rollout)
        made = [
            TrajectoryGroup(group=group, trajectories=[item for item in map(trajectory, members) if item is not None])
            for group, members in sorted(groups.items())
        ]
        return made, excluded

    async def _imitated(self, given: Sequence[dict[str, Any]]) -> TrajectoryGroup:
        info = await self._engine.tokenizer_info() or {}
        longest = info.get("model_max_length")
        return await examples.to_group(EngineRenderer(self._engine), Vocabulary.of(info), given, longest=longest)

    async def _train(self, job: Job, content: bytes) -> StepOutcome:
        lost = 0
        delays = _Backoff(UNREACHABLE_SECONDS)
        while True:
            await self._worker.wait_ready(READY_SECONDS)
            accepted = False
            try:
                name = await worker_jobs.submit(self._trainer, content)
                accepted = True
                delays = _Backoff(UNREACHABLE_SECONDS)
                return await self._follow(job, name)
            except EngineError as error:
                if error.status not in worker_jobs.LOST and error.status != 409:
                    raise TrainingError(f"the worker refused training step {job.step}: {error}") from None
                lost += accepted
                job.progress = StepProgress()
                if lost >= TRIES:
                    raise TrainingError(
                        f"the worker died {lost} times while making training step {job.step}; see logs/worker.log "
                        f"(out of memory? lower pack_tokens or group_size). Last: {error}"
                    ) from None
                log.warning("step %d: %s; asking again", job.step, error)
                if not await delays.wait():
                    raise TrainingError(f"training step {job.step} could not be handed over: {error}") from None

    async def _follow(self, job: Job, name: str) -> StepOutcome:
        while True:
            report = await worker_jobs.report(self._trainer, name)
            job.progress = report.progress
            if report.state == "failed":
                raise _reported(report.error or {})
            if report.state == "done":
                if report.outcome is None:
                    raise TrainingError(f"the worker says job {name} is done, but not what came of it")
                return report.outcome

    async def _swap(self, version: int) -> None:
        delays = _Backoff(UNREACHABLE_SECONDS)
        for attempt in range(1, SWAP_TRIES + 1):
            await self._engine_child.wait_ready(READY_SECONDS)
            try:
                await self._adapters.load(version)
            except AdapterError as error:
                self._adapters.set_aside(version, str(error))
                raise
            except EngineError as error:
                log.warning("version %d is not served yet: %s", version, error)
                if attempt == SWAP_TRIES or not await delays.wait():
                    raise
                continue
            if version > self._policies.newest:
                self._policies.move(version)
            return

    async def _record(self, step: int, outcome: StepOutcome, used: list[str]) -> None:
        content = {**outcome.model_dump(mode="json"), "rollout_ids": used}
        try:
            await self._store.record_step(self._policies.name, step, content)
        except StoreError as error:
            self._unrecorded[step] = outcome  # the version's folder says it too; the next start records it
            log.error("step %d was made but could not be recorded: %s", step, error)


def _reported(said: dict[str, str]) -> ArtError:
    """A failure that the worker reported, as the error of the name it gave if that is one of ours."""
    kind, message = said.get("type", ""), said.get("message", "the worker gave no reason")
    error = revive(kind, message)
    if isinstance(error, ServerError) and kind != "ServerError":
        return TrainingError(f"the worker failed: {kind}: {message}")
    return error


class _Backoff:
    """Growing pauses until a budget of seconds is used up."""

    def __init__(self, budget: float) -> None:
        self._left = budget
        self._next = 0.1

    async def wait(self) -> bool:
        """Pause; False, at once, if the budget is used up."""
        if self._left <= 0:
            return False
        pause = min(self._next, self._left)
        self._left -= pause
        self._next = min(self._next * 2, BACKOFF_SECONDS)
        await asyncio.sleep(pause)
        return True


def _unusable(rollout: Rollout | None, policy: str, oldest: int) -> str | None:
    """Why a rollout cannot be trained, or None. ``oldest``: the oldest version that may have answered it."""
    if rollout is None:
        return "unknown"
    number = version_number(policy, rollout.version)
    reasons = {
        "other_policy": rollout.policy != policy,
        "evaluation": rollout.purpose is not Purpose.TRAIN,
        "open": not rollout.closed,
        f"fault: {rollout.fault}": rollout.fault is not None,
        "no_reward": rollout.reward is None,
        "stale": number is None or number < oldest,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _histogram(excluded: dict[str, str]) -> str:
    counts: dict[str, int] = {}
    for reason in excluded.values():
        counts[reason] = counts.get(reason, 0) + 1
    return " (" + ", ".join(f"{count} x {reason}" for reason, count in sorted(counts.items())) + ")" if counts else ""


async def _first(seconds: float, *events: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
