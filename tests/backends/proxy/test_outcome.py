"""Outcomes from whole replies and from streams."""

import math
from typing import Any

import pytest
from art_backends.proxy.outcome import Assembler, Outcome
from art_backends.trajectories import CaptureLevel


def delta(index: int = 0, ids: list[int] | None = None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "delta": fields, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
        choice["logprobs"] = {"content": [{"logprob": -0.5} for _ in ids]}
    return {"choices": [choice]}


def assemble(*chunks: dict[str, Any], n: int = 1) -> Outcome:
    assembler = Assembler(n)
    for chunk in chunks:
        assembler.add(chunk)
    return assembler.outcome()


def call(index: int | None = None, **fields: Any) -> dict[str, Any]:
    function = {key: fields.pop(key) for key in ("name", "arguments") if key in fields}
    return {**({} if index is None else {"index": index}), **fields, "function": function}


PROMPT = {"prompt_token_ids": [1], "choices": []}


def test_parallel_tool_calls_are_joined_by_index() -> None:
    got = assemble(
        PROMPT,
        delta(role="assistant", content=""),
        delta(tool_calls=[call(0, id="a", type="function", name="f", arguments="")], ids=[1]),
        delta(tool_calls=[call(1, id="b", type="function", name="g")], ids=[2]),
        delta(tool_calls=[call(1, arguments='{"x":'), call(0, arguments="{}")], ids=[3]),
        delta(tool_calls=[call(1, arguments="1}")], ids=[4]),
        delta(ids=[5], finish="tool_calls"),
    )
    message = got.choices[0].message
    assert message["content"] is None
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("a", "f", "{}"),
        ("b", "g", '{"x":1}'),
    ]
    assert got.choices[0].token_ids == [1, 2, 3, 4, 5]
    assert (got.capture, got.complete) == (CaptureLevel.TOKENS, True)


def test_tool_calls_without_index_or_id() -> None:
    got = assemble(
        delta(tool_calls=[call(id="a", name="f", arguments="{")]),
        delta(tool_calls=[call(arguments="}")]),
        delta(tool_calls=[call(id="b", name="g")], finish="tool_calls"),
    )
    calls = got.choices[0].message["tool_calls"]
    assert [(c["id"], c["function"]["arguments"]) for c in calls] == [("a", "{}"), ("b", "")]


def test_choices_of_n_interleave() -> None:
    got = assemble(
        PROMPT,
        delta(1, content="b", ids=[3]),
        delta(0, content="a", ids=[1], finish="stop"),
        delta(1, content="B", ids=[4], finish="length"),
        n=2,
    )
    assert [(c.index, c.message["content"], c.token_ids, c.finish_reason) for c in got.choices] == [
        (0, "a", [1], "stop"),
        (1, "bB", [3, 4], "length"),
    ]
    assert got.complete
    assert not assemble(PROMPT, delta(0, content="a", finish="stop"), n=2).complete


def whole(**choice: Any) -> Outcome:
    base = {"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "token_ids": [1, 2]}
    base["logprobs"] = {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}
    top = choice.pop("top", {})
    return assemble({"prompt_token_ids": [7], "choices": [{**base, **choice}], **top})


def test_whole_replies_and_their_capture_level() -> None:
    assert whole().capture is CaptureLevel.TOKENS
    assert whole().choices[0].message == {"role": "assistant", "content": "x"}
    assert whole(logprobs=None).capture is CaptureLevel.IDS
    assert whole(logprobs={"content": [{"logprob": -1.0}]}).capture is CaptureLevel.IDS
    assert whole(logprobs={"content": [{"logprob": math.nan}, {"logprob": -1.0}]}).capture is CaptureLevel.IDS
    assert whole(logprobs={"content": [{"logprob": None}, {"logprob": -1.0}]}).capture is CaptureLevel.IDS
    assert whole(token_ids=None).capture is CaptureLevel.TEXT
    assert whole(token_ids=["1", "2"]).capture is CaptureLevel.TEXT
    assert whole(top={"prompt_token_ids": None}).capture is CaptureLevel.TEXT
    assert whole(top={"usage": {"completion_tokens": 3}}).capture is CaptureLevel.TEXT  # one is missing
    assert whole(prompt_token_ids=[8]).capture is CaptureLevel.TEXT  # two prompts
    ids_only = whole(logprobs=None)
    assert (ids_only.choices[0].token_ids, ids_only.choices[0].logprobs) == ([1, 2], [])
    assert not whole(finish_reason=None).complete


@pytest.mark.parametrize("empty", [{}, {"choices": None}, {"choices": []}])
def test_nothing_is_not_complete(empty: dict[str, Any]) -> None:
    got = assemble(empty)
    assert (got.complete, got.choices, got.capture) == (False, [], CaptureLevel.TEXT)
