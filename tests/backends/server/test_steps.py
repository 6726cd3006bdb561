"""Training steps through a real server: swaps, deaths of the worker at every point, refusals, idempotence."""

import asyncio
from typing import Any

import httpx
import pytest
from art_backends.client import StepProgress
from art_backends.errors import AdapterError, ControlError, NonFiniteError, TrainingError


async def test_a_step_is_trained_served_and_recorded(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        seen: list[StepProgress] = []
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids, progress=seen.append, deadline=60)
        assert (outcome.kind, outcome.version, outcome.excluded) == ("committed", 1, {})
        assert sorted(outcome.tokens) == sorted(ids)
        assert seen, "progress is told at least once"
        policy = await server.policy()
        assert (policy["version"], policy["step"], policy["versions"]) == (1, 1, [0, 1])
        assert (await server.chat(server.agent)).json()["choices"][0]["message"]["content"] == "policy@1 says hi"
        rollout, training = await server.client.rollout_with_training(ids[0])
        assert len(rollout.calls) == 1
        item = {"step": 1, "call": rollout.calls[0].id, "choice": 0, "trained": 3, "advantage": 0.5, "excluded": None}
        assert training == [item]
        steps = await server.client.steps("policy")
        assert [(step["step"], step["kind"], step["rollout_ids"]) for step in steps] == [(1, "committed", sorted(ids))]


async def test_asking_again_gives_the_outcome_and_trains_nothing(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        first = await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
        assert await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60) == first
        await server.client.train_step(2, server.config, rollout_ids=await server.collect(2), deadline=60)
        assert await server.client.train_step(1, server.config, deadline=60) == first
        assert (await server.policy())["version"] == 2
        assert len((server.faults / "jobs.log").read_text().split()) == 4


