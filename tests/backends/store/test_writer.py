"""The awaitable store: order kept, nothing lost by a cancelled caller, the loop never blocked."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from art_backends.store import AsyncStore, ConflictError, Store
from art_backends.trajectories import Call, CallStatus, Rollout


@pytest.fixture
async def aio(tmp_path: Path) -> AsyncIterator[AsyncStore]:
    store = await AsyncStore.open(tmp_path / "async.sqlite")
    yield store
    await store.aclose()


async def test_many_at_once_keep_their_order(
    aio: AsyncStore, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    await aio.open_rollout(make_rollout())

    async def one(number: int) -> None:
        aio.begin_call(make_call(f"c{number}", status=CallStatus.OPEN, sequence=number))
        await aio.finish_call(make_call(f"c{number}", sequence=number))

    await asyncio.gather(*(one(number) for number in range(200)))
    assert [call.id for call in await aio.calls("r1")] == [f"c{number}" for number in range(200)]
    assert (await aio.counts())["unfinished"] == 0


async def test_an_intent_is_written_before_anything_is_read(
    aio: AsyncStore, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    await aio.open_rollout(make_rollout())
    aio.begin_call(make_call("c1", status=CallStatus.OPEN))
    assert [(call.id, call.status) for call in await aio.calls("r1")] == [("c1", CallStatus.OPEN)]
    aio.begin_call(make_call("c2", status=CallStatus.OPEN, sequence=1))
    await aio.close_rollout("r1", reward=1.0)  # a write that comes after it, too
    assert [call.id for call in await aio.calls("r1")] == ["c1", "c2"]


async def test_an_intent_that_nothing_follows_is_written_soon(
    tmp_path: Path, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    store = await AsyncStore.open(tmp_path / "soon.sqlite")
    await store.open_rollout(make_rollout())
    store.begin_call(make_call("c1", status=CallStatus.OPEN))
    other = Store.open(tmp_path / "soon.sqlite")
    async with asyncio.timeout(10):
        while not other.calls("r1"):  # noqa: ASYNC110 - another process would look like this
            await asyncio.sleep(0)
    other.close()
    await store.aclose()


async def test_a_write_that_is_wrong_does_not_touch_those_beside_it(
    aio: AsyncStore, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    await aio.open_rollout(make_rollout())
    await aio.open_rollout(make_rollout("r2"))
    calls = [make_call(f"c{n}", sequence=n) for n in range(20)]
    calls[7] = make_call("c7", sequence=7, request={"messages": object()})
    calls[11] = make_call("c11", rollout_id="unknown")
    found = await asyncio.gather(*(aio.finish_call(call) for call in calls), return_exceptions=True)
    assert [n for n, one in enumerate(found) if one is not None] == [7, 11]
    assert isinstance(found[7], TypeError)
    assert isinstance(found[11], ConflictError)
    assert [call.id for call in await aio.calls("r1")] == [f"c{n}" for n in range(20) if n not in (7, 11)]
    await aio.finish_call(make_call("d1", rollout_id="r2"))
    assert len(await aio.calls("r2")) == 1


async def test_a_cancelled_caller_loses_nothing(
    tmp_path: Path, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    store = await AsyncStore.open(tmp_path / "cancelled.sqlite")
    await store.open_rollout(make_rollout())
    tasks = [asyncio.create_task(store.finish_call(make_call(f"c{n}", sequence=n))) for n in range(50)]
    await asyncio.sleep(0)  # each has asked
    for task in tasks:
        task.cancel()
    assert all(isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*tasks, return_exceptions=True))
    await store.aclose()
    reopened = Store.open(tmp_path / "cancelled.sqlite")
    assert len(reopened.calls("r1")) == 50
    reopened.close()


async def test_errors_reach_the_caller(aio: AsyncStore, make_rollout: Callable[..., Rollout]) -> None:
    await aio.open_rollout(make_rollout())
    with pytest.raises(ConflictError):
        await aio.open_rollout(make_rollout())


async def test_it_has_every_method_of_the_store() -> None:
    own = {name for name in vars(Store) if not name.startswith("_")} - {"open", "close", "write_calls"}
    assert own <= set(vars(AsyncStore))
