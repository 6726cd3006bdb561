"""What a run waits for is said when nothing has happened for a while, and only then."""

import asyncio
import itertools

import pytest
from art_backends.errors import ServerError
from art_backends.watchdog import Watchdog, describe

from tests.backends.memory_server import MemoryServer, Notes, alternating, go

DEFAULTS = Watchdog.__init__.__kwdefaults__


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_silence_is_told_with_the_longest_waits_and_less_and_less_often(clock):
    dog = Watchdog(quiet=60, clock=clock)
    with dog.waiting("the agent in rollout a"):
        clock.now = 10
        with dog.waiting("the reward in rollout b"):
            clock.now = 69
            assert dog.overdue() is None  # the second wait was a sign of life
            clock.now = 70
            assert dog.overdue() == [("the agent in rollout a", 70), ("the reward in rollout b", 60)]
            clock.now = 129
            assert dog.overdue() is None
            clock.now = 130
            assert len(dog.overdue()) == 2
            dog.alive()
            clock.now = 189
            assert dog.overdue() is None
        clock.now = 260
        assert dog.overdue() == [("the agent in rollout a", 260)]


async def said(dog, status):
    """The first warning of a watchdog."""
    words = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(dog.watch(words.set_result, status, every=0))
    try:
        async with asyncio.timeout(20):
            return await words
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_server_is_asked_what_it_does(clock):
    async def status():
        return {
            "proxy": {"in_flight": 2, "oldest": [{"rollout": "r7", "seconds": 71.2}, {"rollout": None, "seconds": 3}]},
            "children": [{"name": "worker", "state": "starting", "pid": 12, "restarts": 3}],
            "step_running": 4,
        }

    dog = Watchdog(quiet=60, clock=clock)
    clock.now = 75
    assert await said(dog, status) == (
        "nothing has happened for 75 s. No wait is known; the server: 2 calls in flight (the oldest: 71 s of rollout "
        "r7, 3 s), worker is starting (pid 12, 3 restarts), step 4 is being made"
    )


async def test_a_server_that_does_not_answer_is_told(clock):
    async def status():
        raise ServerError("no answer")

    dog = Watchdog(quiet=60, clock=clock)
    with dog.waiting("the worker to train step 3"):
        clock.now = 60
        words = await said(dog, status)
    assert words.endswith("It waits for the worker to train step 3 (60 s); the server does not say: no answer")


def test_a_status_with_nothing_in_it():
    assert describe({}) == "the server: 0 calls in flight"


@pytest.mark.parametrize("what", ["agent", "reward"])
async def test_a_run_says_which_rollout_it_waits_for(tmp_path, monkeypatch, what):
    monkeypatch.setattr("art_backends.watchdog.Watchdog.__init__.__kwdefaults__", {**DEFAULTS, "quiet": 0.05})
    monkeypatch.setattr("art_backends.watchdog.Watchdog.watch.__kwdefaults__", {"every": 0.01})
    notes, told = Notes(), asyncio.Event()
    warn = notes.warn

    def warned(text):
        warn(text)
        told.set()

    notes.warn = warned
    turn, reward = itertools.count(), alternating()

    async def hang(value):
        if next(turn) == 2:
            await told.wait()
        return value

    async def agent(scenario):
        return await hang({}) if what == "agent" else {}

    async def score(run):
        return await hang(reward(run)) if what == "reward" else reward(run)

    await go(MemoryServer(), tmp_path, agent=agent, reward=score, display=notes, held_out=[], steps=1)
    [line] = [line for line in notes.lines if "nothing has happened" in line][:1]
    assert f"It waits for the {what} in rollout r3 (scenario s" in line
    assert "sample 0)" in line
