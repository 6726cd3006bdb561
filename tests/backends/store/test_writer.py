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
        await aio.begin_call(make_call(f"c{number}", status=CallStatus.OPEN, sequence=number))
        await aio.finish_call(make_call(f"c{number}", sequence=number))

    await asyncio.gather(*(one(number) for number in range(200)))
    assert [call.id for call in await aio.calls("r1")] == [f"c{number}" for number in range(200)]
    assert (await aio.counts())["unfinished"] == 0


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
    own = {name for name in vars(Store) if not name.startswith("_")} - {"open", "close"}
    assert own <= set(vars(AsyncStore))
