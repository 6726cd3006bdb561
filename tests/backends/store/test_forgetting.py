"""Deleting rollouts: what goes, what stays, and that nothing of it is left in the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from art_backends.errors import StoreError
from art_backends.store import Store, forgetting, subject_digest
from art_backends.trajectories import Call, Rollout

WHO = "somebody"


@pytest.fixture
def filled(store: Store, make_rollout: Callable[..., Rollout], make_call: Callable[..., Call]) -> Store:
    """Rollouts r1 (about WHO, trained), r2 (about WHO, open), r3 (about nobody), each with two calls."""
    for number, about in ((1, WHO), (2, WHO), (3, None)):
        name = f"r{number}"
        subject = None if about is None else subject_digest(about)
        store.open_rollout(make_rollout(name, subject=subject), f"digest-{number}")
        history = [{"role": "user", "content": f"matter {number}"}]
        first = make_call(f"{name}a", rollout_id=name, request={"messages": history})
        longer = [*history, first.choices[0].message, {"role": "user", "content": "go on"}]
        ids = [*first.prompt_token_ids, *first.choices[0].token_ids, 9]
        second = make_call(
            f"{name}b", rollout_id=name, request={"messages": longer}, prompt_token_ids=ids, continues=first.id
        )
        for call in (first, second):
            store.begin_call(call)
            store.finish_call(call)
    store.close_rollout("r1", reward=1.0)
    store.close_rollout("r3", reward=0.0)
    tokens: dict[str, list[dict[str, Any]]] = {"r1": [{"call": "r1a"}], "r3": []}
    store.record_step("policy", 1, {"kind": "committed", "version": 4, "tokens": tokens})
    return store


def test_closed_rollouts_about_a_subject_go_with_all_that_is_theirs(filled: Store) -> None:
    gone = filled.forget(subject=WHO)
    assert gone == forgetting.Forgotten(("r1",), ("s1",), 2, ("policy@4",))
    assert filled.rollout("r1") is None
    assert filled.calls("r1") == []
    assert filled.trained("r1") == []
    assert filled.find_token("digest-1") is None
    assert filled.find_token("digest-3") is not None
    assert [call.id for call in filled.calls("r3")] == ["r3a", "r3b"]
    assert filled.rollout("r2") is not None, "open ones are their holder's"
    assert filled.forget(subject=WHO) == forgetting.Forgotten()


def test_nothing_of_them_is_left_in_the_file(filled: Store) -> None:
    filled.forget(subject=WHO)
    files = sorted(filled.path.parent.glob("store.sqlite*"))
    assert not any(b"r1a" in file.read_bytes() for file in files)
    assert any(b"r3a" in file.read_bytes() for file in files)


def test_by_name_and_by_age(filled: Store) -> None:
    assert filled.forget(rollout_ids=["r3", "r2", "unknown"]).rollouts == ("r3",)
    assert filled.forget_before(0.0).rollouts == ()
    assert filled.forget_before(1e12).rollouts == ("r1",), "r2 is open"
    assert filled.counts()["calls"] == 2


def test_many_at_once(store: Store, make_rollout: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forgetting, "BY_AGE", 70)
    monkeypatch.setattr("art_backends.store.rows.BATCH", 30)
    for number in range(100):
        store.open_rollout(make_rollout(f"r{number}"))
        store.close_rollout(f"r{number}", reward=0.0)
    assert len(store.forget_before(1e12).rollouts) == 70
    assert len(store.forget_before(1e12).rollouts) == 30


def test_who_reads_meanwhile_keeps_the_log_and_that_is_told(filled: Store) -> None:
    filled._database._writer.execute("PRAGMA busy_timeout = 50")
    other = Store.open(filled.path)
    try:
        with other._database.read() as connection:
            connection.execute("SELECT count(*) FROM calls").fetchone()
            with pytest.raises(StoreError, match=r"deleted, but .* ask again"):
                filled.forget(subject=WHO)
    finally:
        other.close()
    assert filled.forget(subject=WHO) == forgetting.Forgotten()
    assert not any(b"r1a" in file.read_bytes() for file in Path(filled.path.parent).glob("store.sqlite*"))
