"""The recorder against the real store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from art_backends.config import Limits
from art_backends.proxy.identity import RolloutContext
from art_backends.proxy.limits import Counters
from art_backends.proxy.recorder import Recorder, Recording
from art_backends.store import AsyncStore
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Node, Rollout, Sampling

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[AsyncStore]:
    opened = await AsyncStore.open(tmp_path / "store.sqlite")
    for name in ("r1", "r2", "r3"):
        await opened.open_rollout(Rollout(id=name, policy="p", version="p@1", opened=1.0))
    yield opened
    await opened.aclose()


def context(name: str = "r1") -> RolloutContext:
    return RolloutContext(name, "p", "p@1")


def recorder(store: Any, **limits: int) -> Recorder:
    return Recorder(store, Limits(**limits), Counters())


async def begin(to: Recorder, where: RolloutContext, retry: int = 0, **changes: Any) -> Recording:
    given: dict[str, Any] = {"request": BODY, "model": "m", "node": Node(), "retry": retry, "sampling": Sampling()}
    return await to.begin(where, **{**given, **changes})


async def finish(to: Recorder, recording: Recording, text: str = "y", **changes: Any) -> None:
    choice = Choice(
        message={"role": "assistant", "content": text}, finish_reason="stop", token_ids=[2], logprobs=[-1.0]
    )
    facts = {"choices": [choice], "capture": CaptureLevel.TOKENS, "prompt_token_ids": [1]}
    await to.finish(recording, CallStatus.OK, **{**facts, **changes})
    to.end(recording)


async def test_intent_then_outcome(store: AsyncStore) -> None:
    to = recorder(store)
    recording = await begin(to, context())
    (call,) = await store.calls("r1")
    assert (call.status, call.request, call.version) == (CallStatus.OPEN, BODY, "p@1")
    await finish(to, recording)
    (call,) = await store.calls("r1")
    assert (call.status, call.choices[0].token_ids, call.excluded) == (CallStatus.OK, [2], None)
    assert call.finished is not None


async def test_sequence_and_index_go_on_after_a_restart(store: AsyncStore) -> None:
    first = recorder(store)
    await finish(first, await begin(first, context()))
    await begin(first, context())  # its outcome is never written: the process was killed
    second = recorder(store)
    recording = await begin(second, context())
    assert recording.call.sequence == 2
    asked = {
        **BODY,
        "messages": [*BODY["messages"], {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}],
    }
    match = second.index(recording).match(asked)
    assert match is not None
    assert match.call.sequence == 0


async def test_parallel_calls_get_their_own_places(store: AsyncStore) -> None:
    to = recorder(store)
    recordings = await asyncio.gather(*(begin(to, context()) for _ in range(20)))
    assert [item.call.sequence for item in recordings] == list(range(20))
    await asyncio.gather(*(finish(to, item) for item in recordings))
    assert [call.excluded for call in await store.calls("r1")] == [None] * 20


async def test_a_retry_replaces_the_last_unused_answer(store: AsyncStore) -> None:
    to = recorder(store)
    used, lost, other = (
        await begin(to, context()),
        await begin(to, context()),
        await begin(to, context(), request={"x": 1}),
    )
    for item in (used, lost, other):
        await finish(to, item)
    to.continued(lost, used.call.id)
    await finish(to, await begin(to, context(), retry=1))
    assert [call.excluded for call in await store.calls("r1")] == [None, "retry", None, None]
    await finish(to, await begin(to, context(), retry=2))  # replaces the first retry
    assert [call.excluded for call in await store.calls("r1")] == [None, "retry", None, "retry", None]


async def test_a_retry_of_a_call_in_flight(store: AsyncStore) -> None:
    to = recorder(store)
    slow = await begin(to, context())
    again = await begin(to, context(), retry=1)
    await finish(to, again)
    await finish(to, slow)
    assert [call.excluded for call in await store.calls("r1")] == ["retry", None]


async def test_a_retry_of_a_refused_request_replaces_nothing(store: AsyncStore) -> None:
    to = recorder(store)
    await finish(to, await begin(to, context()))
    to.refused(context(), request=BODY, node=Node(), retry=0)
    await finish(to, await begin(to, context(), retry=1))
    assert [call.excluded for call in await store.calls("r1")] == [None, None]


async def test_retries_are_told_apart_by_run(store: AsyncStore) -> None:
    to = recorder(store)
    for run in ("a", "b"):
        await finish(to, await begin(to, context(), node=Node(run_id=run)))
    await finish(to, await begin(to, context(), retry=1, node=Node(run_id="a")))
    assert [call.excluded for call in await store.calls("r1")] == ["retry", None, None]


@pytest.mark.parametrize(
    ("status", "changes", "expected"),
    [
        (CallStatus.ERROR, {}, "error"),
        (CallStatus.CANCELLED, {}, "cancelled"),
        (CallStatus.OK, {"sampling": Sampling(constrained=True)}, "constrained"),
        (CallStatus.OK, {"choices": [Choice(finish_reason="abort")]}, "abort"),
        (CallStatus.OK, {"excluded": "unreadable"}, "unreadable"),
        (CallStatus.OK, {}, None),
    ],
)
async def test_why_a_call_does_not_train(store: AsyncStore, status: CallStatus, changes: Any, expected: Any) -> None:
    to = recorder(store)
    recording = await begin(to, context())
    await to.finish(recording, status, **changes)
    assert (await store.calls("r1"))[0].excluded == expected


async def test_an_answer_that_did_not_arrive_is_cancelled_after_all(store: AsyncStore) -> None:
    to = recorder(store)
    recording = await begin(to, context())
    await to.finish(recording, CallStatus.OK)
    await to.finish(recording, CallStatus.CANCELLED)
    assert (await store.calls("r1"))[0].excluded == "cancelled"


async def test_a_rollout_that_closes_meanwhile(store: AsyncStore) -> None:
    to, where = recorder(store), context()
    recording = await begin(to, where)
    where.closed = True
    await store.close_rollout("r1", reward=1.0)
    to.forget("r1")
    await finish(to, recording)
    assert (await store.calls("r1"))[0].excluded == "rollout_closed"
    # closed between identification and intent: served, and no capture is lost
    late = await begin(to, where)
    await finish(to, late)
    assert len(await store.calls("r1")) == 1
    assert where.capture_lost == 0


async def test_memory_is_bounded(store: AsyncStore) -> None:
    to = recorder(store, rollouts=2, calls_per_rollout=4)
    for name in ("r1", "r2", "r3"):
        for _ in range(9):
            await finish(to, await begin(to, context(name)))
    assert set(to._rollouts) == {"r2", "r3"}
    assert len(to._rollouts["r3"].kept) <= 4
    assert len(to._rollouts["r3"].seen) <= 4
    held = await begin(to, context("r2"))
    for name in ("r1", "r3"):  # one in flight is never dropped
        await finish(to, await begin(to, context(name)))
    assert "r2" in to._rollouts
    await finish(to, held)
    assert [call.sequence for call in await store.calls("r1")] == list(range(10))


class Broken:
    def begin_call(self, call: Call) -> None:
        pass

    async def finish_call(self, call: Call) -> None:
        raise OSError(28, "no space left on device")

    async def calls(self, rollout_id: str) -> list[Call]:
        raise OSError(5, "input/output error")


async def test_a_broken_store_is_counted_and_marked_never_raised() -> None:
    to, where = recorder(Broken()), context()
    recording = await begin(to, where)
    await finish(to, recording)
    assert where.capture_lost == 2  # the earlier calls and the outcome


def node(task: str, run: str | None) -> Node:
    return Node(name="agent", checkpoint_ns=f"agent:{task}", task_id=task, node_run_id=run)


async def test_a_node_that_is_run_again_voids_the_calls_of_its_earlier_run(store: AsyncStore) -> None:
    to = recorder(store)
    for at in (node("t1", "first"), node("t1", "first"), node("t2", "other"), node("t1", None), Node()):
        await finish(to, await begin(to, context(), node=at))
    in_flight = await begin(to, context(), node=node("t1", "first"))
    await finish(to, await begin(to, context(), node=node("t1", "again")))
    await finish(to, await begin(to, context(), node=node("t1", "again")))
    await finish(to, in_flight)
    found = [call.excluded for call in await store.calls("r1")]
    assert found == ["rerun", "rerun", None, None, None, "rerun", None, None]
    after = recorder(store)  # a restart knows it, too
    await finish(after, await begin(after, context(), node=node("t1", "third")))
    found = [call.excluded for call in await store.calls("r1")]
    assert found == ["rerun", "rerun", None, None, None, "rerun", "rerun", "rerun", None]
    assert (to._counters.reruns, after._counters.reruns) == (3, 2)
