"""A loop written by hand, in ART's shape: play, score, group, train, again; on the real server and a random model."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from art_backends.backend import LocalBackend
from art_backends.errors import ConfigError, RewardError, ScenarioError, ServerError, TrainingError
from art_backends.model import TrainableModel, Trajectory, TrajectoryGroup, gather_trajectory_groups
from art_backends.trajectories import CaptureLevel

pytestmark = pytest.mark.timeout(300)

SETTINGS: dict[str, Any] = {"rank": 2, "alpha": 4.0, "threads": 1, "learning_rate": 1e-2}


def a_model(base: Path, **settings: Any) -> TrainableModel:
    return TrainableModel(project="games", name="agent-1", base_model=str(base), **{**SETTINGS, **settings})


async def play(model: TrainableModel, seed: int, turns: int = 2) -> Trajectory:
    """Two turns; the reward is the share of letters in what the model says."""
    client = model.openai_client()
    trajectory = Trajectory(messages=[{"role": "user", "content": f"Say {seed}."}])
    said = ""
    for _ in range(turns):
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages, max_completion_tokens=8
        )
        answer = completion.choices[0].message
        said += answer.content or ""
        trajectory.messages += [answer, {"role": "user", "content": "Go on."}]
    trajectory.reward = sum(c.isascii() and c.isalpha() for c in said) / (len(said) or 1)
    trajectory.metrics["length"] = len(said)
    return trajectory


def groups(model: TrainableModel, count: int = 2, size: int = 3) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(play(model, seed) for _ in range(size)) for seed in range(count)]


async def test_a_loop_plays_trains_and_goes_on(tmp_path: Path, model: Path) -> None:
    async with LocalBackend(path=tmp_path) as backend:
        mine = a_model(model)
        await mine.register(backend)
        while await mine.get_step() < 2:
            gathered = await gather_trajectory_groups(groups(mine))
            assert [len(group) for group in gathered] == [3, 3]
            outcome = await mine.train(gathered)
            assert (outcome.kind, outcome.metrics["trajectories/trained"]) == ("committed", 6.0)
        client = mine._running().client
        found = await client.rollouts(policy="agent-1", step=2)
        assert len(found) == 6
        assert len({rollout.group for rollout in found}) == 2
        first = await client.rollout(found[0].id)
        assert first.closed
        assert first.metrics["length"] > 0
        assert first.output["messages"][1]["role"] == "assistant"
        assert [call.capture for call in first.calls] == [CaptureLevel.TOKENS] * 2
        assert first.calls[1].continues == first.calls[0].id
        assert {call.version for call in first.calls} == {"agent-1@1"}
        outside = await mine.openai_client().chat.completions.create(
            model=mine.get_inference_name(), messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=4
        )
        assert outside.choices[0].message.content is not None
        assert (await client.status())["proxy"]["unattributed"] == 1
    async with LocalBackend(path=tmp_path) as backend:  # another day
        again = a_model(model)
        await again.register(backend)
        assert await again.get_step() == 2
        outcome = await again.train(await gather_trajectory_groups(groups(again)), learning_rate=5e-3)
        assert (outcome.version, outcome.metrics["learning_rate"]) == (3, 5e-3)
    assert (tmp_path / "games/agent-1/versions/agent-1@3").is_dir()


@pytest.mark.slow
async def test_failures_are_bounded_and_never_trained(tmp_path: Path, model: Path) -> None:
    never = asyncio.Event()
    turn = itertools.count()

    async def sometimes(mine: TrainableModel) -> Trajectory:
        number = next(turn)
        trajectory = await play(mine, 1, turns=1)
        if number == 0:
            raise ValueError("the game crashed")
        if number == 1:
            await never.wait()
        return trajectory

    async with LocalBackend(path=tmp_path) as backend:
        mine = a_model(model)
        await mine.register(backend)
        (group,) = await gather_trajectory_groups(
            [TrajectoryGroup(sometimes(mine) for _ in range(5))], max_exceptions=2, timeout=20
        )
        assert len(group) == 3
        assert sorted(type(error).__name__ for error in group.exceptions) == ["TimeoutError", "ValueError"]
        client = mine._running().client
        closed = await client.rollouts(policy="agent-1", closed=True)
        assert sorted((rollout.fault or "").split(":")[1].strip() for rollout in closed) == [
            "TimeoutError",
            "ValueError",
        ]
        await mine.train([group])
        assert await mine.get_step() == 1
        turn = itertools.count()
        with pytest.raises(ValueError, match="the game crashed"):
            await gather_trajectory_groups([TrajectoryGroup(sometimes(mine) for _ in range(3))], timeout=20)


async def test_one_client_shared_by_fifty_trajectories_at_once(tmp_path: Path, model: Path) -> None:
    """The prompt itself says whose call it was."""
    async with LocalBackend(path=tmp_path) as backend:
        mine = a_model(model)
        await mine.register(backend)
        client = mine.openai_client()

        async def ask(number: int) -> Trajectory:
            for turn in range(2):
                content = f"I am {number}, turn {turn}."
                await client.chat.completions.create(
                    model="any name", messages=[{"role": "user", "content": content}], max_completion_tokens=2
                )
                await asyncio.sleep(0)
            return Trajectory(reward=float(number), metadata={"number": number})

        (group,) = await gather_trajectory_groups([TrajectoryGroup(ask(number) for number in range(50))], timeout=200)
        assert len(group) == 50
        await mine.train([group])
        server = mine._running().client
        for rollout in await server.rollouts(policy="agent-1"):
            whole = await server.rollout(rollout.id)
            said = [call.request["messages"][0]["content"] for call in whole.calls]
            assert said == [f"I am {rollout.reward:.0f}, turn {turn}." for turn in range(2)]


async def test_a_judge_sees_every_whole_group(tmp_path: Path, model: Path) -> None:
    async def judge(group: TrajectoryGroup) -> TrajectoryGroup:
        for rank, trajectory in enumerate(group):
            trajectory.reward = float(rank)
        return group

    async with LocalBackend(path=tmp_path) as backend:
        mine = a_model(model)
        await mine.register(backend)
        gathered = await gather_trajectory_groups(groups(mine), after_each=judge)
        assert [[t.reward for t in group] for group in gathered] == [[0.0, 1.0, 2.0]] * 2
        outcome = await mine.train(gathered)
        assert outcome.metrics["reward"] == pytest.approx(1.0)


async def test_what_cannot_be_trained_is_refused_before_anything_is_closed(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ConfigError, match="project: 'a/b'"):
        TrainableModel(project="a/b", name="x", base_model="y")
    with pytest.raises(ConfigError, match="TrainableModel: rank"):
        a_model(model, rank=0)
    mine = a_model(model)
    with pytest.raises(ServerError, match=r"await model\.register"):
        mine.openai_client()
    async with LocalBackend(path=tmp_path) as backend:
        await mine.register(backend)
        gathered = await gather_trajectory_groups(groups(mine))
        with pytest.raises(TrainingError, match="no trajectory"):
            await mine.train([])
        with pytest.raises(TrainingError, match="no call to learn from"):
            await mine.train([*gathered, TrajectoryGroup([], trajectories=[Trajectory(reward=1.0)])])
        kept, gathered[0].trajectories[0].reward = gathered[0].trajectories[0].reward, None
        with pytest.raises(RewardError, match="reward is None"):
            await mine.train(gathered)
        with pytest.raises(TrainingError, match="takes trajectory groups"):
            await mine.train(gathered[0].trajectories)  # type: ignore[arg-type]
        gathered[0].trajectories[0].reward = kept
        assert not await mine._running().client.rollouts(policy="agent-1", closed=True)
        await mine.train(gathered)
        with pytest.raises(TrainingError, match="trained in an earlier step"):
            await mine.train(gathered)
        with pytest.raises(TypeError, match="returned int, not a Trajectory"):
            await gather_trajectory_groups([TrajectoryGroup([asyncio.sleep(0, 1)])])


async def test_examples_are_imitated_before_rewards_and_between(tmp_path: Path, model: Path) -> None:
    said = {"role": "assistant", "content": "It is so."}
    examples = [{"messages": [{"role": "user", "content": f"Say {n}."}, said]} for n in range(3)]
    async with LocalBackend(path=tmp_path) as backend:
        mine = a_model(model, learning_rate=3e-2)
        await mine.register(backend)
        with pytest.raises(ScenarioError, match="nothing to imitate"):
            await mine.train_sft([examples[0], {"messages": [{"role": "user", "content": "Hi"}]}])
        for wrong in ({"batch_size": 0}, {"batch_size": 1.5}, {"epochs": "2"}):
            with pytest.raises(ConfigError, match="must be whole numbers from 1 on"):
                await mine.train_sft(examples, **wrong)  # type: ignore[arg-type]
        for nothing in (None, [3], {"messages": []}, tmp_path / "none.jsonl"):
            with pytest.raises(ScenarioError):
                await mine.train_sft(nothing)  # type: ignore[arg-type]
        assert await mine.get_step() == 0
        outcomes = await mine.train_sft(examples, epochs=4, batch_size=2)
        assert [outcome.version for outcome in outcomes] == [1, 2, 3, 4, 5, 6]
        assert outcomes[-1].metrics["loss"] < outcomes[0].metrics["loss"]
        assert await mine.get_step() == 6
        gathered = await gather_trajectory_groups(groups(mine))
        outcome = await mine.train(gathered)
        assert (outcome.version, outcome.metrics["trajectories/trained"]) == (7, 6.0)
        best = max((trajectory for group in gathered for trajectory in group), key=lambda t: t.reward or 0.0)
        best.tools = [{"type": "function", "function": {"name": "noop", "parameters": {"type": "object"}}}]
        [last] = await mine.train_sft([best], learning_rate=1e-2)  # what it said itself, as the SDK's own objects
        assert (last.version, last.metrics["learning_rate"]) == (8, 1e-2)


async def test_what_was_gathered_while_a_step_trained_is_trained_in_the_next(tmp_path: Path, model: Path) -> None:
    async with LocalBackend(path=tmp_path) as backend:
        mine = a_model(model)
        await mine.register(backend)
        first = await gather_trajectory_groups(groups(mine))
        early = await gather_trajectory_groups(groups(mine))
        earlier = await gather_trajectory_groups(groups(mine))
        assert (await mine.train(first)).version == 1
        outcome = await mine.train(early)
        assert (outcome.version, outcome.metrics["trajectories/trained"], outcome.excluded) == (2, 6.0, {})
        outcome = await mine.train(earlier)  # two versions old: more than max_staleness
        assert (outcome.kind, set(outcome.excluded.values()), len(outcome.excluded)) == ("skipped", {"stale"}, 6)


async def test_settings_of_gathering_that_would_hang_or_mean_nothing() -> None:
    for settings in ({"concurrency": 0}, {"timeout": 0}, {"max_exceptions": -1}):
        with pytest.raises(ConfigError, match="gather_trajectory_groups: concurrency"):
            await gather_trajectory_groups([], **settings)

    async def hangs() -> Trajectory:
        await asyncio.Event().wait()
        return Trajectory()

    with pytest.raises(TimeoutError, match=r"a trajectory did not end within 0\.01 s"):
        await gather_trajectory_groups([TrajectoryGroup([hangs()])], timeout=0.01)
