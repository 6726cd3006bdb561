"""A store on disk, and calls and rollouts to fill it with."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from art_backends.store import Store
from art_backends.trajectories import Call, CallStatus, CaptureLevel, Choice, Node, Rollout, Sampling


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "store.sqlite")
    yield opened
    opened.close()


@pytest.fixture
def make_rollout() -> Callable[..., Rollout]:
    def make(id: str = "r1", **changes: Any) -> Rollout:
        facts = {
            "policy": "policy",
            "version": "policy@0",
            "scenario_id": "s1",
            "scenario": {"question": "ä?"},
            "step": 1,
            "group": "g1",
            "opened": 10.0,
        }
        return Rollout(id=id, **{**facts, **changes})

    return make


@pytest.fixture
def make_call() -> Callable[..., Call]:
    """A finished call with exact tokens; logprobs are float32 values, so that they come back equal."""

    def make(id: str = "c1", **changes: Any) -> Call:
        facts: dict[str, Any] = {
            "rollout_id": "r1",
            "status": CallStatus.OK,
            "model": "gpt-4o-mini",
            "version": "policy@0",
            "node": Node(name="agent", step=2, run_id="run"),
            "request": {"messages": [{"role": "user", "content": "héllo \x00 \U0001f600"}], "temperature": 0},
            "prompt_token_ids": [1, 2, 2**31 - 1, 0],
            "choices": [
                Choice(index=0, message={"content": "a"}, finish_reason="stop", token_ids=[7, 8], logprobs=[-0.5, -2]),
                Choice(index=1, message={"tool_calls": []}, finish_reason="length", token_ids=[9], logprobs=[0.0]),
            ],
            "sampling": Sampling(temperature=1.0, top_k=5),
            "capture": CaptureLevel.TOKENS,
            "retry": 1,
            "started": 11.0,
            "finished": 12.0,
        }
        return Call(id=id, **{**facts, **changes})

    return make
