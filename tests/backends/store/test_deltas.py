"""Calls stand in the store as what they add: they come back whole, and long rollouts stay small."""

import json
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from art_backends.store import Store
from art_backends.store.database import ConflictError
from art_backends.store.deltas import LOOK, Known, choose
from art_backends.trajectories import Call, CallStatus, Choice, Rollout

TOOLS = [{"type": "function", "function": {"name": f"tool{n}", "description": "what it does " * 9}} for n in range(6)]


def turn(number: int, words: int = 12, seed: int = 0) -> str:
    draw = random.Random(f"{seed}/{number}")
    return " ".join(f"{draw.getrandbits(40):x}" for _ in range(words))


def long_rollout(make_call: Callable[..., Call], turns: int) -> list[Call]:
    """An agent that sends its whole history each turn; every prompt goes on exactly from the answer before."""
    draw = random.Random(7)
    messages: list[dict[str, Any]] = [{"role": "system", "content": turn(-1, 100)}]
    ids = [draw.randrange(50_000) for _ in range(400)]
    calls = []
    for number in range(turns):
        messages = [*messages, {"role": "user", "content": turn(number)}]
        ids = [*ids, *(draw.randrange(50_000) for _ in range(60))]
        sampled = [draw.randrange(50_000) for _ in range(40)]
        answer = {"role": "assistant", "content": turn(number, seed=1)}
        call = make_call(
            f"c{number}",
            sequence=number,
            request={"model": "m", "messages": messages, "tools": TOOLS, "temperature": 0.5},
            prompt_token_ids=ids,
            choices=[Choice(message=answer, token_ids=sampled, logprobs=[-0.5] * 40)],
            continues=f"c{number - 1}" if number else None,
        )
        calls.append(call)
        messages, ids = [*messages, answer], [*ids, *sampled]
    return calls


def write(store: Store, call: Call) -> None:
    """As the recorder does: the intent first, then the outcome."""
    store.begin_call(call.model_copy(update={"status": CallStatus.OPEN, "choices": []}))
    store.finish_call(call)


def content(calls: list[Call]) -> int:
    """Bytes of what is distinct in a rollout: each message and each token once, with ids of 4 bytes and logprobs."""
    messages = {json.dumps(message) for call in calls for message in call.request["messages"]}
    messages |= {json.dumps(choice.message) for call in calls for choice in call.choices}
    last = calls[-1]
    ids = len(last.prompt_token_ids) + len(last.choices[0].token_ids)
    logprobs = sum(len(choice.logprobs) for call in calls for choice in call.choices)
    return sum(map(len, messages)) + len(json.dumps(TOOLS)) + 4 * ids + 4 * logprobs