async def test_asking_while_it_runs_joins_it(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        server.fault("hold_job")
        step = asyncio.create_task(server.client.train_step(1, server.config, rollout_ids=ids, deadline=60))
        await server.engine.get("/test/held/job")
        assert (await server.client.start_step(1, server.config, rollout_ids=ids)).state == "running"
        with pytest.raises(ControlError, match="from other rollouts"):
            await server.client.start_step(1, server.config, rollout_ids=ids[:2])
        with pytest.raises(ControlError, match="step 1 is being made") as refused:
            await server.client.start_step(2, server.config, rollout_ids=ids)
        assert refused.value.status == 409
        assert (await server.client.status())["step_running"] == 1
        with pytest.raises(TrainingError, match=r"was not done within 0.1 s; it goes on"):
            await server.client.train_step(1, server.config, rollout_ids=ids, deadline=0.1)
        await server.engine.post("/test/release/job")
        assert (await step).version == 1


@pytest.mark.parametrize("fault", ["die_before_commit", "die_after_commit", "die_at_load"])
async def test_a_worker_that_dies_is_restarted_and_the_step_made(start: Any, fault: str) -> None:
    async with start() as server:
        await server.client.train_step(1, server.config, rollout_ids=await server.collect(1), deadline=60)
        ids = await server.collect(2)
        server.fault(fault)
        outcome = await server.client.train_step(2, server.config, rollout_ids=ids, deadline=90)
        assert (outcome.kind, outcome.version) == ("committed", 2)
        status = await server.client.status()
        assert status["children"][0]["restarts"] == 1
        assert status["policies"][0]["version"] == 2
        assert "policy@2" in await server.loaded()
        assert (await server.chat(server.agent)).json()["choices"][0]["message"]["content"] == "policy@2 says hi"
        assert sorted(path.name for path in (server.folder / "versions").iterdir()) == ["policy@1", "policy@2"]


async def test_a_job_is_given_again_a_bounded_number_of_times(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        server.fault("die_before_commit", 3)
        with pytest.raises(TrainingError, match="died 3 times while making training step 1"):
            await server.client.train_step(1, server.config, rollout_ids=ids, deadline=100)
        await server.worker.wait_ready(30)
        outcome = await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
        assert outcome.version == 1, "asking again after a failure tries again"


async def test_an_adapter_that_is_refused_is_never_served(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        for fault, said in (("refuse_load", "rank is 9, not 8"), ("nan_logprobs", "not finite")):
            server.fault(fault)
            with pytest.raises(AdapterError, match=said):
                await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)
            assert (await server.policy())["version"] == 0
            assert (await server.chat(server.agent)).json()["choices"][0]["message"]["content"].startswith("base-model")
            assert await server.loaded() == []
        assert (await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)).version == 1
        names = sorted(path.name.split("-")[0] for path in (server.folder / "versions").iterdir())
        assert names == ["broken", "broken", "policy@1"]


async def test_a_failure_of_the_trainer_is_told_by_its_name(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        server.fault("fail_job")
        with pytest.raises(NonFiniteError, match="loss was NaN"):
            await server.client.train_step(1, server.config, rollout_ids=ids, deadline=60)


async def test_a_skipped_step_is_a_step_without_a_version(start: Any) -> None:
    async with start() as server:
        server.fault("skip")
        outcome = await server.client.train_step(1, server.config, rollout_ids=await server.collect(1), deadline=60)
        assert (outcome.kind, outcome.version, outcome.reason) == ("skipped", 0, "no_spread")
        policy = await server.policy()
        assert (policy["version"], policy["step"]) == (0, 1)
        outcome = await server.client.train_step(2, server.config, rollout_ids=await server.collect(2), deadline=60)
        assert (outcome.kind, outcome.version) == ("committed", 1)


async def test_what_cannot_train_is_left_out_and_counted(start: Any) -> None:
    async with start() as server:
        good = await server.collect(1, 2)
        faulty = await server.open()
        await server.client.close_rollout(faulty.id, fault="tool server died", reward=1.0)
        unscored = await server.open()
        await server.client.close_rollout(unscored.id)
        still_open = await server.open()
        evaluation = await server.open(purpose="eval")
        await server.client.close_rollout(evaluation.id, reward=1.0)
        bad = [faulty.id, unscored.id, still_open.id, evaluation.id, "nobody"]
        outcome = await server.client.train_step(1, server.config, rollout_ids=[*good, *bad], deadline=60)
        assert sorted(outcome.tokens) == sorted(good)
        assert outcome.excluded == {
            faulty.id: "fault: tool server died",
            unscored.id: "no_reward",
            still_open.id: "open",
            evaluation.id: "evaluation",
            "nobody": "unknown",
        }
        nothing = await server.client.train_step(2, server.config, rollout_ids=bad, deadline=60)
        assert nothing.kind == "skipped"
        assert (nothing.reason or "").startswith(
            "no_rollouts: none of the step's rollouts can be trained (1 x evaluation"
        )


@pytest.mark.parametrize(("max_staleness", "trained"), [(0, []), (1, ["one"]), (2, ["one", "two"])])
async def test_a_stale_rollout_is_left_out_and_counted(start: Any, max_staleness: int, trained: list[str]) -> None:
    async with start() as server:
        ids = {}
        for name, step in (("two", 1), ("one", 2)):
            ids[name] = await server.collect(5)  # of the version of now, for a step to come
            await server.client.train_step(step, server.config, rollout_ids=await server.collect(step), deadline=60)
        config = server.config.model_copy(update={"max_staleness": max_staleness})
        both = [*ids["one"], *ids["two"]]
        outcome = await server.client.train_step(3, config, rollout_ids=both, deadline=60)
        assert sorted(outcome.tokens) == sorted(id for name in trained for id in ids[name])
        assert outcome.excluded == {id: "stale" for name in ids if name not in trained for id in ids[name]}
        assert outcome.kind == ("committed" if trained else "skipped")


async def test_without_ids_it_takes_the_step_s_closed_rollouts(start: Any) -> None:
    async with start() as server:
        ids = await server.collect(1)
        await server.collect(2, 1)
        outcome = await server.client.train_step(1, server.config, deadline=60)
        assert sorted(outcome.tokens) == sorted(ids)


async def test_calls_in_flight_finish_on_the_version_they_began_on(start: Any) -> None:
    """Row R20: rollouts keep their version through a swap; a version is unloaded when nobody needs it any more."""
    async with start() as server:
        await server.client.train_step(1, server.config, rollout_ids=await server.collect(1), deadline=60)
        pinned = await server.open(step=2)
        server.fault("hold_call")
        in_flight = asyncio.create_task(server.chat(server.agent, "hold"))
        await server.engine.get("/test/held/call")
        await server.client.train_step(2, server.config, rollout_ids=await server.collect(2), deadline=60)
        assert (await server.policy())["version"] == 2
        late = await server.chat(pinned.token)
        assert late.json()["choices"][0]["message"]["content"] == "policy@1 says hi"
        assert (await server.chat(server.agent)).json()["choices"][0]["message"]["content"] == "policy@2 says hi"
        await server.client.close_rollout(pinned.id, reward=0.0)
        assert "policy@1" in await server.loaded(), "a call is still in flight on it"
        await server.engine.post("/test/release/call")
        assert (await in_flight).json()["choices"][0]["message"]["content"] == "policy@1 says hold"
        async with asyncio.timeout(20):
            while await server.loaded() != ["policy@2"]:
                await server.engine.get("/health")
        stored = await server.client.rollout(pinned.id)
        assert [call.version for call in stored.calls] == ["policy@1"]


async def test_an_older_version_is_loaded_when_it_is_asked_for(start: Any) -> None:
    async with start() as server:
        for step in (1, 2):
            await server.client.train_step(step, server.config, rollout_ids=await server.collect(step), deadline=60)
        old = await server.open(purpose="eval", version=1)
        base = await server.open(purpose="eval", version=0)
        assert (await server.chat(old.token)).json()["choices"][0]["message"]["content"] == "policy@1 says hi"
        assert (await server.chat(base.token)).json()["choices"][0]["message"]["content"] == "base-model says hi"
        with pytest.raises(ControlError, match="no usable version") as refused:
            await server.open(version=7)
        assert refused.value.status == 409
        assert (await server.policy())["version"] == 2


async def test_steps_out_of_order_and_unknown_ones(start: Any) -> None:
    async with start() as server:
        await server.client.train_step(3, server.config, rollout_ids=await server.collect(3), deadline=60)
        with pytest.raises(ControlError, match="step 2 is out of order: step 3 was made already"):
            await server.client.train_step(2, server.config, rollout_ids=[], deadline=60)
        with pytest.raises(ControlError, match="step 9 was never asked for"):
            await server.client.step_report(9, "policy")
        with pytest.raises(ControlError, match="no policy 'other' here"):
            await server.client.step_report(9, "other")


async def test_calls_wait_for_a_worker_that_restarts(start: Any) -> None:
    """A restart takes longer than an SDK's retries: who asks meanwhile gets the answer, late, and no error."""
    async with start() as server:
        server.worker._process.kill()
        async with asyncio.timeout(60):
            while server.worker.state()["state"] == "up":  # noqa: ASYNC110 - until the loop has seen its end
                await asyncio.sleep(0)
            replies = await asyncio.gather(*(server.chat(server.agent, f"hi {number}") for number in range(8)))
        assert [reply.status_code for reply in replies] == [200] * 8
        assert server.worker.restarts == 1


async def test_calls_do_not_wait_for_a_worker_that_was_given_up(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("art_backends.server.supervisor.MAX_DEATHS", 1)
    async with start() as server:
        server.worker._process.kill()
        async with asyncio.timeout(60):
            while server.worker.state()["state"] == "up":  # noqa: ASYNC110 - until the loop has seen its end
                await asyncio.sleep(0)
            reply = await server.chat(server.agent)
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
        said = reply.json()["error"]
        assert said["code"] == "engine_restarting"
        assert "the worker died 1 times" in said["message"]
        assert "log" not in said["message"]


async def test_the_agent_is_told_to_come_again_while_the_worker_restarts(start: Any) -> None:
    """Row R23: an agent never sees an error that its SDK would not try again."""
    async with start() as server:
        await server.client.train_step(1, server.config, rollout_ids=await server.collect(1), deadline=60)
        server.worker._process.kill()
        statuses = set()
        async with asyncio.timeout(60):
            while True:
                reply: httpx.Response = await server.chat(server.agent)
                statuses.add(reply.status_code)
                if reply.status_code == 200:
                    break
        assert statuses <= {200, 502, 503}, statuses
        assert reply.json()["choices"][0]["message"]["content"] == "policy@1 says hi"
