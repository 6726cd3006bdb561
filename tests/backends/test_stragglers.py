"""The last rollouts of a group get no more than their share of time, and only if the others are done."""

import asyncio
import itertools

import pytest
from art_backends.stragglers import LateError, Stragglers

from tests.backends.memory_server import MemoryServer, go


async def run(stragglers, group, work):
    async with stragglers.limited(group):
        return await work


@pytest.fixture
def never():
    return asyncio.Event()


async def test_the_last_quarter_is_ended(never):
    stragglers = Stragglers(0.05, ["g"] * 8)
    slow = [asyncio.ensure_future(run(stragglers, "g", never.wait())) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in range(6):
        await run(stragglers, "g", asyncio.sleep(0))
    results = await asyncio.gather(*slow, return_exceptions=True)
    assert [type(result) for result in results] == [LateError, LateError]
    assert "0.05 s longer than the slowest of the others" in str(results[0])


async def test_more_than_a_quarter_may_take_what_they_need(never):
    stragglers = Stragglers(0.01, ["g"] * 8)
    slow = [asyncio.ensure_future(run(stragglers, "g", never.wait())) for _ in range(3)]
    for _ in range(5):
        await run(stragglers, "g", asyncio.sleep(0))
    done, _ = await asyncio.wait(slow, timeout=0.1)
    assert not done
    never.set()
    assert await asyncio.gather(*slow) == [True] * 3


async def test_another_group_is_another_matter(never):
    stragglers = Stragglers(0.01, ["a", "a", "b", "b"])
    slow = asyncio.ensure_future(run(stragglers, "b", never.wait()))
    await run(stragglers, "a", asyncio.sleep(0))
    done, _ = await asyncio.wait([slow], timeout=0.1)
    assert not done
    never.set()
    assert await slow


async def test_without_a_limit_nobody_is_late(never):
    stragglers = Stragglers(None, ["g", "g"])
    slow = asyncio.ensure_future(run(stragglers, "g", never.wait()))
    await run(stragglers, "g", asyncio.sleep(0))
    done, _ = await asyncio.wait([slow], timeout=0.05)
    assert not done
    never.set()
    assert await slow


async def test_one_that_began_late_has_as_much_time(never):
    stragglers = Stragglers(0.05, ["g", "g"])
    await run(stragglers, "g", asyncio.wait([asyncio.ensure_future(never.wait())], timeout=0.3))
    assert await run(stragglers, "g", asyncio.wait([asyncio.ensure_future(never.wait())], timeout=0.1))
    stragglers = Stragglers(0.05, ["g", "g"])
    await run(stragglers, "g", asyncio.sleep(0))
    with pytest.raises(LateError):
        await run(stragglers, "g", never.wait())


async def test_a_timeout_of_the_work_itself_is_its_own():
    stragglers = Stragglers(5, ["g", "g"])

    async def work():
        raise TimeoutError("a tool's")

    with pytest.raises(TimeoutError, match="a tool's") as caught:
        await run(stragglers, "g", work())
    assert not isinstance(caught.value, LateError)


async def test_in_a_run_the_late_one_is_left_out_and_counted(tmp_path, never):
    server, turn = MemoryServer(), itertools.count()

    async def agent(scenario):
        if next(turn) == 0:
            await never.wait()
        return {}

    report = await go(server, tmp_path, agent=agent, held_out=[], steps=1, straggler_timeout=0.05, group_size=4)
    [late] = [r for r in server.store.values() if r.fault]
    assert late.fault == ("late: it took 0.05 s longer than the slowest of the others (straggler_timeout)")
    assert (report.rollouts, report.faults, len(server.trained[1])) == (8, 1, 7)
    assert late.id not in server.trained[1]
