"""The gate while the engine rests: nobody is inside, nobody is refused, those outside come in afterwards."""

import asyncio
from contextlib import suppress

import pytest
from art_backends.config import Limits
from art_backends.proxy.limits import Counters, Gate, Overloaded


async def turns(count: int = 10) -> None:
    """Let everything run that can."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_closed_begins_when_all_have_left_and_those_who_queued_had_their_turn():
    gate = Gate(Limits(concurrency=1, queue=5), Counters())
    leave, reopen, order = asyncio.Event(), asyncio.Event(), []

    async def call(name: str) -> None:
        async with gate:
            order.append(name)
            await leave.wait()

    async def rest() -> None:
        async with gate.closed():
            order.append("closed")
            assert (gate.inside, gate.waiting) == (0, 0)
            await reopen.wait()
            order.append("open")

    async with asyncio.timeout(30):
        early = [asyncio.create_task(call("inside")), asyncio.create_task(call("queued"))]
        await turns()
        resting = asyncio.create_task(rest())
        await turns()
        late = [asyncio.create_task(call(f"late {number}")) for number in range(20)]  # more than the queue holds
        await turns()
        assert order == ["inside"]
        leave.set()
        await asyncio.gather(*early)
        await turns()
        assert order == ["inside", "queued", "closed"]
        reopen.set()
        ended = await asyncio.gather(resting, *late, return_exceptions=True)
    assert order[:4] == ["inside", "queued", "closed", "open"]
    assert {type(one) for one in ended} <= {type(None), Overloaded}, "with one place and a queue of 5 some are too many"
    assert len(order) >= 4 + 6


async def test_given_up_it_opens_again():
    gate = Gate(Limits(), Counters())
    await gate.__aenter__()
    resting = asyncio.create_task(gate.closed().__aenter__())
    await turns()
    resting.cancel()
    with suppress(asyncio.CancelledError):
        await resting
    async with asyncio.timeout(30), gate:
        assert gate.inside == 2


async def test_a_server_that_stops_refuses_those_who_waited_outside():
    gate = Gate(Limits(), Counters())
    async with gate.closed():
        waiting = asyncio.create_task(gate.__aenter__())
        await turns()
        assert await gate.drain(1)
    with pytest.raises(Overloaded, match="the server is stopping"):
        await waiting
