"""Which earlier call a request continues."""

import copy
import json
from typing import Any

import pytest
from art_backends.proxy import continuation
from art_backends.proxy.continuation import Answer, Chain, RolloutIndex, content_text
from art_backends.trajectories import Call, CallStatus, Choice
from hypothesis import given
from hypothesis import strategies as st

USER = {"role": "user", "content": "hi"}
MORE = {"role": "user", "content": "more"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def made(call_id: str, arguments: str = '{"a": 1, "b": [2]}', name: str = "f") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def call(call_id: str, messages: list[Any], *answers: dict[str, Any], **request: Any) -> Call:
    choices = [Choice(index=i, message=m, token_ids=[i + 1], logprobs=[0.0]) for i, m in enumerate(answers)]
    body = {"messages": messages, "tools": TOOLS, **request}
    return Call(id=call_id, status=CallStatus.OK, request=body, prompt_token_ids=[7], choices=choices)


def found(calls: list[Call], messages: list[Any], **request: Any) -> tuple[str, int, int] | None:
    match = RolloutIndex.of(calls).match({"messages": messages, "tools": TOOLS, **request})
    return match and (match.call.id, match.choice.index, match.position)


ASKED = said(None, made("x1"))
RESULT = {"role": "tool", "tool_call_id": "x1", "content": "3"}


def test_the_plain_case() -> None:
    assert found([call("c", [USER], said("hello"))], [USER, said("hello"), MORE]) == ("c", 0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        {**ASKED, "content": ""},
        {**ASKED, "content": [{"type": "text", "text": ""}]},
        {k: v for k, v in ASKED.items() if k != "content"},
        {**ASKED, "refusal": None, "annotations": [], "name": "agent", "reasoning_content": "because", "audio": None},
        said(None, made("x1", '{"b":[2],"a":1}')),
        said(None, made("x1", '{"b": [2.0], "a": 1.0}')),
        said(None, {**made("x1"), "index": 0}),
        said(None, {"function": {"arguments": {"a": 1, "b": [2]}, "name": "f"}, "id": "x1"}),
        said(None, made("made-up")),
    ],
)
def test_an_answer_as_clients_write_it_back(answer: dict[str, Any]) -> None:
    assert found([call("c", [USER], ASKED)], [USER, answer, RESULT]) == ("c", 0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        said("words", made("x1")),
        said(None, made("x1", '{"a": 2, "b": [2]}')),
        said(None, made("x1", '{"a": true, "b": [2]}')),
        said(None, made("x1", name="g")),
        said(None, made("x1"), made("x2")),
        said("hello"),
        {**ASKED, "role": "user"},
    ],
)
def test_an_edited_answer_is_no_continuation(answer: dict[str, Any]) -> None:
    assert found([call("c", [USER], ASKED)], [USER, answer, RESULT]) is None


def test_content_dropped_beside_tool_calls_needs_the_same_ids() -> None:
    calls = [call("c", [USER], said("I look.", made("x1")))]
    assert found(calls, [USER, said(None, made("x1")), RESULT]) == ("c", 0, 1)
    assert found(calls, [USER, said(None, made("y")), RESULT]) is None


def test_arguments_that_are_no_json_may_come_back_as_something_else() -> None:
    calls = [call("c", [USER], said(None, made("x1", '{"a": ')))]
    assert found(calls, [USER, said(None, made("x1", '{"a": ')), RESULT]) == ("c", 0, 1)
    assert found(calls, [USER, said(None, made("x1", "{}")), RESULT]) == ("c", 0, 1)
    assert found(calls, [USER, said(None, made("x2", "{}")), RESULT]) is None


def test_nothing_new_is_no_continuation() -> None:
    calls = [call("c", [USER], said("hello"))]
    assert found(calls, [USER, said("hello")]) is None
    assert found(calls, [USER]) is None
    assert found(calls, []) is None


@pytest.mark.parametrize(
    "history",
    [
        [{"role": "user", "content": "hi!"}],
        [{"role": "system", "content": "be good"}, USER],
        [{**USER, "name": "eve"}],
        [{"role": "system", "content": "hi"}],
    ],
)
def test_an_edited_history_is_a_new_branch(history: list[Any]) -> None:
    assert found([call("c", [USER], said("hello"))], [*history, said("hello"), MORE]) is None


def test_parts_of_text_are_joined_and_media_are_compared_whole() -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert found([call("c", [{"role": "user", "content": parts}], said("x"))], [USER, said("x"), MORE])
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:1"}}]}
    other = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:2"}}]}
    calls = [call("c", [image], said("x"))]
    assert found(calls, [copy.deepcopy(image), said("x"), MORE])
    assert found(calls, [other, said("x"), MORE]) is None
    assert content_text(image["content"]) is None


