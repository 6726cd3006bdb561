"""The store keeps exactly what it was given, once, and answers filters without ever building SQL from values."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from art_backends.errors import StoreError
from art_backends.store import ConflictError, NotFoundError, Store
from art_backends.trajectories import Call, CallStatus, Purpose, Rollout, RolloutError

Make = Callable[..., Rollout]
MakeCall = Callable[..., Call]
HOSTILE = ["'; DROP TABLE rollouts; --", '" OR 1=1 --', "%", "\x00", "policy' OR '1'='1", "😀" * 50]


def test_a_call_comes_back_as_it_was_given(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    store.open_rollout(make_rollout())
    call = make_call()
    store.begin_call(call.model_copy(update={"status": CallStatus.OPEN, "choices": [], "prompt_token_ids": []}))
    assert store.calls("r1")[0].status is CallStatus.OPEN
    store.finish_call(call)
    store.finish_call(call)
    assert store.calls("r1") == [call]
    found = store.rollout("r1")
    assert found is not None
    assert found.calls == [call]


def test_logprobs_are_kept_as_float32(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    store.open_rollout(make_rollout())
    choice = make_call().choices[0].model_copy(update={"logprobs": [-1.1, -0.3]})
    store.finish_call(make_call(choices=[choice]))
    assert store.calls("r1")[0].choices[0].logprobs == pytest.approx([-1.1, -0.3], rel=6e-8)


def test_data_that_utf8_or_64_bits_cannot_hold(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    scenario = {"lone": "\ud800", "big": 10**30, "nested": [None, True, 1.5]}
    store.open_rollout(make_rollout(scenario=scenario))
    store.finish_call(make_call(request={"messages": [{"content": "\udfff"}]}))
    found = store.rollout("r1")
    assert found is not None
    assert found.scenario == scenario
    assert found.calls[0].request == {"messages": [{"content": "\udfff"}]}


def test_closing_is_idempotent_for_equal_content_only(store: Store, make_rollout: Make) -> None:
    store.open_rollout(make_rollout())
    error = RolloutError(type="ValueError", message="no")
    outcome = {"output": {"answer": 4}, "reward": 0.5, "metrics": {"success": 1.0}, "error": error}
    first = store.close_rollout("r1", **outcome)
    assert (first.closed, first.reward, first.error, first.output) == (True, 0.5, error, {"answer": 4})
    assert store.close_rollout("r1", **outcome) == first
    with pytest.raises(ConflictError, match=r"closed already with another outcome \(reward 0.5\)"):
        store.close_rollout("r1", **{**outcome, "reward": 0.6})
    with pytest.raises(NotFoundError, match="no rollout 'r9'"):
        store.close_rollout("r9", reward=1.0)
    assert store.rollouts()[0] == first
    assert first.scored_by is None


def test_which_reward_scored_it_is_part_of_the_outcome(store: Store, make_rollout: Make) -> None:
    store.open_rollout(make_rollout())
    store.close_rollout("r1", reward=0.5, scored_by="mine:score#1")
    assert store.rollouts()[0].scored_by == "mine:score#1"
    with pytest.raises(ConflictError):
        store.close_rollout("r1", reward=0.5, scored_by="mine:score#2")


def test_an_id_is_taken_once(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    store.open_rollout(make_rollout(), token_digest="d1")
    with pytest.raises(ConflictError):
        store.open_rollout(make_rollout(), token_digest="d2")
    assert store.find_token("d2") is None, "the token of a refused rollout was kept"
    store.begin_call(make_call(status=CallStatus.OPEN))
    with pytest.raises(ConflictError, match="has begun already"):
        store.begin_call(make_call(status=CallStatus.OPEN))


def test_what_a_closed_rollout_trains_never_changes(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    store.open_rollout(make_rollout())
    store.finish_call(make_call("c1"))
    store.begin_call(make_call("c2", status=CallStatus.OPEN, choices=[], sequence=1))
    store.close_rollout("r1", reward=1.0)
    with pytest.raises(ConflictError, match="rollout r1 is closed"):
        store.begin_call(make_call("c3", status=CallStatus.OPEN))
    store.finish_call(make_call("c2", sequence=1))
    store.finish_call(make_call("c1", excluded="retry"))
    first, second = store.calls("r1")
    assert first == make_call("c1")
    assert (second.status, second.excluded) == (CallStatus.OK, "late")


def test_rollouts_left_open_are_closed_by_time(store: Store, make_rollout: Make) -> None:
    store.open_rollout(make_rollout("old", opened=5.0))
    store.open_rollout(make_rollout("new", opened=15.0))
    store.open_rollout(make_rollout("done", opened=5.0))
    store.close_rollout("done", reward=1.0)
    assert store.close_open_rollouts(fault="interrupted", opened_before=10.0) == ["old"]
    assert [(r.id, r.closed, r.fault) for r in store.rollouts()] == [
        ("old", True, "interrupted"),
        ("new", False, None),
        ("done", True, None),
    ]


def test_filters_and_pages(store: Store, make_rollout: Make) -> None:
    for number in range(10):
        purpose = Purpose.EVAL if number % 2 else Purpose.TRAIN
        group = f"g{number // 4}"
        store.open_rollout(make_rollout(f"r{number}", step=number // 5, purpose=purpose, group=group))
    store.close_rollout("r3", reward=1.0)
    ids = [rollout.id for rollout in store.rollouts(step=0, purpose=Purpose.TRAIN)]
    assert ids == ["r0", "r2", "r4"]
    assert [r.id for r in store.rollouts(closed=True)] == ["r3"]
    assert [r.id for r in store.rollouts(group="g2")] == ["r8", "r9"]
    page = [r.id for r in store.rollouts(limit=4)]
    assert page + [r.id for r in store.rollouts(limit=100, after=page[-1])] == [f"r{n}" for n in range(10)]
    assert store.rollouts(after="unknown") == []
    assert store.rollouts(policy="other") == []


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_are_only_values(store: Store, make_rollout: Make, make_call: MakeCall, value: str) -> None:
    store.open_rollout(make_rollout())
    store.open_rollout(make_rollout(value, group=value, scenario_id=value, policy=value), token_digest=value)
    store.finish_call(make_call(value, rollout_id=value, excluded=value, version=value))
    assert [r.id for r in store.rollouts(group=value, policy=value)] == [value]
    assert [c.id for c in store.calls(value)] == [value]
    assert [r.id for r in store.rollouts_by_id([value, "nobody", "r1"])] == sorted([value, "r1"])
    assert store.counts()["open"] == 2
    assert (store.find_token(value) or pytest.fail("lost")).rollout_id == value
    with pytest.raises(ValueError, match="not a valid Purpose"):
        store.rollouts(purpose="train' OR 1=1")
    with pytest.raises(TypeError):
        store.rollouts(**{"id = id; --": value})


def test_rollouts_by_id_come_in_order_of_id_with_calls(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    for number in (3, 1, 2):
        store.open_rollout(make_rollout(f"r{number}"))
        store.finish_call(make_call(f"c{number}b", rollout_id=f"r{number}", sequence=1))
        store.finish_call(make_call(f"c{number}a", rollout_id=f"r{number}", sequence=0))
    found = store.rollouts_by_id(["r3", "r1", "r2", "r1"])
    assert [(r.id, [c.id for c in r.calls]) for r in found] == [
        ("r1", ["c1a", "c1b"]),
        ("r2", ["c2a", "c2b"]),
        ("r3", ["c3a", "c3b"]),
    ]


def test_by_the_beginning_of_the_id(store: Store, make_rollout: Make) -> None:
    ids = ["ab1", "ab2", "aB3", "a_4", "a%5", "b6", "a\U0010ffff7"]
    for number in ids:
        store.open_rollout(make_rollout(number))

    def found(prefix: str, **more: object) -> list[str]:
        return [rollout.id for rollout in store.rollouts(prefix=prefix, **more)]

    assert found("ab") == ["ab1", "ab2"]
    assert found("ab2") == ["ab2"]
    assert found("a_") == ["a_4"]
    assert found("a%") == ["a%5"]
    assert found("ab", limit=1) == ["ab1"]
    assert found("ab", step=2) == []
    for hostile in HOSTILE:
        assert found(hostile) == []
    with store._database.read() as connection:
        plan = connection.execute("EXPLAIN QUERY PLAN SELECT * FROM rollouts WHERE id >= ? AND id < ?", ("a", "b"))
        assert "USING INDEX" in plan.fetchone()[3], "not every rollout is looked at"


def test_the_newest(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    for number in range(5):
        store.open_rollout(make_rollout(f"r{number}", step=number % 2))
        store.finish_call(make_call(f"c{number}", rollout_id=f"r{number}"))
    assert [rollout.id for rollout in store.rollouts(newest=True, limit=2)] == ["r3", "r4"]
    found = store.rollouts(newest=True, limit=2, step=0, with_calls=True)
    assert [(rollout.id, rollout.calls[0].id) for rollout in found] == [("r2", "c2"), ("r4", "c4")]


def test_steps_are_recorded_once_with_what_was_trained(store: Store) -> None:
    item = {"call": "c1", "choice": 0, "trained": 3, "advantage": -0.5, "excluded": None}
    outcome = {"kind": "committed", "version": 1, "metrics": {"loss": 0.1}, "tokens": {"r1": [item], "r2": []}}
    store.record_step("policy", 1, outcome)
    store.record_step("policy", 1, {"kind": "skipped", "version": 0, "tokens": {"r9": [item]}})
    store.record_step("policy", 2, {"kind": "skipped", "version": 1, "reason": "no_spread"})
    assert store.step("policy", 1) == outcome
    assert store.step("policy", 3) is None
    assert [(s["step"], s["kind"]) for s in store.steps("policy")] == [(1, "committed"), (2, "skipped")]
    assert store.trained("r1") == [{"policy": "policy", "step": 1, "calls": [item]}]
    assert store.trained("r9") == []
    assert store.drop_steps("policy", from_step=1) == 2
    assert (store.steps("policy"), store.trained("r1")) == ([], [])


def test_tokens(store: Store) -> None:
    store.add_token("admin", "a1")
    store.add_token("admin", "a2")
    store.add_token("rollout", "x", rollout_id="r1", policy="policy")
    found = store.find_token("x")
    assert found is not None
    assert (found.kind, found.rollout_id, found.policy) == ("rollout", "r1", "policy")
    store.drop_tokens("admin", keep=["a2"])
    assert store.find_token("a1") is None
    assert store.find_token("a2") is not None
    assert store.find_token("x") is not None


def test_counts(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    assert set(store.counts().values()) == {0}
    store.open_rollout(make_rollout())
    store.open_rollout(make_rollout("r2"))
    store.finish_call(make_call("c1", drifted=True))
    store.finish_call(make_call("c2", status=CallStatus.ERROR, excluded="error"))
    store.begin_call(make_call("c3", status=CallStatus.OPEN))
    store.close_rollout("r1", fault="engine")
    expected = {"open": 1, "closed": 1, "faulty": 1, "calls": 3, "excluded": 1, "drifted": 1}
    assert store.counts() == {**expected, "errors": 1, "unfinished": 1}


def test_many_threads_at_once(store: Store, make_rollout: Make, make_call: MakeCall) -> None:
    store.open_rollout(make_rollout())

    def work(number: int) -> int:
        store.begin_call(make_call(f"c{number}", status=CallStatus.OPEN, sequence=number))
        store.finish_call(make_call(f"c{number}", sequence=number))
        return len(store.calls("r1"))

    with ThreadPoolExecutor(16) as pool:
        assert all(count >= 1 for count in pool.map(work, range(100)))
    assert [call.sequence for call in store.calls("r1")] == list(range(100))


def test_a_closed_store_says_so(store: Store, make_rollout: Make) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="the store is closed"):
        store.open_rollout(make_rollout())
    with pytest.raises(StoreError, match="the store is closed"):
        store.rollouts()
