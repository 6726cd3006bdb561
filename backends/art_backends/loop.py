"""The main job: evaluate, then run → score → group → train → swap, step by step, then evaluate again.

Everything that a step needs is a function of its number and of what the server has durably: scenarios by ``order``,
closed rollouts reused, training idempotent. So a run that was stopped or killed at any point goes on with the same
command, and repeats nothing that was closed.

It refuses to train on nothing: three steps in a row without a spread of rewards at the beginning, an agent without a
trainable call, or a reward that fails for a whole step end the run with words that say what came back and what helps.
Later on, steps without a spread are what mastery looks like: enough of them in a row end the run as well, with its
report.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from art_backends import checks
from art_backends.client import StepOutcome, StepProgress, policy_of
from art_backends.config import TrainConfig
from art_backends.display import Display, StepLine
from art_backends.errors import ArtError, NothingToLearnError, TrainingError
from art_backends.playing import Playing
from art_backends.report import Evaluation, Report, can_draw, draw_curves
from art_backends.rewards.identity import change
from art_backends.rewards.values import Reward
from art_backends.rollouts import Control, Player, RunAgent, Slot, Success, control
from art_backends.scenarios import Scenario
from art_backends.summary import (
    by_step,
    common_error,
    evaluation,
    evaluation_row,
    evaluations,
    fill,
    last_reward,
    parted,
    reached,
    scored,
    step_row,
)
from art_backends.tracking import MetricsFile, Row, Sink
from art_backends.trajectories import Purpose, Rollout
from art_backends.waiting import watched
from art_backends.watchdog import Watchdog

MAX_SKIPPED = 3  # steps in a row without a spread, from the start on, until the run is given up
MAX_SETTLED = 8  # the same, once something was learned: there is nothing more to learn from these scenarios
STALL_SECONDS = 1800.0  # a training step that makes no progress for so long has hung
POLL_SECONDS = 2.0  # between looks at the engine's speed
SPEED_SECONDS = 5.0  # of the engine's work that its speed is told over; idle time does not count


async def run(
    *,
    client: Control,
    config: TrainConfig,
    scenarios: Sequence[Scenario],
    held_out: Sequence[Scenario],
    run_agent: RunAgent,
    reward: Reward,
    display: Display,
    success: Success | None = None,
    sinks: Sequence[Sink] = (),
) -> Report:
    """Make the training steps that are still to be made; returns (and writes to the run folder) the report.

    ``success`` judges a run where the reward has no "success" part. ``sinks`` get each row of metrics.jsonl too.
    Raises RewardError, NothingToLearnError, TrainingError, ServerError, StoreError; CancelledError when interrupted,
    with all open rollouts closed.
    """
    metrics = MetricsFile(config.folder / "metrics.jsonl")
    watchdog = Watchdog()
    player = Player(client, config, run_agent, reward, success, watchdog=watchdog)
    try:
        with display, watched(display.warn):
            loop = _Loop(
                client=client,
                config=config,
                scenarios=scenarios,
                held_out=held_out,
                player=player,
                watchdog=watchdog,
                display=display,
                metrics=metrics,
                sinks=list(sinks),
            )
            return await loop.run()
    finally:
        metrics.close()


class _Loop:
    def __init__(
        self,
        *,
        client: Control,
        config: TrainConfig,
        scenarios: Sequence[Scenario],
        held_out: Sequence[Scenario],
        player: Player,
        watchdog: Watchdog,
        display: Display,
        metrics: MetricsFile,
        sinks: list[Sink],
    ) -> None:
        self._client = client
        self._config = config
        self._held_out = held_out
        self._player = player
        self._watchdog = watchdog
        self._playing = Playing(config, scenarios, player, display)
        self._display = display
        self._metrics = metrics
        self._sinks = sinks
        self._version = 0
        self._digest: str | None = None
        self._pinned: int | None = None  # the version that apps get, if not the newest
        self._steps: dict[int, Row] = {}  # by step
        self._parts: list[Row] = list(metrics.rows)  # all rows, those of interrupted steps too
        self._evaluations: dict[int, Evaluation] = {}
        self._engine: dict[str, float] = {}  # done since the last row
        self._last_engine: dict[str, float] = {}
        self._drifted: int | None = None
        self._trainable = False  # whether a trainable call of the agent was seen
        self._learned = False  # whether a step since the start, or the restart, learned anything
        self._settled = False  # nothing more can be learned
        self._told: set[str] = set()  # kinds of the agent's errors that were told
        self._failing: str | None = None  # the agent's most frequent error, if it failed in all of the last step

    async def run(self) -> Report:
        began = time.monotonic()
        create = asyncio.get_running_loop().create_task
        watches = [create(self._watch_speed()), create(self._watchdog.watch(self._display.warn, self._status))]
        step: int | None = None
        try:
            policy = await self._read_status()
            committed = int(policy.get("step") or 0)  # the last step that the server knows as made
            for problem in policy.get("set_aside") or []:
                self._display.warn(f"{problem}; its step is made again")
            self._steps = by_step(self._metrics.rows, self._version)
            self._evaluations = evaluations(self._metrics.rows, self._version, self._player.scored_by)
            await self._recover(committed)
            self._tell_resumed(max([committed, *self._steps]))
            before = await self._evaluate(0, 0)
            step = max([committed, *self._steps]) + 1
            skipped, row = 0, Row()
            while step <= self._config.steps and not self._reached():
                began = time.monotonic()
                row = await self._step(step)
                skipped = skipped + 1 if row["outcome"] == "skipped" else 0
                self._learned = self._learned or row["outcome"] == "committed"
                if skipped >= MAX_SKIPPED and (not self._learned or self._failing is not None):
                    raise checks.nothing(row, skipped, self._failing)
                if skipped >= MAX_SETTLED:
                    self._settled = True
                    self._display.note(f"no group had a spread of rewards in {skipped} steps in a row: the run ends")
                    break
                if self._config.eval_every and step % self._config.eval_every == 0:
                    await self._evaluate(step, self._version)
                step += 1
            await self._playing.close()
            if skipped and not self._version:
                raise checks.nothing(row, skipped, self._failing)
            if self._pinned is not None:
                self._display.warn(
                    f"apps are answered by {self._config.name}@{self._pinned}, which is pinned: art-backends versions "
                    f"unpin --folder {self._config.folder}"
                )
            last = max([committed, *self._steps])
            after = await self._evaluate(last, self._version) if self._version else before
            return self._report(before, after)
        except asyncio.CancelledError:
            if step is not None and step not in self._steps:
                self._write({"interrupted": step, "seconds": time.monotonic() - began})
            where = "before the first step" if step is None else f"in step {step}"
            self._display.note(f"stopped {where}; nothing that was finished is lost: the same command goes on")
            raise
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self._playing.close()

    async def _status(self) -> dict[str, Any]:
        return await control(self._client.status())

    async def _read_status(self) -> dict[str, Any]:
        """Note version, digest and the engine's counters; returns the policy's part of the status."""
        status = await self._status()
        self._count_engine(status)
        policy = policy_of(status, self._config.name)
        self._version = int(policy["version"])
        self._digest = policy.get("digest")
        self._pinned = policy.get("pinned")
        return policy

    async def _recover(self, committed: int) -> None:
        """Rows of steps that were made, but whose figures a crash kept from the metrics file."""
        missing = [step for step in range(1, committed + 1) if step not in self._steps]
        if not missing:
            return
        outcomes = {item.get("step"): item for item in await control(self._client.steps(self._config.name))}
        for step in missing:
            if step not in outcomes:
                continue
            rollouts = await control(
                self._client.rollouts(policy=self._config.name, step=step, purpose=Purpose.TRAIN, closed=True)
            )
            row = step_row(step, rollouts, outcomes[step])
            times = [(rollout.opened, rollout.finished or rollout.opened) for rollout in rollouts]
            if times:
                row["seconds"] = max(end for _, end in times) - min(start for start, _ in times)
                row["seconds"] += row.get("step_seconds") or 0.0
            self._steps[step] = row
            self._write(row)
        self._steps = dict(sorted(self._steps.items()))

    def _scored(self) -> list[Row]:
        """The rows of the steps that this run's reward scored: those of another one cannot be compared with them."""
        return [row for row in self._steps.values() if row.get("scored_by") == self._player.scored_by]

    def _tell_resumed(self, done: int) -> None:
        """Say where a run that was there before stands, and whether its figures are still this one's."""
        before, now = last_reward(self._parts), self._player.scored_by
        if before not in (None, now):
            self._display.warn(
                f"this folder's last figures are of another reward: {change(before, now)}. The held-out scenarios are "
                "measured by this one, on the base model too, and what earlier steps got is not compared with it. A "
                "folder of its own (--folder) begins anew"
            )
        if not done:
            return
        steps, version = self._config.steps, f"{self._config.name}@{self._version}"
        if self._reached():
            self._display.note(f"nothing is left to train: step {done} had reached target_success ({version})")
        elif done >= steps and not self._version:
            raise NothingToLearnError(
                f"all {steps} steps are made, and there was nothing to learn in any of them. {checks.HELPS}. Then more "
                "--steps go on, and another --folder begins anew"
            )
        elif done >= steps:
            self._display.note(f"nothing is left to train: all {steps} steps are made ({version}); more --steps go on")
        else:
            self._display.note(f"going on from {version}, after step {done} of {steps}")

    async def _evaluate(self, step: int, version: int) -> list[Rollout]:
        """Rollouts of the held-out scenarios on a version; those of a stopped run are reused, the base's always."""
        if not self._held_out:
            return []
        slots = [Slot(Purpose.EVAL, step, scenario.id, 0, scenario, version, version) for scenario in self._held_out]
        name = "base evaluation" if version == 0 else f"evaluation after step {step}"
        self._display.phase(name, len(slots))
        rollouts = await self._player.collect(slots, self._display.advance)
        checks.rewards(rollouts, name, self._config.folder)
        await self._check_calls(rollouts)
        passed = evaluation(step, f"{self._config.name}@{version}", rollouts)
        before = self._evaluations.get(step)
        self._evaluations[step] = passed
        alarm = parted([self._evaluations[at] for at in sorted(self._evaluations) if at <= step], self._scored())
        if before is None or before.version != passed.version:
            self._write(evaluation_row(passed, self._player.scored_by) | ({} if alarm is None else {"alarm": alarm}))
        figures = [f"reward {passed.reward:.3f}" if passed.reward is not None else ""]
        figures.append(f"success {passed.success:.3f}" if passed.success is not None else "")
        self._display.note(f"{name}: " + ", ".join(filter(None, [*figures, f"{passed.scenarios} scenarios"])))
        if alarm is not None:
            self._display.warn(alarm)
        if passed.faults:
            self._display.warn(
                f"{passed.faults} of {len(rollouts)} held-out rollouts were excluded: {checks.fault(rollouts)}"
            )
        return rollouts

    async def _step(self, step: int) -> Row:
        began = time.monotonic()
        rollouts = await self._playing.rollouts(step, self._version)
        await self._check_calls(rollouts)
        played = time.monotonic()
        outcome = await self._train(step, [rollout.id for rollout in scored(rollouts)])
        await self._read_status()
        row = step_row(step, rollouts, outcome.model_dump(exclude={"tokens"}))
        ended = time.monotonic()
        row |= {"seconds": ended - began, "rollout_seconds": played - began, "train_seconds": ended - played}
        row |= {f"engine/{name}": value for name, value in self._engine.items()}
        self._engine = {}
        self._steps[step] = row
        self._failing = common_error(rollouts) if row["errors"] == len(scored(rollouts)) else None
        self._write(row)
        self._show(row, rollouts)
        return row

    async def _check_calls(self, rollouts: Sequence[Rollout]) -> None:
        if not self._trainable:
            self._trainable = await checks.calls(self._client, rollouts, self._config.nodes)
            odd = await checks.node_rewards(self._client, rollouts)
            if odd is not None:
                self._display.warn(odd)

    async def _train(self, step: int, rollout_ids: list[str]) -> StepOutcome:
        self._display.phase(f"step {step}: training", 0)
        seen: StepProgress | None = None

        def progress(now: StepProgress) -> None:
            nonlocal seen
            if now != seen:
                if seen is None or now.packs != seen.packs:
                    self._display.phase(f"step {step}: training", now.packs)
                self._display.advance(now.packs_done)
                watch.reschedule(asyncio.get_running_loop().time() + STALL_SECONDS)
                self._watchdog.alive()
                seen = now

        try:
            async with asyncio.timeout(STALL_SECONDS) as watch:
                with self._watchdog.waiting(f"the worker to train step {step}"):
                    return await self._client.train_step(step, self._config, rollout_ids=rollout_ids, progress=progress)
        except TimeoutError:
            raise TrainingError(
                f"step {step}: training made no progress for {STALL_SECONDS / 60:.0f} minutes; see logs/worker.log of "
                f"{self._config.folder}; the same command goes on from this step"
            ) from None

    def _show(self, row: Row, rollouts: Sequence[Rollout]) -> None:
        line = StepLine(
            step=row["step"],
            steps=self._config.steps,
            reward=row["reward"],
            success=row["success"],
            seconds=row["seconds"],
            errors=row["errors"],
            faults=row["faults"],
            version=f"{self._config.name}@{row['version']}",
            skipped=row.get("reason", "no reason given") if row["outcome"] == "skipped" else "",
        )
        self._display.step(line)
        if line.skipped:
            helps = f". {checks.HELPS}" if line.step == min(self._steps) else ""
            self._display.warn(
                f"step {line.step}: nothing to learn from ({line.skipped}); rewards: {row['rewards']}{helps}"
            )
        if line.faults:
            self._display.warn(f"step {line.step}: {line.faults} rollouts were excluded: {checks.fault(rollouts)}")
        if self._config.target_success is not None and row["success"] is None:
            self._display.warn(f"step {line.step}: target_success is set, but the reward has no success part")
        self._tell_errors(line.step, rollouts)

    def _tell_errors(self, step: int, rollouts: Sequence[Rollout]) -> None:
        """Each new kind of error once, with where to look; each time if the agent does nothing but fail."""
        failed = [rollout for rollout in rollouts if rollout.error is not None]
        kinds = {rollout.error.type for rollout in failed if rollout.error is not None}
        if not failed or (kinds <= self._told and len(failed) < len(rollouts)):
            return
        self._told |= kinds
        share = "every rollout" if len(failed) == len(rollouts) else f"{len(failed)} of {len(rollouts)} rollouts"
        self._display.warn(
            f"step {step}: the agent failed in {share}: {common_error(failed)}; look at one: "
            f"art-backends rollouts show {failed[0].id} --folder {self._config.folder}"
        )

    def _write(self, row: Row) -> None:
        self._parts.append(row)
        self._metrics.write(row)
        for sink in list(self._sinks):
            try:
                sink.write(row)
            except Exception as error:  # noqa: BLE001 - boundary: a sink is the user's code and not worth a run
                self._sinks.remove(sink)
                self._display.warn(
                    f"metrics sink {type(sink).__name__} is switched off: {type(error).__name__}: {error}"
                )

    def _reached(self) -> bool:
        return reached(self._scored(), self._config.target_success, self._config.target_steps)

    def _report(self, before: Sequence[Rollout], after: Sequence[Rollout]) -> Report:
        config = self._config
        report = Report(policy=config.name, base_model=config.base_model, model_digest=self._digest)
        report.version = f"{config.name}@{self._version}"
        report.stopped = "target" if self._reached() else "no_spread" if self._settled else "steps"
        rows = list(self._steps.values())
        fill(report, rows, self._parts, before, after)
        report.drifted_calls = self._drifted
        report.alarms = list(dict.fromkeys(row["alarm"] for row in self._parts if row.get("alarm")))
        report.evaluations = [self._evaluations[step] for step in sorted(self._evaluations)]
        report.write(config.folder / "report.json")
        if rows and can_draw():
            draw_curves(self._scored(), report.evaluations, config.folder / "curves.png")
        elif rows:
            self._display.note("no curves were drawn: pip install 'art-inplace[plot]'")
        return report

    def _count_engine(self, status: dict[str, Any]) -> None:
        """Add what the engine did since the last look; its counters begin at 0 again after a restart."""
        drifted = (status.get("rollouts") or {}).get("drifted")
        self._drifted = None if drifted is None else int(drifted)
        now = status.get("engine")
        if now is None:  # it is busy or starting: the next look tells
            return
        for name in ("tokens_sampled", "busy_seconds"):
            value = float(now.get(name) or 0.0)
            last = self._last_engine.get(name)
            if last is not None:
                self._engine[name] = self._engine.get(name, 0.0) + (value - last if value >= last else value)
            self._last_engine[name] = value

    async def _watch_speed(self) -> None:
        """Show the engine's speed while the run goes on. Trouble here is the main job's to notice, not this one's."""
        last: tuple[float, float] | None = None
        while True:
            await asyncio.sleep(POLL_SECONDS)
            with suppress(ArtError):
                engine = (await self._status()).get("engine") or {}
                now = (float(engine.get("busy_seconds") or 0.0), float(engine.get("tokens_sampled") or 0.0))
                if last is None or now[0] < last[0]:  # the first look, or a restarted engine's counters
                    last = now
                elif now[0] - last[0] >= SPEED_SECONDS:
                    self._display.speed((now[1] - last[1]) / (now[0] - last[0]))
                    last = now