def test_other_tools_or_template_settings_are_a_new_branch() -> None:
    calls = [call("c", [USER], said("hello"), chat_template_kwargs={"enable_thinking": False})]
    messages = [USER, said("hello"), MORE]
    assert found(calls, messages, chat_template_kwargs={"enable_thinking": False})
    assert found(calls, messages) is None
    assert found(calls, messages, chat_template_kwargs={"enable_thinking": False}, tools=[]) is None
    assert found(calls, messages, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low") is None
    assert found(calls, messages, chat_template_kwargs={"enable_thinking": False}, temperature=0.3)


def test_the_longest_match_wins() -> None:
    second = [USER, said("hello"), MORE]
    calls = [call("a", [USER], said("hello")), call("b", second, said("yes")), call("c", [USER], said("no"))]
    assert found(calls, [*second, said("yes"), MORE]) == ("b", 0, 3)
    assert found(calls, [*second, said("edited"), MORE]) == ("a", 0, 1)


def test_the_right_choice_of_n() -> None:
    calls = [call("c", [USER], said("one"), said("two"), said(None, made("x1")), said(None, made("x2")))]
    assert found(calls, [USER, said("two"), MORE]) == ("c", 1, 1)
    assert found(calls, [USER, said(None, made("x2")), {**RESULT, "tool_call_id": "x2"}]) == ("c", 3, 1)
    assert found(calls, [USER, said("three"), MORE]) is None


def test_equal_answers_of_parallel_calls_are_told_apart_by_their_ids() -> None:
    calls = [call(name, [USER], said(None, made(name))) for name in ("a", "b", "c")]
    assert found(calls, [USER, said(None, made("b")), {**RESULT, "tool_call_id": "b"}]) == ("b", 0, 1)
    assert found(calls, [USER, said(None, made("z")), {**RESULT, "tool_call_id": "z"}]) in [(n, 0, 1) for n in "abc"]
    longer = [[USER, said(None, made(n)), {**RESULT, "tool_call_id": n}] for n in ("a", "b", "c")]
    calls += [call(f"{n}2", m, said("done")) for n, m in zip("abc", longer, strict=True)]
    assert found(calls, [*longer[1], said("done"), MORE]) == ("b2", 0, 3)


def test_results_of_parallel_tool_calls_belong_to_their_call() -> None:
    asked = said(None, made("p"), made("q", "{}", "g"))
    first, second = ({"role": "tool", "tool_call_id": i, "content": i} for i in "pq")
    calls = [call("c", [USER, asked, first, second], said("done"))]
    assert found(calls, [USER, asked, first, second, said("done"), MORE])
    swapped = [{**first, "tool_call_id": "q"}, {**second, "tool_call_id": "p"}]
    assert found(calls, [USER, asked, *swapped, said("done"), MORE]) is None


def test_calls_without_exact_ids_are_not_continued_but_known_as_the_models_own() -> None:
    bare = call("c", [USER], said("hello"))
    index = RolloutIndex.of([bare.model_copy(update={"prompt_token_ids": []})])
    messages = [USER, said("hello"), MORE, said("an example")]
    assert index.match({"messages": messages, "tools": TOOLS}) is None
    assert index.own({"messages": messages}) == {1}
    failed = RolloutIndex.of([bare.model_copy(update={"status": CallStatus.ERROR})])
    assert failed.own({"messages": messages}) == frozenset()


def test_adding_a_call_twice_changes_nothing() -> None:
    index = RolloutIndex()
    for _ in range(2):
        index.add(call("c", [USER], said("hello")))
    assert index.call("c") is not None
    assert len(next(iter(index._entries.values()))) == 1


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=4), st.sampled_from([None, 2]), st.booleans())
def test_any_way_to_write_arguments_is_the_same(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    mine = Answer.of(said(None, made("x", json.dumps(value))))
    backwards = dict(reversed(value.items()))
    theirs = json.dumps(backwards, indent=indent, ensure_ascii=ascii_only)
    assert mine.matches(Answer.of(said(None, made("y", theirs))))
    assert mine.key == Answer.of(said(None, made("y", theirs))).key


@given(JSON_VALUES, JSON_VALUES)
def test_different_arguments_never_match(one: Any, other: Any) -> None:
    same = json.dumps(one) == json.dumps(other)
    matches = Answer.of(said(None, made("x", json.dumps([one, 0])))).matches(
        Answer.of(said(None, made("x", json.dumps([other, 1]))))
    )
    assert not matches, same


def test_a_long_rollout_hashes_each_message_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 turns, each request with all messages before it, as new objects: the work grows with what is new."""
    hashed = 0
    digest = continuation._digest

    def counting(*parts: Any) -> bytes:
        nonlocal hashed
        hashed += 1
        return digest(*parts)

    monkeypatch.setattr(continuation, "_digest", counting)
    index, messages = RolloutIndex(), [USER]
    for turn in range(100):
        request = json.loads(json.dumps({"messages": messages, "tools": TOOLS}))
        match = index.match(request)
        assert (match.call.id if match else None) == (f"c{turn - 1}" if turn else None)
        assert len(index.own(request)) == turn
        answer = said(None, made(f"x{turn}"))
        index.add(call(f"c{turn}", request["messages"], answer))
        messages = [*messages, answer, {**RESULT, "tool_call_id": f"x{turn}", "content": str(turn)}]
    assert hashed <= 100 * 12


@given(st.lists(st.sampled_from([USER, MORE, said("a"), ASKED, RESULT]), max_size=6), st.integers(0, 6), st.booleans())
def test_links_do_not_depend_on_what_was_seen_before(messages: list[Any], cut: int, other_tools: bool) -> None:
    request = {"messages": messages, "tools": TOOLS}
    known = Chain.of({"messages": [*messages[:cut], MORE, said("b")], "tools": [] if other_tools else TOOLS})
    assert Chain.of(request, [known]).links == Chain.of(request).links
