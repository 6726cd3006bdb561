"""Rollouts of later steps are played while a step waits and trains, and no further ahead than is allowed."""

import asyncio
import json
from collections import defaultdict

import pytest
from art_backends.config import make_config
from art_backends.errors import ConfigError, NothingToLearnError, RewardError
from art_backends.trajectories import Purpose

from tests.backends.memory_server import MemoryServer, alternating, echo, go, rows_of

DEADLINE = 20.0


def versions(server, step):
    return {r.version for r in server.store.values() if (r.purpose, r.step) == (Purpose.TRAIN, step)}


async def until(true):
    async with asyncio.timeout(DEADLINE):
        while not true():  # noqa: ASYNC110 - the run is in memory: it goes on at each turn of the loop
            await asyncio.sleep(0)


def closed(server, step):
    return [r for r in server.store.values() if (r.purpose, r.step) == (Purpose.TRAIN, step) and r.closed]


async def test_the_next_step_is_played_while_this_one_trains(tmp_path):
    server = MemoryServer()

    async def training(step):
        if step < 4:
            await until(lambda: len(closed(server, step + 1)) == 4)

    server.training = training
    report = await go(server, tmp_path, steps=4, overlap=True)
    assert report.steps == 4
    assert [versions(server, step) for step in (1, 2, 3, 4)] == [
        {"policy@0"},
        {"policy@0"},
        {"policy@1"},
        {"policy@2"},
    ]
    assert versions(server, 5) == set()
    rows = [row for row in rows_of(tmp_path) if "step" in row]
    assert [row["staleness/max"] for row in rows] == [0, 1, 1, 1]
    assert [row["stale"] for row in rows] == [0, 0, 0, 0]
    assert all(r.closed and r.fault is None for r in server.store.values())


async def test_without_overlap_nothing_is_played_while_a_step_trains(tmp_path):
    server = MemoryServer()
    opened = {}

    async def training(step):
        for _ in range(100):
            await asyncio.sleep(0)
        opened[step] = server.opened[Purpose.TRAIN, step + 1]

    server.training = training
    await go(server, tmp_path, steps=3)
    assert opened == {1: 0, 2: 0, 3: 0}


async def test_as_many_steps_ahead_as_versions_may_be_stale(tmp_path):
    server = MemoryServer()
    ahead = defaultdict(list)

    async def training(step):
        wanted = min(step + 3, 6)
        await until(lambda: len(closed(server, wanted)) == 4)
        ahead[step] = [other for other in range(step + 1, 9) if server.opened[Purpose.TRAIN, other]]

    server.training = training
    await go(server, tmp_path, steps=6, overlap=True, max_staleness=3)
    assert ahead == {1: [2, 3, 4], 2: [3, 4, 5], 3: [4, 5, 6], 4: [5, 6], 5: [6], 6: []}
    assert [row["staleness/max"] for row in rows_of(tmp_path) if "step" in row] == [0, 1, 2, 3, 3, 3]


async def test_a_slow_rollout_of_one_step_does_not_hold_up_the_next(tmp_path):
    server, slow = MemoryServer(), asyncio.Event()
    first = []

    async def agent(scenario):
        first.append(scenario)
        if len(first) == 1:
            await until(lambda: len(closed(server, 2)) == 4)
            slow.set()
        return {}

    await go(server, tmp_path, agent=agent, overlap=True, held_out=[])
    assert slow.is_set()


async def test_what_was_played_ahead_in_vain_is_closed(tmp_path):
    never = asyncio.Event()
    server = MemoryServer()

    async def agent(scenario):
        if server.opened[Purpose.TRAIN, 3]:
            await never.wait()
        return {}

    async def training(step):
        await until(lambda: server.opened[Purpose.TRAIN, step + 1])

    server.training = training
    report = await go(server, tmp_path, agent=agent, steps=9, overlap=True, target_success=0.9, held_out=[])
    assert (report.steps, report.stopped) == (2, "target")
    assert {r.fault for r in server.store.values() if r.step == 3} == {"interrupted"}
    assert all(r.closed for r in server.store.values())


async def test_trouble_of_a_later_step_ends_the_run_when_it_is_its_turn(tmp_path):
    server = MemoryServer()
    turn = alternating()

    def reward(run):
        if server.opened[Purpose.TRAIN, 2]:
            raise KeyError("gold")
        return turn(run)

    async def training(step):
        await until(lambda: len(closed(server, 2)) == 4)

    server.training = training
    with pytest.raises(RewardError, match="step 2: the reward function failed"):
        # Room for one: the second step's begin when all of the first are done.
        await go(server, tmp_path, reward=reward, overlap=True, held_out=[], concurrency=1)
    assert list(server.trained) == [1]


async def test_a_run_that_was_stopped_uses_what_it_had_played_ahead(tmp_path):
    server = MemoryServer()

    async def training(step):
        await until(lambda: len(closed(server, step + 1)) == 4)
        if step == 2:
            raise asyncio.CancelledError

    server.training = training
    with pytest.raises(asyncio.CancelledError):
        await go(server, tmp_path, steps=4, overlap=True, held_out=[])
    server.training = None
    report = await go(server, tmp_path, steps=4, overlap=True, held_out=[])
    assert report.steps == 4
    assert server.opened[Purpose.TRAIN, 2] == server.opened[Purpose.TRAIN, 3] == 4
    assert versions(server, 3) == {"policy@1"}  # played before version 2 was made, and used
    assert set(server.trained[3]) == {r.id for r in closed(server, 3)}


async def test_what_is_too_old_is_played_again(tmp_path):
    server = MemoryServer()

    async def training(step):
        if step == 1:
            await until(lambda: len(closed(server, 3)) == 4)
            raise asyncio.CancelledError

    server.training = training
    with pytest.raises(asyncio.CancelledError):
        await go(server, tmp_path, steps=3, overlap=True, max_staleness=2, held_out=[])
    server.training = None
    await go(server, tmp_path, steps=3, max_staleness=1, held_out=[])
    assert server.opened[Purpose.TRAIN, 2] == 4  # one version old
    assert server.opened[Purpose.TRAIN, 3] == 8  # two
    assert {server.store[id].version for id in server.trained[3]} == {"policy@2"}


async def test_overlap_needs_room_for_staleness():
    with pytest.raises(ConfigError, match="overlap needs a max_staleness of at least 1"):
        make_config({"overlap": True, "max_staleness": 0})


async def test_dynamic_sampling_goes_on_in_the_step_it_belongs_to(tmp_path):
    server = MemoryServer()
    flat = {"left": 2}

    def reward(run):
        group = json.dumps(run.scenario)
        spread = seen.setdefault(group, len(seen) >= flat["left"])
        counts[group] += 1
        return counts[group] % 2 if spread else 0.0

    seen, counts = {}, defaultdict(int)
    with pytest.raises(NothingToLearnError):
        await go(server, tmp_path, agent=echo, reward=reward, steps=1, overlap=True, dynamic_sampling=2, held_out=[])
    assert server.opened[Purpose.TRAIN, 1] == 8
    assert server.opened[Purpose.TRAIN, 2] == 0