def test_a_rollout_of_fifty_turns_costs_little_more_than_its_content(
    tmp_path: Path, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    calls = long_rollout(make_call, 50)
    sizes = []
    for count in (0, 40):
        store = Store.open(tmp_path / f"{count}.sqlite")
        for number in range(count):
            store.open_rollout(make_rollout(f"r{number}"))
            for call in calls:
                write(store, call.model_copy(update={"rollout_id": f"r{number}", "id": f"{number}-{call.id}"}))
            assert store.calls(f"r{number}")[-1].prompt_token_ids == calls[-1].prompt_token_ids
        store.close()
        sizes.append((tmp_path / f"{count}.sqlite").stat().st_size)
    each = (sizes[1] - sizes[0]) / 40
    assert each <= 3 * content(calls)
    naive = sum(len(json.dumps(c.request)) + 4 * len(c.prompt_token_ids) for c in calls)
    assert each < naive / 5


@pytest.mark.parametrize("seed", range(8))
def test_any_history_comes_back_as_it_was(
    seed: int, tmp_path: Path, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    """Continued, edited, cut, parallel and repeated calls, with several answers, over restarts of the store."""
    draw = random.Random(seed)
    path = tmp_path / "store.sqlite"
    store = Store.open(path)
    store.open_rollout(make_rollout())
    written: list[Call] = []
    for number in range(40):
        before = draw.choice(written) if written and draw.random() < 0.9 else None
        messages: list[Any] = [] if before is None else list(before.request["messages"])
        ids = [] if before is None else list(before.prompt_token_ids)
        if before is not None and before.choices and draw.random() < 0.8:
            ids += draw.choice(before.choices).token_ids
        if draw.random() < 0.3:
            del messages[draw.randint(0, len(messages)) :]
            del ids[draw.randint(0, len(ids)) :]
        if messages and draw.random() < 0.2:
            messages[draw.randrange(len(messages))] = {"role": "user", "content": draw.choice([1, 1.0, True, "1"])}
        messages += [{"role": "user", "content": turn(number, draw.randint(0, 3))}]
        ids += [draw.randrange(9) for _ in range(draw.randint(0, 5))]
        request: dict[str, Any] = {"messages": messages, "temperature": draw.choice([1, 1.0, True])}
        if draw.random() < 0.7:
            request["tools"] = TOOLS[: draw.randint(1, 3)]
        if draw.random() < 0.1:
            request = {"prompt": "a completion has no messages"}
            messages = []
        call = make_call(
            f"c{number}",
            sequence=number,
            request=request if "messages" in request else {**request, "messages": []},
            prompt_token_ids=ids,
            choices=[
                Choice(index=n, token_ids=[draw.randrange(9) for _ in range(4)], logprobs=[-1.0] * 4)
                for n in range(draw.randint(1, 3))
            ],
            continues=None if before is None else draw.choice([before.id, None]),
        )
        write(store, call)
        written.append(call)
        if draw.random() < 0.15:
            store.close()
            store = Store.open(path)
    found = store.calls("r1")
    assert found == written
    assert [json.dumps(call.request, sort_keys=True) for call in found] == [
        json.dumps(call.request, sort_keys=True) for call in written
    ]  # 1, 1.0 and true are equal in Python, but not in JSON
    store.close()


def test_calls_of_other_rollouts_and_of_none_are_no_base(
    store: Store, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    store.open_rollout(make_rollout("r1"))
    store.open_rollout(make_rollout("r2"))
    for id, rollout in (("a", "r1"), ("b", "r2"), ("c", None), ("d", None)):
        write(store, make_call(id, rollout_id=rollout))
    with sqlite3.connect(store.path) as connection:
        assert [row[0] for row in connection.execute("SELECT base FROM calls")] == [None] * 4
    connection.close()


def test_what_others_stand_on_cannot_change(
    store: Store, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    store.open_rollout(make_rollout())
    one, two = long_rollout(make_call, 2)
    write(store, one)
    write(store, two)
    store.finish_call(one)  # the same again
    store.finish_call(one.model_copy(update={"excluded": "retry"}))
    for change in (
        {"prompt_token_ids": one.prompt_token_ids[:-1]},
        {"choices": [Choice(token_ids=[1], logprobs=[-1.0])]},
        {"request": {**one.request, "temperature": 0.7}},
    ):
        with pytest.raises(ConflictError, match="written again with other tokens or messages"):
            store.finish_call(one.model_copy(update=change))
    assert store.calls("r1") == [one.model_copy(update={"excluded": "retry"}), two]


def test_a_call_that_others_began_beside_can_still_end(
    store: Store, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]
) -> None:
    """Parallel calls: the second stands on the first while that is open; both end later, in either order."""
    store.open_rollout(make_rollout())
    one, two = make_call("one"), make_call("two", sequence=1)
    for call in (one, two):  # an intent has no tokens where the engine renders the prompt
        store.begin_call(call.model_copy(update={"status": CallStatus.OPEN, "choices": [], "prompt_token_ids": []}))
    store.finish_call(two)
    store.finish_call(one)
    assert store.calls("r1") == [one, two]


def test_a_write_that_fails_leaves_nothing_to_stand_on(
    store: Store, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.open_rollout(make_rollout())
    one, two = long_rollout(make_call, 2)
    with monkeypatch.context() as patch:
        patch.setattr("art_backends.store.rows.pack_floats", lambda _: 1 / 0)
        store.begin_call(one.model_copy(update={"status": CallStatus.OPEN, "choices": []}))
        with pytest.raises(ZeroDivisionError):
            store.finish_call(one)
    write(store, two)
    store.finish_call(one)
    assert store.calls("r1") == [one, two]


def test_the_call_that_is_continued_is_tried_however_long_ago_it_was() -> None:
    earlier = [Known(n, f"c{n}", [n, 5, 6], [[7, 8]], [], {}) for n in range(LOOK + 5)]
    call = Known(99, "new", [0, 5, 6, 7, 8, 9], [], [], {})
    assert (choose(call, earlier, "c0").base, choose(call, earlier, "c0").ids) == (0, 5)
    assert choose(call, earlier, None).ids == 0
    assert choose(Known(0, "c0", [0, 5, 6], [], [], {}), earlier, None).base is None  # never on a later one
